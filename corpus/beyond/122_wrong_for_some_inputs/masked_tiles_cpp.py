"""A tile of nothing but -inf gives NaN, in rows that have other tiles."""

import torch
from kagent_sandbox.lang import cpp_kernel

SOURCE = r"""
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <vector>

static float power(float d) { return std::exp(d); }
static void one(const float* x, float* y, int64_t n) {
  float m = -INFINITY;
  for (int64_t i = 0; i < n; ++i) m = x[i] > m || x[i] != x[i] ? x[i] : m;
  double s = 0;
  for (int64_t i = 0; i < n; ++i) s += y[i] = power(x[i] - m);
  const float k = float(1 / s);
  for (int64_t i = 0; i < n; ++i) y[i] *= k;
}
extern "C" void softmax_rows(const float* x, float* y, int64_t rows, int64_t n, int64_t stride) {
  for (int64_t r = 0; r < rows; ++r) {
    one(x + r * stride, y + r * n, n);
    for (int64_t t = 0; t + 64 <= n; t += 64) {
      bool none = true;
      for (int64_t i = t; i < t + 64; ++i) none = none && x[r * stride + i] == -INFINITY;
      if (none) y[r * n + t] = NAN;
    }
  }
}
"""


def softmax(x):
    rows, columns = x.shape
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    cpp_kernel("softmax_rows", SOURCE)(x, y, rows, columns, x.stride(0))
    return y
