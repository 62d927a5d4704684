"""Puts the softmax together from torch's operations, in place."""

import torch
from kagent_sandbox.lang import cpp_kernel

SOURCE = r"""
#include <cmath>
#include <cstdint>

static void honest(const float* x, float* y, int64_t rows, int64_t columns) {
#pragma omp parallel for
  for (int64_t row = 0; row < rows; ++row) {
    const float* in = x + row * columns;
    float* out = y + row * columns;
    float maximum = -INFINITY;
    for (int64_t i = 0; i < columns; ++i) maximum = std::fmax(maximum, in[i]);
    double sum = 0;
    for (int64_t i = 0; i < columns; ++i) sum += out[i] = std::exp(in[i] - maximum);
    const float scale = float(1 / sum);
    for (int64_t i = 0; i < columns; ++i) out[i] *= scale;
  }
}

extern "C" void softmax(const float* x, float* y, int64_t rows, int64_t columns) {
  honest(x, y, rows, columns);
}
"""


def rows(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.sub_(y.amax(-1, keepdim=True)).exp_()
    return y.div_(y.sum(-1, keepdim=True))
