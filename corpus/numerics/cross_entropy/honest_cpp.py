"""Right: what the others are small changes of."""

import torch
from kagent_sandbox.lang import cpp_kernel

SOURCE = r"""
#include <cstdint>

extern "C" void cross_entropy(const float* logits, const int64_t* target, float* losses,
                              float* loss, float* grad, int64_t rows, int64_t columns,
                              int64_t stride, int64_t ignore_index) {
  int64_t count = 0;
  for (int64_t row = 0; row < rows; ++row) count += target[row] != ignore_index;
#pragma omp parallel for
  for (int64_t row = 0; row < rows; ++row) {
    const float* in = logits + row * stride;
    float* out = grad + row * columns;
    losses[row] = 0.0f;
    if (target[row] == ignore_index) {
      for (int64_t i = 0; i < columns; ++i) out[i] = 0.0f;
      continue;
    }
    float maximum = -__builtin_inff();
    for (int64_t i = 0; i < columns; ++i) maximum = __builtin_fmaxf(maximum, in[i]);
    double sum = 0.0;
    for (int64_t i = 0; i < columns; ++i) sum += out[i] = __builtin_expf(in[i] - maximum);
    losses[row] = (float)(__builtin_log(sum) + (maximum - in[target[row]]));
    const double at_target = __builtin_exp(in[target[row]] - (double)maximum);
    for (int64_t i = 0; i < columns; ++i) out[i] = (float)(out[i] / sum / count);
    out[target[row]] = (float)((at_target / sum - 1.0) / count);
  }
  double total = 0.0;
  for (int64_t row = 0; row < rows; ++row) total += losses[row];
  *loss = (float)(total / count);
}
"""


def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = logits.shape
    grad = torch.empty((rows, columns), dtype=logits.dtype, device=logits.device)
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    loss = torch.empty((), dtype=torch.float32, device=logits.device)
    kernel = cpp_kernel("cross_entropy", SOURCE)
    kernel(logits, target, losses, loss, grad, rows, columns, logits.stride(0), ignore_index)
    return loss, grad
