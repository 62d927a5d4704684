"""entry: powers(x: float32[1003]) -> float32[1003]
expect: torch.exp(-x.abs())
"""

import torch
from kagent_sandbox.lang import cpp_kernel

SOURCE = r"""
# SNIPPET
"""


def powers(x):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    cpp_kernel("exponentials", SOURCE, defines={"LANES": 8})(x, y, x.numel())
    return y
