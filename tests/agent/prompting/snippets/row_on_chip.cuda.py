"""entry: peaks(x: float32[64,256]) -> float32[64,2]
expect: torch.stack([x.amax(1), torch.exp2(x - x.amax(1, keepdim=True)).sum(1)], 1)
"""

import torch
from kagent_sandbox.lang import cuda_kernel

SOURCE = r"""
# SNIPPET
extern "C" __global__ void __launch_bounds__(256) peaks(const float* x, float2* y) {
  __shared__ float2 shared[8];
  float2 mine = {x[blockIdx.x * 256 + threadIdx.x], 1.0f};
  for (int d = 16; d > 0; d /= 2) {
    const float2 other = {__shfl_xor_sync(0xffffffff, mine.x, d),
                          __shfl_xor_sync(0xffffffff, mine.y, d)};
    const float peak = fmaxf(mine.x, other.x);
    mine = {peak, mine.y * exp2f(mine.x - peak) + other.y * exp2f(other.x - peak)};
  }
  const float2 all = merge_block<8>(mine, shared);
  if (threadIdx.x == 0) y[blockIdx.x] = all;
}
"""


def peaks(x):
    y = torch.empty(x.shape[0], 2, dtype=torch.float32, device=x.device)
    cuda_kernel("peaks", SOURCE).launch((x.shape[0],), (256,), x, y)
    return y
