"""entry: turned(x: float32[100,70]) -> float32[70,100]
expect: x.T
"""

import torch
from kagent_sandbox.lang import cuda_kernel

SOURCE = r"""
# SNIPPET
"""


def turned(x):
    m, n = x.shape
    y = torch.empty(n, m, dtype=x.dtype, device=x.device)
    kernel = cuda_kernel("transpose", SOURCE)
    kernel.launch((-(-n // 32), -(-m // 32)), (256,), x, y, m, n)
    return y
