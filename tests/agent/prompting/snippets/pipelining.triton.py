"""entry: dots(a: float32[9,1000], b: float32[9,1000]) -> float32[9]
expect: (a * b).sum(1)
"""

import torch
import triton
import triton.language as tl

# SNIPPET


def dots(a, b):
    out = torch.empty(a.shape[0], dtype=torch.float32, device=a.device)
    row_dot[(a.shape[0],)](a, b, out, a.shape[1], TILE=256, STAGES=3)
    return out
