"""entry: triple(x: float32[1000,1000]) -> float32[1000,1000]
expect: x * 3
loads: 16
"""

import torch
from kagent_sandbox.lang import cuda_kernel

SOURCE = r"""
# SNIPPET
"""


def triple(x):
    y = torch.empty_like(x)
    words = x.numel() // 4
    kernel = cuda_kernel("scale<4>", SOURCE)
    kernel.launch((-(-words // 1024),), (256,), x, y, words, 3.0)
    return y
