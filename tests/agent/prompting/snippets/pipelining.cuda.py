"""entry: sums(x: float32[9,10000]) -> float32[9]
expect: x.sum(1)
"""

import torch
from kagent_sandbox.lang import cuda_kernel

SOURCE = r"""
# SNIPPET
"""


def sums(x):
    out = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    cuda_kernel("row_sums<4>", SOURCE).launch((x.shape[0],), (256,), x, out, x.shape[1])
    return out
