"""entry: twice(x: float32[1003]) -> float32[1003]
expect: x * 2
"""

import torch
from kagent_sandbox.lang import cpp_kernel

SOURCE = r"""
# SNIPPET
"""


def twice(x):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    cpp_kernel("doubled", SOURCE, defines={"LANES": 8})(x, y, x.numel())
    return y
