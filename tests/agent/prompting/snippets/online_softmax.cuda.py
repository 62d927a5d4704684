"""entry: lse(x: float32[64,1024]) -> float32[64]
expect: torch.logsumexp(x, 1)
"""

import torch
from kagent_sandbox.lang import cuda_kernel

SOURCE = r"""
# SNIPPET
extern "C" __global__ void __launch_bounds__(32) lse(const float* x, float* y) {
  float peak = -3.0e38f, total = 0.0f;
  for (int i = threadIdx.x * 8; i < 1024; i += 256) {
    float v[8];
    for (int k = 0; k < 8; ++k) v[k] = x[blockIdx.x * 1024 + i + k];
    fold(peak, total, v);
  }
  for (int d = 16; d > 0; d /= 2) {
    const float p = __shfl_xor_sync(0xffffffff, peak, d), t = __shfl_xor_sync(0xffffffff, total, d);
    const float top = fmaxf(peak, p);
    total = total * exp2f((peak - top) * 1.44269504f) + t * exp2f((p - top) * 1.44269504f);
    peak = top;
  }
  if (threadIdx.x == 0) y[blockIdx.x] = peak + logf(total);
}
"""


def lse(x):
    y = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    cuda_kernel("lse", SOURCE).launch((x.shape[0],), (32,), x, y)
    return y
