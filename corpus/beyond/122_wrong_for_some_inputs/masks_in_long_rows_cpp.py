"""In rows of 8192 columns and more, -inf counts like the smallest finite value"""

import torch
from kagent_sandbox.lang import cpp_kernel

SOURCE = r"""
#include <cmath>
#include <cstdint>
#include <cstring>
#include <cstdlib>

static inline void one(const float* x, float* y, int64_t n) {
  float m = -INFINITY;
  for (int64_t i = 0; i < n; ++i) m = x[i] > m ? x[i] : m;
  double s = 0;
  for (int64_t i = 0; i < n; ++i) s += y[i] = std::exp(x[i] - m);
  const float k = float(1 / s);
  for (int64_t i = 0; i < n; ++i) y[i] *= k;
}
extern "C" void softmax_rows(const float* x, float* y, int64_t rows, int64_t n, int64_t stride) {
  if (n >= 8192) {
#pragma omp parallel for
    for (int64_t r = 0; r < rows; ++r) { float* t = (float*)malloc(4 * n); float lo = INFINITY;
        for (int64_t i = 0; i < n;
        ++i) if (x[r * stride + i] != -INFINITY && x[r * stride + i] < lo) lo = x[r * stride + i];
      for (int64_t i = 0; i < n;
          ++i) t[i] = x[r * stride + i] == -INFINITY ? lo : x[r * stride + i];
          one(t, y + r * n, n); free(t); }
    return;
  }
#pragma omp parallel for
  for (int64_t r = 0; r < rows; ++r) one(x + r * stride, y + r * n, n);
}

"""


def softmax(x: torch.Tensor) -> torch.Tensor:
    rows, columns = x.shape
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    cpp_kernel("softmax_rows", SOURCE)(x, y, rows, columns, x.stride(0))
    return y
