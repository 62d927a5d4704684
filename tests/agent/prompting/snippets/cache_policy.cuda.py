"""entry: copy(x: float32[1024]) -> float32[1024]
expect: x
loads: 16
"""

import torch
from kagent_sandbox.lang import cuda_kernel

SOURCE = r"""
# SNIPPET
extern "C" __global__ void copy(const uint4* x, uint4* y) {
  y[threadIdx.x] = load_keep(x + threadIdx.x, keep());
}
"""


def copy(x):
    y = torch.empty_like(x)
    cuda_kernel("copy", SOURCE).launch((1,), (256,), x, y)
    return y
