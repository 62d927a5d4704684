"""entry: sums(x: float32[3,10001]) -> float32[3]
expect: x.sum(1)
"""

import torch
from kagent_sandbox.lang import cpp_kernel

SOURCE = r"""
# SNIPPET
"""


def sums(x):
    rows, n = x.shape
    parts = torch.empty(rows * 8 * 16, dtype=torch.float32, device=x.device)
    y = torch.empty(rows, dtype=torch.float32, device=x.device)
    cpp_kernel("row_sums", SOURCE, defines={"PARTS": 8})(x, parts, y, rows, n)
    return y
