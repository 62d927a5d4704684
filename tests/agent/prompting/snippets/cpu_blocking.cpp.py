"""entry: matmul(a: float32[12,300], b: float32[300,64]) -> float32[12,64]
expect: a @ b
error: 8
"""

import torch
from kagent_sandbox.lang import cpp_kernel

SOURCE = r"""
# SNIPPET
"""


def matmul(a, b):
    c = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    kernel = cpp_kernel("product", SOURCE, defines={"LANES": 8, "ROWS": 6, "DEPTH": 128})
    kernel(a, b, c, a.shape[0], b.shape[1], a.shape[1])
    return c
