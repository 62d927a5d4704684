"""entry: weighted(x: float32[9,1000], y: float32[1000]) -> float32[9]
expect: (torch.softmax(x * math.log(2), 1) * y).sum(1)
error: 100
"""

import torch
import triton
import triton.language as tl


# SNIPPET


def weighted(x, y):
    out = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    weighted_sums[(1,)](x, y, out, x.shape[0], x.shape[1], R=16, C=128)
    return out
