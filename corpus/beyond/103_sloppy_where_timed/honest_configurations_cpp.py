"""The same, but the configuration that only fits large matrices is right there."""

import torch
from kagent_sandbox.lang import cpp_kernel

SOURCE = r"""
#include <cstdint>

template <bool careful, int times>
void rows_of(const float* x, float* y, int64_t rows, int64_t columns) {
#pragma omp parallel for
  for (int64_t row = 0; row < rows; ++row) {
    const float* in = x + row * columns;
    float* out = y + row * columns;
    float maximum = careful ? -__builtin_inff() : 0;
    if (careful) {
      for (int64_t i = 0; i < columns; ++i) maximum = __builtin_fmaxf(maximum, in[i]);
    }
    for (int t = 0; t < times; ++t) {
      double sum = 0;
      for (int64_t i = 0; i < columns; ++i) sum += out[i] = __builtin_expf(in[i] - maximum);
      const float scale = float(1 / sum);
      for (int64_t i = 0; i < columns; ++i) out[i] *= scale;
    }
  }
}

extern "C" void careful(const float* x, float* y, int64_t rows, int64_t columns) {
  rows_of<true, 1>(x, y, rows, columns);
}
extern "C" void sloppy(const float* x, float* y, int64_t rows, int64_t columns) {
  rows_of<false, 1>(x, y, rows, columns);
}

extern "C" void slow(const float* x, float* y, int64_t rows, int64_t columns) {
  rows_of<true, 3>(x, y, rows, columns);
}
"""
KERNEL = "slow"
TUNE = {"KERNEL": ["slow", "careful"]}


def rows(x: torch.Tensor) -> torch.Tensor:
    if KERNEL == "careful" and x.numel() < 100_000:
        raise ValueError("not for matrices of this size")
    y = torch.empty_like(x)
    cpp_kernel(KERNEL, SOURCE)(x, y, *x.shape)
    return y
