"""entry: scaled(x: float32[1024]) -> float32[1024]
expect: x / 7
"""

import torch
from kagent_sandbox.lang import cuda_kernel

SOURCE = r"""
# SNIPPET
"""


def scaled(x):
    y = torch.empty_like(x)
    count = torch.empty((), dtype=torch.float32, device=x.device)
    cuda_kernel("first", SOURCE).launch((1,), (32,), count, 7)
    cuda_kernel("second", SOURCE).launch((4,), (256,), x, count, y, pdl=True)
    return y
