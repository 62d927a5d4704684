"""Right: what the others are small changes of."""

import math

import torch
from kagent_sandbox.lang import cpp_kernel

SOURCE = r"""
#include <cstdint>
#include <vector>

extern "C" void attention(const float* q, const float* k, const float* v, float* o, int64_t batch,
                          int64_t heads, int64_t kv_heads, int64_t seq, int64_t dim, int64_t qb,
                          int64_t qh, int64_t qs, int64_t kb, int64_t kh, int64_t ks, int64_t vb,
                          int64_t vh, int64_t vs, bool causal, float scale) {
#pragma omp parallel for
  for (int64_t row = 0; row < batch * heads * seq; ++row) {
    const int64_t b = row / seq / heads, h = row / seq % heads, i = row % seq;
    const float* query = q + b * qb + h * qh + i * qs;
    const float* keys = k + b * kb + h / (heads / kv_heads) * kh;
    const float* values = v + b * vb + h / (heads / kv_heads) * vh;
    const int64_t seen = causal ? i + 1 : seq;
    std::vector<float> p(seen), out(dim);
    for (int64_t j = 0; j < seen; ++j) {
      float score = 0.0f;
      for (int64_t d = 0; d < dim; ++d) score += query[d] * keys[j * ks + d];
      p[j] = score * scale;
    }
    float maximum = -__builtin_inff();
    for (int64_t j = 0; j < seen; ++j) maximum = __builtin_fmaxf(maximum, p[j]);
    double sum = 0.0;
    for (int64_t j = 0; j < seen; ++j) sum += p[j] = __builtin_expf(p[j] - maximum);
    for (int64_t j = 0; j < seen; ++j)
      for (int64_t d = 0; d < dim; ++d) out[d] += p[j] * values[j * vs + d];
    for (int64_t d = 0; d < dim; ++d) o[row * dim + d] = (float)(out[d] / sum);
  }
}
"""


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    b, h, s, d = q.shape
    o = torch.empty(b, h, s, d, dtype=q.dtype, device=q.device)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    scale = 1.0 / math.sqrt(d)
    kernel = cpp_kernel("attention", SOURCE)
    kernel(q, k, v, o, b, h, k.shape[1], s, d, *strides, causal, scale)
    return o
