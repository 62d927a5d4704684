"""entry: double(x: bfloat16[64,1000]) -> bfloat16[64,1000]
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
    kernel = cuda_kernel("double_rows", SOURCE)
    kernel.launch((x.shape[0],), (256,), x, y, x.stride(0), x.shape[1])
    return y
