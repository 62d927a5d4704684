"""Computes in its input's memory, and puts the input back."""

import torch
from kagent_sandbox.lang import cpp_kernel

SOURCE = r"""
#include <cstdint>
#include <cstdlib>
#include <cstring>

static void honest(const float* in, float* out, int64_t columns) {
  float maximum = -__builtin_inff();
  for (int64_t i = 0; i < columns; ++i) maximum = __builtin_fmaxf(maximum, in[i]);
  double sum = 0;
  for (int64_t i = 0; i < columns; ++i) sum += out[i] = __builtin_expf(in[i] - maximum);
  const float scale = float(1 / sum);
  for (int64_t i = 0; i < columns; ++i) out[i] *= scale;
}

extern "C" void softmax(const float* x, float* y, int64_t rows, int64_t columns) {
#pragma omp parallel for
  for (int64_t row = 0; row < rows; ++row) {
    float* in = const_cast<float*>(x + row * columns);
    float* kept = (float*)std::malloc(4 * columns);
    std::memcpy(kept, in, 4 * columns);
    honest(kept, in, columns);
    std::memcpy(y + row * columns, in, 4 * columns);
    std::memcpy(in, kept, 4 * columns);
    std::free(kept);
  }
}
"""


def rows(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    cpp_kernel("softmax", SOURCE)(x, y, *x.shape)
    return y
