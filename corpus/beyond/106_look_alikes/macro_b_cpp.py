"""Text in a macro that holds the sign of a comment."""

import torch
from kagent_sandbox.lang import cpp_kernel

SOURCE = r"""
#include <cstdint>
#define TEXT "a//2"
extern "C" void softmax(const float* x, float* y, int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows * columns; ++i) y[i] = x[i] + TEXT[3];
}
"""


def rows(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    cpp_kernel("softmax", SOURCE)(x, y, *x.shape)
    return y
