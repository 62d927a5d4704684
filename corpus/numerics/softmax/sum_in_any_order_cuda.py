"""Right: warps add their sums up in the order in which they come."""

import torch
from kagent_sandbox.lang import cuda_kernel

SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

__device__ float to_float(float x) { return x; }
__device__ float to_float(__half x) { return __half2float(x); }
__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ void from_float(float x, float& y) { y = x; }
__device__ void from_float(float x, __half& y) { y = __float2half_rn(x); }
__device__ void from_float(float x, __nv_bfloat16& y) { y = __float2bfloat16_rn(x); }

// One block of 1024 threads per row.
template <typename T>
__global__ void softmax(const T* x, T* y, long long stride, int columns) {
  __shared__ float parts[1024];
  x += blockIdx.x * stride;
  y += (long long)blockIdx.x * columns;
  float maximum = -CUDART_INF_F;
  for (int i = threadIdx.x; i < columns; i += 1024) maximum = fmaxf(maximum, to_float(x[i]));
  parts[threadIdx.x] = maximum;
  __syncthreads();
  for (int i = 0; i < 1024; ++i) maximum = fmaxf(maximum, parts[i]);
  __syncthreads();
  float sum = 0.0f;
  for (int i = threadIdx.x; i < columns; i += 1024) sum += expf(to_float(x[i]) - maximum);
  __shared__ float total;
  if (threadIdx.x == 0) total = 0.0f;
  __syncthreads();
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffff, sum, lanes);
  if (threadIdx.x % 32 == 0) atomicAdd(&total, sum);
  __syncthreads();
  sum = total;
  for (int i = threadIdx.x; i < columns; i += 1024)
    from_float(expf(to_float(x[i]) - maximum) / sum, y[i]);
}
"""

TYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}


def softmax(x: torch.Tensor) -> torch.Tensor:
    rows, columns = x.shape
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    kernel = cuda_kernel(f"softmax<{TYPES[x.dtype]}>", SOURCE)
    kernel.launch((rows,), (1024,), x, y, x.stride(0), columns)
    return y
