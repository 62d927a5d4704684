"""entry: center(x: float32[1000,2048]) -> float32[1000,2048]
expect: x - x.mean(1, keepdim=True)
"""

import torch
from kagent_sandbox.lang import cuda_kernel

SOURCE = r"""
# SNIPPET
"""


def center(x):
    y = torch.empty_like(x)
    rows, n = x.shape
    kernel = cuda_kernel("center_rows<3>", SOURCE)
    kernel.launch((264,), (256,), x, y, rows, n, shared=3 * n * 4)
    return y
