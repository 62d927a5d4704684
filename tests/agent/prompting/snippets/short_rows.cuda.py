"""entry: softmax(x: float32[33,1024]) -> float32[33,1024]
expect: torch.softmax(x, 1)
loads: 16
"""

import torch
from kagent_sandbox.lang import cuda_kernel

SOURCE = r"""
# SNIPPET
"""


def softmax(x):
    y = torch.empty_like(x)
    cuda_kernel("softmax_short<8>", SOURCE).launch((9,), (128,), x, y, x.shape[0])
    return y
