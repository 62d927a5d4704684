"""entry: peaks(x: bfloat16[64,8]) -> float32[64]
expect: x.amax(1)
"""

import torch
from kagent_sandbox.lang import cuda_kernel

SOURCE = r"""
# SNIPPET
extern "C" __global__ void peaks(const uint4* x, float* y) {
  const unsigned top = pack(peak_of(x[threadIdx.x]), 0.0f);
  y[threadIdx.x] = unpack(top).x;
}
"""


def peaks(x):
    y = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    cuda_kernel("peaks", SOURCE).launch((1,), (64,), x, y)
    return y
