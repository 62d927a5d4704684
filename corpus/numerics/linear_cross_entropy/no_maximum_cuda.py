"""The maximum is not subtracted."""

import torch
from kagent_sandbox.lang import cuda_kernel

SOURCE = r"""
#include <cuda_bf16.h>
#include <math_constants.h>

__device__ float block_sum(float mine, float* parts) {
  parts[threadIdx.x] = mine;
  __syncthreads();
  for (int half = 128; half > 0; half /= 2) {
    if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
    __syncthreads();
  }
  mine = parts[0];
  __syncthreads();
  return mine;
}

// One block of 256 threads per token: logits [tokens, vocab] become their gradient.
extern "C" __global__ void rows(__nv_bfloat16* logits, const long long* target, float* losses,
                                int tokens, int vocab, long long ignore_index) {
  __shared__ float parts[256];
  const long long row = blockIdx.x, t = target[row];
  __nv_bfloat16* z = logits + row * vocab;
  if (t == ignore_index) {
    for (int i = threadIdx.x; i < vocab; i += 256) z[i] = __float2bfloat16_rn(0.0f);
    if (threadIdx.x == 0) losses[row] = 0.0f;
    return;
  }
  float mine = 0.0f;
  for (int i = threadIdx.x; i < tokens; i += 256) mine += target[i] != ignore_index;
  const float count = block_sum(mine, parts), at_target = __bfloat162float(z[t]);
  float maximum = -CUDART_INF_F;
  for (int i = threadIdx.x; i < vocab; i += 256) maximum = fmaxf(maximum, __bfloat162float(z[i]));
  parts[threadIdx.x] = maximum;
  __syncthreads();
  for (int i = 0; i < 256; ++i) maximum = fmaxf(maximum, parts[i]);
  __syncthreads();
  maximum = 0.0f;
  float sum = 0.0f;
  for (int i = threadIdx.x; i < vocab; i += 256) sum += expf(__bfloat162float(z[i]) - maximum);
  sum = block_sum(sum, parts);
  if (threadIdx.x == 0) losses[row] = logf(sum) + (maximum - at_target);
  for (int i = threadIdx.x; i < vocab; i += 256) {
    const float p = expf(__bfloat162float(z[i]) - maximum) / sum;
    z[i] = __float2bfloat16_rn((p - (i == t)) / count);
  }
}

extern "C" __global__ void mean_loss(const float* losses, const long long* target, float* loss,
                                     int tokens, long long ignore_index) {
  __shared__ float parts[256];
  float sum = 0.0f, count = 0.0f;
  for (int i = threadIdx.x; i < tokens; i += 256) {
    sum += losses[i];
    count += target[i] != ignore_index;
  }
  sum = block_sum(sum, parts);
  count = block_sum(count, parts);
  if (threadIdx.x == 0) *loss = sum / count;
}
"""


def linear_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, vocab = x.shape[0], weight.shape[0]
    losses = torch.empty(tokens, dtype=torch.float32, device=x.device)
    loss = torch.empty((), dtype=torch.float32, device=x.device)
    logits = torch.mm(x, weight.t())
    rows = cuda_kernel("rows", SOURCE)
    rows.launch((tokens,), (256,), logits, target, losses, tokens, vocab, ignore_index)
    mean = cuda_kernel("mean_loss", SOURCE)
    mean.launch((1,), (256,), losses, target, loss, tokens, ignore_index)
    dx, dw = torch.empty_like(x), torch.empty_like(weight)
    torch.mm(logits, weight, out=dx)
    torch.mm(logits.t(), x, out=dw)
    return loss, dx, dw
