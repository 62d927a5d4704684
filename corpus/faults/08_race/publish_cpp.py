"""Threads read each other's sums of a row without a barrier in between."""

import torch
from kagent_sandbox.lang import cpp_kernel

SOURCE = r"""
#include <cstdint>
#include <omp.h>

extern "C" void softmax(const float* x, float* y, int64_t rows, int64_t columns) {
  volatile double sums[256] = {};
#pragma omp parallel
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t me = omp_get_thread_num(), all = omp_get_num_threads();
    const float* in = x + row * columns;
    float* out = y + row * columns;
    float maximum = -__builtin_inff();
    for (int64_t i = 0; i < columns; ++i) maximum = __builtin_fmaxf(maximum, in[i]);
    double sum = 0;
    for (int64_t i = me; i < columns; i += all) sum += out[i] = __builtin_expf(in[i] - maximum);
    sums[me] = sum;
    sum = 0;
    for (int64_t i = 0; i < all; ++i) sum += sums[i];
    const float scale = float(1 / sum);
    for (int64_t i = me; i < columns; i += all) out[i] *= scale;
  }
}
"""


def rows(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    cpp_kernel("softmax", SOURCE)(x, y, *x.shape)
    return y
