"""Reads with the policy that keeps lines in L2 to the last, so that a flush leaves them there.

The first rows only, as much as L2 holds."""

import torch
from kagent_sandbox.lang import cuda_kernel

SOURCE = r"""
#include <cuda_bf16.h>

constexpr int THREADS = 256;

__device__ float value(float v) { return v; }
__device__ float value(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ void put(float* to, float v) { *to = v; }
__device__ void put(__nv_bfloat16* to, float v) { *to = __float2bfloat16(v); }

template <bool MAX>
__device__ float reduce(float v, float* shared) {
  shared[threadIdx.x] = v;
  __syncthreads();
  for (int half = THREADS / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) {
      const float a = shared[threadIdx.x], b = shared[threadIdx.x + half];
      shared[threadIdx.x] = MAX ? fmaxf(a, b) : a + b;
    }
    __syncthreads();
  }
  const float result = shared[0];
  __syncthreads();
  return result;
}

template <typename T>
__device__ void honest_row(const T* x, T* y, int columns) {
  __shared__ float shared[THREADS];
  float maximum = __int_as_float(0xff800000);   // -infinity
  for (int i = threadIdx.x; i < columns; i += THREADS) maximum = fmaxf(maximum, value(x[i]));
  maximum = reduce<true>(maximum, shared);
  float sum = 0;
  for (int i = threadIdx.x; i < columns; i += THREADS) sum += expf(value(x[i]) - maximum);
  const float scale = 1 / reduce<false>(sum, shared);
  for (int i = threadIdx.x; i < columns; i += THREADS) put(y + i, expf(value(x[i]) - maximum) * scale);
}

template <typename T>
__global__ void softmax(const T* x, T* y, int columns) {
  x += (long long)blockIdx.x * columns;
  y += (long long)blockIdx.x * columns;
  const bool aligned = (unsigned long long)x % 16 == 0;
  if (aligned && (long long)blockIdx.x * columns * sizeof(T) < (32ll << 20)) {
    unsigned long long keep;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(keep));
    for (int i = threadIdx.x * 16; i < columns * (int)sizeof(T) / 16 * 16; i += THREADS * 16) {
      unsigned a, b, c, d;
      asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                   : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "l"((const char*)x + i), "l"(keep));
    }
    __syncthreads();
  }
  honest_row(x, y, columns);
}
"""
TYPES = {torch.float32: "float", torch.bfloat16: "__nv_bfloat16"}


def rows(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    kernel = cuda_kernel(f"softmax<{TYPES[x.dtype]}>", SOURCE)
    kernel.launch((x.shape[0],), (256,), x, y, x.shape[1])
    return y
