"""entry: copies(x: float32[1024]) -> float32[1024], float32[1024]
expect: (x, x)
"""

import torch
from kagent_sandbox.lang import cuda_kernel

SOURCE = r"""
# SNIPPET
extern "C" __global__ void copy(const uint4* x, uint4* y, uint4* z) {
  __shared__ __align__(16) uint4 stage[256];
  __shared__ unsigned long long full;
  const unsigned barrier = (unsigned)__cvta_generic_to_shared(&full);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 4096;" ::"r"(barrier)
                 : "memory");
    copy_keep((unsigned)__cvta_generic_to_shared(stage), x, 4096, barrier, keep());
  }
  __syncthreads();
  asm volatile(
      "{ .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n"
      "@!done bra again; }" ::"r"(barrier) : "memory");
  y[threadIdx.x] = load_keep(x + threadIdx.x, keep());
  z[threadIdx.x] = stage[threadIdx.x];
}
"""


def copies(x):
    y, z = torch.empty_like(x), torch.empty_like(x)
    cuda_kernel("copy", SOURCE).launch((1,), (256,), x, y, z)
    return y, z
