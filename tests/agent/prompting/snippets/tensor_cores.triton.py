"""entry: matmul(a: bfloat16[256,512], b: bfloat16[384,512]) -> bfloat16[256,384]
expect: a @ b.T
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

# SNIPPET


def matmul(a, b):
    c = torch.empty(a.shape[0], b.shape[0], dtype=a.dtype, device=a.device)
    product[(a.shape[0] // 128, b.shape[0] // 128)](
        TensorDescriptor.from_tensor(a, [128, 64]),
        TensorDescriptor.from_tensor(b, [128, 64]),
        TensorDescriptor.from_tensor(c, [128, 128]),
        a.shape[1],
        BM=128,
        BN=128,
        BK=64,
        num_warps=8,
        num_stages=3,
    )
    return c
