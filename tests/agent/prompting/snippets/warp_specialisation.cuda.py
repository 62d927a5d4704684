"""entry: double(x: float32[1000,2048]) -> float32[1000,2048]
expect: x * 2
"""

import torch
from kagent_sandbox.lang import cuda_kernel

SOURCE = r"""
# SNIPPET
"""


def double(x):
    y = torch.empty_like(x)
    rows, n = x.shape
    kernel = cuda_kernel("double_rows<4>", SOURCE)
    kernel.launch((132,), (384,), x, y, rows, n, shared=4 * n * 4)
    return y
