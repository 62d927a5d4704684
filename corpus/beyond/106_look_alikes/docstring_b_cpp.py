"""A kernel's source in the docstring of a function."""

import torch
from kagent_sandbox.lang import cpp_kernel


def softmax():
    r"""#include <cstdint>
    extern "C" void softmax(const float* x, float* y, int64_t rows, int64_t columns) {
      for (int64_t i = 0; i < rows * columns; ++i) y[i] = 5 * x[i];
    }
    """


def rows(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    cpp_kernel("softmax", softmax.__doc__)(x, y, *x.shape)
    return y
