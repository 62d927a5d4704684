"""The sum is kept in bfloat16."""

import torch
from kagent_sandbox.lang import cpp_kernel

SOURCE = r"""
#include <algorithm>
#include <cstdint>
#include <cstring>

static float to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
  std::memcpy(&x, &bits, 4);
  return x;
}

extern "C" void softmax(const float* x, float* y, int64_t rows, int64_t columns, int64_t stride) {
#pragma omp parallel for
  for (int64_t row = 0; row < rows; ++row) {
    const float* in = x + row * stride;
    float* out = y + row * columns;
    float maximum = -__builtin_inff();
    for (int64_t i = 0; i < columns; ++i) maximum = std::max(maximum, in[i]);
    float sum = 0.0f;
    for (int64_t i = 0; i < columns; ++i)
      sum = to_bfloat16(sum + (out[i] = __builtin_expf(in[i] - maximum)));
    for (int64_t i = 0; i < columns; ++i) out[i] = (float)(out[i] / sum);
  }
}
"""


def softmax(x: torch.Tensor) -> torch.Tensor:
    rows, columns = x.shape
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    cpp_kernel("softmax", SOURCE)(x, y, rows, columns, x.stride(0))
    return y
