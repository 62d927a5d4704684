"""Every result is a thousandth too large."""

import math

import torch
from kagent_sandbox.lang import cuda_kernel

SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

__device__ float to_float(__half x) { return __half2float(x); }
__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ void from_float(float x, __half& y) { y = __float2half_rn(x); }
__device__ void from_float(float x, __nv_bfloat16& y) { y = __float2bfloat16_rn(x); }

// One block of D threads per query: a running maximum, sum and output, key after key.
template <typename T, int D>
__global__ void attention(const T* q, const T* k, const T* v, T* o, long long qb, long long qh,
                          long long qs, long long kb, long long kh, long long ks, long long vb,
                          long long vh, long long vs, int heads, int group, int seq, bool causal,
                          float scale) {
  __shared__ float parts[D];
  const int i = blockIdx.x, b = blockIdx.y / heads, h = blockIdx.y % heads, d = threadIdx.x;
  const float mine = to_float(q[b * qb + h * qh + i * qs + d]);
  k += b * kb + h / group * kh;
  v += b * vb + h / group * vh;
  const long long row = (long long)blockIdx.y * seq + i;
  const int seen = causal ? i + 1 : seq;
  float maximum = -CUDART_INF_F, sum = 0.0f, out = 0.0f;
  for (int j = 0; j < seen; ++j) {
    parts[d] = mine * to_float(k[j * ks + d]);
    __syncthreads();
    for (int half = D / 2; half > 0; half /= 2) {
      if (d < half) parts[d] += parts[d + half];
      __syncthreads();
    }
    const float score = parts[0] * scale;
    __syncthreads();
    const float higher = fmaxf(maximum, score);
    const float shrink = expf(maximum - higher), p = expf(score - higher);
    sum = sum * shrink + p;
    out = out * shrink + p * to_float(v[j * vs + d]);
    maximum = higher;
  }
  from_float(1.001f * out / sum, o[row * D + d]);
}
"""

TYPES = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    b, h, s, d = q.shape
    o = torch.empty(b, h, s, d, dtype=q.dtype, device=q.device)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    kernel = cuda_kernel(f"attention<{TYPES[q.dtype]}, {d}>", SOURCE)
    rest = (h, h // k.shape[1], s, causal, 1.0 / math.sqrt(d))
    kernel.launch((s, b * h), (d,), q, k, v, o, *strides, *rest)
    return o
