"""entry: normed(x: float32[9,1001]) -> float32[9,1001]
expect: x / x.sum(1, keepdim=True)
inputs: positive
"""

import torch
from kagent_sandbox.lang import cpp_kernel

SOURCE = r"""
# SNIPPET
"""


def normed(x):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    cpp_kernel("shares", SOURCE)(x, y, x.shape[0], x.shape[1])
    return y
