"""entry: powers(x: float32[1024]) -> float32[1024], float32[1024]
expect: (torch.exp2(x), torch.exp2(x))
"""

import torch
from kagent_sandbox.lang import cuda_kernel

SOURCE = r"""
# SNIPPET
extern "C" __global__ void powers(const float* x, float* y, float* z) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  y[i] = exp2_fast(x[i]);
  z[i] = exp2_polynomial(x[i]);
}
"""


def powers(x):
    y, z = torch.empty_like(x), torch.empty_like(x)
    cuda_kernel("powers", SOURCE).launch((4,), (256,), x, y, z)
    return y, z
