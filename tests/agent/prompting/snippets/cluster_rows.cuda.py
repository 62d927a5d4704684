"""entry: scaled(x: float32[41,16384]) -> float32[41,16384]
expect: torch.softmax(x, 1) * 3
error: 8
"""

import torch
from kagent_sandbox.lang import cuda_kernel

SOURCE = r"""
# SNIPPET
extern "C" __global__ void prepare(float* scale) { *scale = 3.0f; }
"""


def scaled(x):
    y = torch.empty_like(x)
    scale = torch.empty((), dtype=torch.float32, device=x.device)
    cuda_kernel("prepare", SOURCE).launch((1,), (1,), scale)
    kernel = cuda_kernel("softmax_ring<4, 8, 4, 3>", SOURCE)
    stages = 3 * 256 * 4 * 16
    kernel.launch(
        (4 * 8,), (256,), x, scale, y, x.shape[0], shared=stages, cluster=(4,), pdl=True
    )
    return y
