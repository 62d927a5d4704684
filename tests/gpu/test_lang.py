"""Kernels of `kagent_sandbox.lang` on real tensors, outside of the sandbox."""

import pytest
import torch
from kagent_sandbox.lang import cuda_kernel, tensor_map

pytestmark = pytest.mark.gpu


def test_an_instance_of_a_template_with_scalars():
    k = cuda_kernel(
        "axpy<4>",
        "template <int N> __global__ void axpy(const float* x, float* y, float a, long long n) {\n"
        "  for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = a * x[i] + N;\n}",
    )
    x = torch.randn(1000, device="cuda")
    y = torch.empty_like(x)
    k.launch(1, 256, x, y, 3, x.numel())
    torch.testing.assert_close(y, 3 * x + 4)


def test_shared_memory_of_another_block_of_the_cluster():
    k = cuda_kernel(
        "swap",
        """
#include <cooperative_groups.h>
namespace cg = cooperative_groups;
extern "C" __global__ void swap(const float* x, float* y, int n) {
  extern __shared__ float s[];
  auto cluster = cg::this_cluster();
  int base = blockIdx.x * n;
  for (int i = threadIdx.x; i < n; i += blockDim.x) s[i] = x[base + i];
  cluster.sync();
  const float* other = cluster.map_shared_rank(s, cluster.block_rank() ^ 1);
  for (int i = threadIdx.x; i < n; i += blockDim.x) y[base + i] = other[i];
  cluster.sync();
}
""",
    )
    n = 25_000  # 100 KB a block
    x = torch.randn(8, n, device="cuda")
    y = torch.empty_like(x)
    k.launch(8, 512, x, y, n, shared=4 * n, cluster=2)
    assert torch.equal(y, x.view(4, 2, n).flip(1).reshape(8, n))


def test_a_tensor_map_made_on_the_host():
    k = cuda_kernel(
        "tile",
        """
#include <cuda.h>
#include <cstdint>
extern "C" __global__ void tile(const __grid_constant__ CUtensorMap map, float* y, int row,
                                int col) {
  __shared__ alignas(128) float s[16 * 32];
  __shared__ alignas(8) uint64_t bar;
  unsigned b = __cvta_generic_to_shared(&bar), t = __cvta_generic_to_shared(s);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(b));
    asm volatile("fence.mbarrier_init.release.cluster;");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 2048;" ::"r"(b));
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3}], [%4];" ::"r"(t), "l"(&map), "r"(col), "r"(row), "r"(b) : "memory");
  }
  __syncthreads();
  asm volatile(
      "{\\n.reg .pred p;\\n"
      "W: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0;\\n@p bra D;\\nbra W;\\nD:\\n}"
      ::"r"(b) : "memory");
  for (int i = threadIdx.x; i < 512; i += blockDim.x) y[i] = s[i];
}
""",
    )
    x = torch.randn(100, 200, device="cuda")
    y = torch.empty(16, 32, device="cuda")
    k.launch(1, 128, tensor_map(x, (16, 32)), y, 50, 8)
    torch.testing.assert_close(y, x[50:66, 8:40], rtol=0, atol=0)


def test_a_wrong_device_is_said():
    k = cuda_kernel("k", 'extern "C" __global__ void k(float* x) { x[0] = 1; }')
    with pytest.raises(TypeError, match="move it to cuda"):
        k.launch(1, 1, torch.zeros(1))
