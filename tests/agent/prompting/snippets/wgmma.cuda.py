"""entry: matmul(a: bfloat16[256,512], b: bfloat16[192,512]) -> float32[256,192]
expect: a @ b.T
"""

import torch
from kagent_sandbox.lang import cuda_kernel, tensor_map

SOURCE = r"""
# SNIPPET
"""


def matmul(a, b):
    c = torch.empty(a.shape[0], b.shape[0], dtype=torch.float32, device=a.device)
    cuda_kernel("product", SOURCE).launch(
        (a.shape[0] // 64, b.shape[0] // 64),
        (128,),
        tensor_map(a, (64, 64), swizzle=128),
        tensor_map(b, (64, 64), swizzle=128),
        c,
        b.shape[0],
        a.shape[1],
    )
    return c
