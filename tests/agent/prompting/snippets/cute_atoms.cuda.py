"""entry: matmul(a: bfloat16[256,512], b: bfloat16[384,512]) -> float32[256,384]
expect: a @ b.T
spills: 0
"""

import torch
from kagent_sandbox.lang import cuda_kernel, tensor_map

SOURCE = r"""
# SNIPPET
"""


def matmul(a, b):
    c = torch.empty(a.shape[0], b.shape[0], dtype=torch.float32, device=a.device)
    cuda_kernel("multiply", SOURCE).launch(
        (a.shape[0] // 128, b.shape[0] // 128),
        (256,),
        tensor_map(a, (128, 64), swizzle=128),
        tensor_map(b, (128, 64), swizzle=128),
        c,
        b.shape[0],
        a.shape[1],
        shared=2 * 3 * 128 * 64 * 2,
    )
    return c
