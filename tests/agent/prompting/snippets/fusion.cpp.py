"""entry: add_norm(x: float32[64,1000], r: float32[64,1000]) -> float32[64,1000]
expect: (lambda v: v * (v.square().mean(1, keepdim=True) + 1e-6).rsqrt())(x + r)
"""

import torch
from kagent_sandbox.lang import cpp_kernel

SOURCE = r"""
# SNIPPET
"""


def add_norm(x, r):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    cpp_kernel("add_normalise", SOURCE)(x, r, y, x.shape[0], x.shape[1])
    return y
