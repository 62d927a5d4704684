"""entry: sums(x: float32[3,10001]) -> float32[3]
expect: x.sum(1)
"""

import torch
from kagent_sandbox.lang import cuda_kernel

SOURCE = r"""
# SNIPPET
"""


def sums(x):
    rows, n = x.shape
    parts = torch.empty(rows, 5, dtype=torch.float32, device=x.device)
    arrived = torch.zeros(rows, dtype=torch.int32, device=x.device)
    out = torch.empty(rows, dtype=torch.float32, device=x.device)
    kernel = cuda_kernel("row_sum", SOURCE)
    kernel.launch((5, rows), (256,), x, parts, arrived, out, n, -(-n // 5))
    return out
