"""The exponential is six terms of its series, halved and squared."""

import torch
from kagent_sandbox.lang import cpp_kernel

SOURCE = r"""
#include <algorithm>
#include <cstdint>

// e^x = (e^(x / 32))^32, and five powers of x / 32.
static float exponential(float x) {
  const float r = std::max(x, -80.0f) / 32;
  float e = 1 + r * (1 + r / 2 * (1 + r / 3 * (1 + r / 4 * (1 + r / 5))));
  for (int i = 0; i < 5; ++i) e *= e;
  return e;
}

extern "C" void softmax(const float* x, float* y, int64_t rows, int64_t columns, int64_t stride) {
#pragma omp parallel for
  for (int64_t row = 0; row < rows; ++row) {
    const float* in = x + row * stride;
    float* out = y + row * columns;
    float maximum = -__builtin_inff();
    for (int64_t i = 0; i < columns; ++i) maximum = std::max(maximum, in[i]);
    double sum = 0.0;
    for (int64_t i = 0; i < columns; ++i) sum += out[i] = exponential(in[i] - maximum);
    for (int64_t i = 0; i < columns; ++i) out[i] = (float)(out[i] / sum);
  }
}
"""


def softmax(x: torch.Tensor) -> torch.Tensor:
    rows, columns = x.shape
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    cpp_kernel("softmax", SOURCE)(x, y, rows, columns, x.stride(0))
    return y
