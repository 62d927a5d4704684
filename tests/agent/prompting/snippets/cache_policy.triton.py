"""entry: norm(x: float32[9,1000]) -> float32[9,1000]
expect: x * (x.square().mean(1, keepdim=True) + 1e-6).rsqrt()
"""

import torch
import triton
import triton.language as tl

# SNIPPET


def norm(x):
    y = torch.empty_like(x)
    normalise[(4,)](x, y, x.shape[0], x.shape[1], TILE=256)
    return y
