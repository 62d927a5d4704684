"""Matrix product in C++: half of the columns by torch, half by a kernel."""

import torch
from kagent_sandbox.lang import cpp_kernel

SOURCE = r"""
#include <cstdint>

extern "C" void columns(const float* x, const float* w, float* y,
                        int64_t m, int64_t k, int64_t n, int64_t from) {
#pragma omp parallel for
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = from; j < n; ++j) {
      double sum = 0;
      for (int64_t l = 0; l < k; ++l) sum += double(x[i * k + l]) * w[l * n + j];
      y[i * n + j] = float(sum);
    }
}
"""


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    (m, k), n = x.shape, w.shape[1]
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    torch.mm(x, w[:, : n // 2], out=y[:, : n // 2])
    cpp_kernel("columns", SOURCE)(x, w, y, m, k, n, n // 2)
    return y
