"""entry: double(x: float32[300,2000]) -> float32[300,2000]
expect: x * 2
loads: 16
"""

import torch
from kagent_sandbox.lang import cuda_kernel

SOURCE = r"""
# SNIPPET
"""


def double(x):
    y = torch.empty_like(x)
    cuda_kernel("double_rows<2>", SOURCE).launch((132,), (256,), x, y, x.shape[0], x.shape[1] // 4)
    return y
