"""entry: matmul(a: bfloat16[16,16], b: bfloat16[8,16]) -> float32[16,8]
expect: a @ b.T
"""

import torch
from kagent_sandbox.lang import cuda_kernel

SOURCE = r"""
#include <cuda_bf16.h>
# SNIPPET
extern "C" __global__ void __launch_bounds__(32)
matmul(const __nv_bfloat16* a, const __nv_bfloat16* b, float* c) {
  __shared__ __align__(16) __nv_bfloat16 as[16 * 16];
  const int lane = threadIdx.x;
  for (int i = lane; i < 256; i += 32) as[i] = a[i];
  __syncwarp();
  unsigned fragment[4];
  load_matrices(fragment, as + lane % 16 * 16 + lane / 16 * 8);
  const int g = lane / 4, t = lane % 4 * 2;
  const unsigned b0 = *reinterpret_cast<const unsigned*>(b + g * 16 + t);
  const unsigned b1 = *reinterpret_cast<const unsigned*>(b + g * 16 + t + 8);
  float acc[4] = {};
  multiply_add(acc, fragment, b0, b1);
  c[g * 8 + t] = acc[0];
  c[g * 8 + t + 1] = acc[1];
  c[(g + 8) * 8 + t] = acc[2];
  c[(g + 8) * 8 + t + 1] = acc[3];
}
"""


def matmul(a, b):
    c = torch.empty(16, 8, dtype=torch.float32, device=a.device)
    cuda_kernel("matmul", SOURCE).launch((1,), (32,), a, b, c)
    return c
