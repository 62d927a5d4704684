"""entry: center(x: float32[300,8192]) -> float32[300,8192]
expect: x - x.mean(1, keepdim=True)
"""

import torch
from kagent_sandbox.lang import cuda_kernel

SOURCE = r"""
# SNIPPET
"""


def center(x):
    y = torch.empty_like(x)
    resident = 2 * torch.cuda.get_device_properties(x.device).multi_processor_count
    kernel = cuda_kernel("center_rows<4>", SOURCE)
    kernel.launch((x.shape[0],), (512,), x, y, x.shape[0], resident // 2, resident)
    return y
