"""Sums of a block are read before all threads have written theirs."""

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

__device__ float block_sum(float mine, float* parts) {
  parts[threadIdx.x] = mine;
  __syncthreads();
  for (int half = 512; half > 0; half /= 2) {
    if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
  }
  __syncthreads();
  mine = parts[0];
  __syncthreads();
  return mine;
}

// One block of 1024 threads per row; each counts for itself the rows that count.
template <typename T>
__global__ void loss_and_gradient(const T* logits, const long long* target, float* losses, T* grad,
                                  long long stride, int rows, int columns, long long ignore_index) {
  __shared__ float parts[1024];
  const long long row = blockIdx.x, t = target[row];
  logits += row * stride;
  grad += row * columns;
  if (t == ignore_index) {
    for (int i = threadIdx.x; i < columns; i += 1024) from_float(0.0f, grad[i]);
    if (threadIdx.x == 0) losses[row] = 0.0f;
    return;
  }
  float mine = 0.0f;
  for (int i = threadIdx.x; i < rows; i += 1024) mine += target[i] != ignore_index;
  const float count = block_sum(mine, parts);
  float maximum = -CUDART_INF_F;
  for (int i = threadIdx.x; i < columns; i += 1024) maximum = fmaxf(maximum, to_float(logits[i]));
  parts[threadIdx.x] = maximum;
  __syncthreads();
  for (int i = 0; i < 1024; ++i) maximum = fmaxf(maximum, parts[i]);
  __syncthreads();
  float sum = 0.0f;
  for (int i = threadIdx.x; i < columns; i += 1024) sum += expf(to_float(logits[i]) - maximum);
  sum = block_sum(sum, parts);
  if (threadIdx.x == 0) losses[row] = logf(sum) + (maximum - to_float(logits[t]));
  for (int i = threadIdx.x; i < columns; i += 1024) {
    const float p = expf(to_float(logits[i]) - maximum) / sum;
    from_float((p - (i == t)) / count, grad[i]);
  }
}

__global__ void mean_loss(const float* losses, const long long* target, float* loss, int rows,
                          long long ignore_index) {
  __shared__ float parts[1024];
  float sum = 0.0f, count = 0.0f;
  for (int i = threadIdx.x; i < rows; i += 1024) {
    sum += losses[i];
    count += target[i] != ignore_index;
  }
  sum = block_sum(sum, parts);
  count = block_sum(count, parts);
  if (threadIdx.x == 0) *loss = sum / count;
}
"""

TYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}


def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = logits.shape
    grad = torch.empty((rows, columns), dtype=logits.dtype, device=logits.device)
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    loss = torch.empty((), dtype=torch.float32, device=logits.device)
    kernel = cuda_kernel(f"loss_and_gradient<{TYPES[logits.dtype]}>", SOURCE)
    strides = (logits.stride(0), rows, columns, ignore_index)
    kernel.launch((rows,), (1024,), logits, target, losses, grad, *strides)
    mean = cuda_kernel("mean_loss", SOURCE)
    mean.launch((1,), (1024,), losses, target, loss, rows, ignore_index)
    return loss, grad
