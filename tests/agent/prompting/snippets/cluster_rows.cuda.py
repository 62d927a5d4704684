"""entry: lse(x: float32[7,2048]) -> float32[7]
expect: torch.logsumexp(x, 1)
"""

import torch
from kagent_sandbox.lang import cuda_kernel

SOURCE = r"""
# SNIPPET
extern "C" __global__ void __launch_bounds__(128) lse(const float* x, float* y) {
  const int row = blockIdx.x / 4;
  float2 mine = {-3.0e38f, 0.0f};
  for (int i = 0; i < 4; ++i) {
    const float v = x[row * 2048 + (cluster_rank() * 4 + i) * 128 + threadIdx.x];
    const float peak = fmaxf(mine.x, v);
    mine = {peak, mine.y * __expf(mine.x - peak) + __expf(v - peak)};
  }
  for (int d = 16; d > 0; d /= 2) {
    const float2 other = {__shfl_xor_sync(0xffffffff, mine.x, d),
                          __shfl_xor_sync(0xffffffff, mine.y, d)};
    const float peak = fmaxf(mine.x, other.x);
    mine = {peak, mine.y * __expf(mine.x - peak) + other.y * __expf(other.x - peak)};
  }
  const float2 all = merge_cluster<4, 4>(mine);
  if (cluster_rank() == 0 && threadIdx.x == 0) y[row] = all.x + logf(all.y);
}
"""


def lse(x):
    y = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    cuda_kernel("lse", SOURCE).launch((x.shape[0] * 4,), (128,), x, y, cluster=(4,))
    return y
