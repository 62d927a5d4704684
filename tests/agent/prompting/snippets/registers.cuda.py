"""entry: sums(x: bfloat16[64,2048]) -> float32[64,32]
expect: x.reshape(64, 32, 64).sum(2)
"""

import torch
from kagent_sandbox.lang import cuda_kernel

SOURCE = r"""
# SNIPPET
extern "C" __global__ void __launch_bounds__(32) sums(const uint4* x, float* y) {
  uint4 words[8];
  for (int i = 0; i < 8; ++i) words[i] = x[(blockIdx.x * 32 + threadIdx.x) * 8 + i];
  y[blockIdx.x * 32 + threadIdx.x] = sum_of(words);
}
"""


def sums(x):
    y = torch.empty(x.shape[0], 32, dtype=torch.float32, device=x.device)
    cuda_kernel("sums", SOURCE).launch((x.shape[0],), (32,), x, y)
    return y
