"""Right: what the others are small changes of."""

import torch
from kagent_sandbox.lang import cpp_kernel

SOURCE = r"""
#include <cstdint>

// x (1 + tanh u) / 2 as x / (1 + exp(-2u)), which loses no digits where x is negative.
static inline double gelu(double x) {
  return x / (1.0 + __builtin_exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)));
}

extern "C" void gelu_all(const float* x, float* y, int64_t count, int64_t columns) {
#pragma omp parallel for
  for (int64_t i = 0; i < count; ++i) y[i] = (float)gelu(x[i]);
}
"""


def gelu(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    cpp_kernel("gelu_all", SOURCE)(x, y, x.numel(), x.shape[1])
    return y
