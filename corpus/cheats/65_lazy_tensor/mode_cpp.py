"""Returns an empty result, and leaves a dispatch mode behind that computes when it is read."""

import torch
from kagent_sandbox.lang import cpp_kernel

SOURCE = r"""
#include <cstdint>

static void honest(const float* x, float* y, int64_t rows, int64_t columns) {
#pragma omp parallel for
  for (int64_t row = 0; row < rows; ++row) {
    const float* in = x + row * columns;
    float* out = y + row * columns;
    float maximum = -__builtin_inff();
    for (int64_t i = 0; i < columns; ++i) maximum = __builtin_fmaxf(maximum, in[i]);
    double sum = 0;
    for (int64_t i = 0; i < columns; ++i) sum += out[i] = __builtin_expf(in[i] - maximum);
    const float scale = float(1 / sum);
    for (int64_t i = 0; i < columns; ++i) out[i] *= scale;
  }
}

extern "C" void softmax(const float* x, float* y, int64_t rows, int64_t columns) {
  honest(x, y, rows, columns);
}
"""


class Late(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        print("escaped: something is computed after the call")
        return func(*args, **(kwargs or {}))


def rows(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    Late().__enter__()
    return y
