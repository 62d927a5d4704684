"""entry: double(x: bfloat16[64,1003], z: bfloat16[9,1000], t: bfloat16[5,3]) ->
    bfloat16[64,1003], bfloat16[9,1000], bfloat16[9,999], bfloat16[5,3]
expect: (x * 2, z * 2, z[:, 1:] * 2, t * 2)
"""

import torch
from kagent_sandbox.lang import cuda_kernel

SOURCE = r"""
# SNIPPET
"""


def rows(x):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kernel = cuda_kernel("double_rows", SOURCE)
    kernel.launch((x.shape[0],), (256,), x, y, x.stride(0), x.shape[1])
    return y


def double(x, z, t):
    return rows(x), rows(z), rows(z[:, 1:]), rows(t)
