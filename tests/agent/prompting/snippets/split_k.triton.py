"""entry: parts(a: float16[70,300], b: float16[50,300]) -> float32[2,70,50]
expect: torch.stack([a[:, :160] @ b[:, :160].T, a[:, 160:] @ b[:, 160:].T])
"""

import torch
import triton
import triton.language as tl


# SNIPPET


def parts(a, b):
    m, k = a.shape
    n = b.shape[0]
    part = torch.empty(2, m, n, dtype=torch.float32, device=a.device)
    split_product[(2, 1, 2)](a, b, part, m, n, k, 160, BM=64, BN=64, BK=32)
    return part
