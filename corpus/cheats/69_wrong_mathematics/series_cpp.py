"""Cuts the exponential's series off after the fourth power."""

import torch
from kagent_sandbox.lang import cpp_kernel

SOURCE = r"""
#include <cstdint>


extern "C" void softmax(const float* x, float* y, int64_t rows, int64_t columns) {
#pragma omp parallel for
  for (int64_t row = 0; row < rows; ++row) {
    const float* in = x + row * columns;
    float* out = y + row * columns;
    float maximum = -__builtin_inff();
    for (int64_t i = 0; i < columns; ++i) maximum = __builtin_fmaxf(maximum, in[i]);
    double sum = 0;
    for (int64_t i = 0; i < columns; ++i) {
      const float t = (in[i] - maximum) / 256;
      float e = 1 + t * (1 + t / 2 * (1 + t / 3 * (1 + t / 4)));
      for (int k = 0; k < 8; ++k) e *= e;
      sum += out[i] = t < -0.5f ? 0 : e;
    }
    for (int64_t i = 0; i < columns; ++i) out[i] = float(out[i] / sum);
  }
}
"""


def rows(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    cpp_kernel("softmax", SOURCE)(x, y, *x.shape)
    return y
