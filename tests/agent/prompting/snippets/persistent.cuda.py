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
    kernel = cuda_kernel("center_rows<2, 3>", SOURCE)
    kernel.launch((132,), (256,), x, y, x.shape[0], shared=3 * 2048 * 4)
    return y
