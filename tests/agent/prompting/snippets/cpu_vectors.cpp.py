"""entry: peaks(x: float32[9,1001]) -> float32[9]
expect: x.amax(1)
"""

import torch
from kagent_sandbox.lang import cpp_kernel

SOURCE = r"""
# SNIPPET
"""


def peaks(x):
    y = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    kernel = cpp_kernel("row_peaks", SOURCE, defines={"LANES": 8, "UNROLL": 4})
    kernel(x, y, x.shape[0], x.shape[1])
    return y
