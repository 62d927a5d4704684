"""entry: mean(x: float32[50,1000]) -> float32[]
expect: x.mean()
"""

import torch
import triton
import triton.language as tl


# SNIPPET


def mean(x):
    rows, n = x.shape
    part = torch.empty(rows, dtype=torch.float32, device=x.device)
    arrived = torch.zeros((), dtype=torch.int32, device=x.device)
    out = torch.empty((), dtype=torch.float32, device=x.device)
    row_means_and_mean[(rows,)](x, part, out, arrived, rows, n, BLOCK=1024, ROWS=32)
    return out
