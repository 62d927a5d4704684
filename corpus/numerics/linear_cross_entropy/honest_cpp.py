"""Right: what the others are small changes of."""

import torch
from kagent_sandbox.lang import cpp_kernel

SOURCE = r"""
#include <cstdint>

// Logits [tokens, vocab] become their gradient.
extern "C" void rows(float* logits, const int64_t* target, float* losses, float* loss,
                     int64_t tokens, int64_t vocab, int64_t ignore_index) {
  int64_t count = 0;
  for (int64_t row = 0; row < tokens; ++row) count += target[row] != ignore_index;
#pragma omp parallel for
  for (int64_t row = 0; row < tokens; ++row) {
    float* z = logits + row * vocab;
    const int64_t t = target[row];
    losses[row] = 0.0f;
    if (t == ignore_index) {
      for (int64_t i = 0; i < vocab; ++i) z[i] = 0.0f;
      continue;
    }
    float maximum = -__builtin_inff();
    for (int64_t i = 0; i < vocab; ++i) maximum = __builtin_fmaxf(maximum, z[i]);
    const float at_target = z[t];
    double sum = 0.0;
    for (int64_t i = 0; i < vocab; ++i) sum += z[i] = __builtin_expf(z[i] - maximum);
    losses[row] = (float)(__builtin_log(sum) + (maximum - at_target));
    for (int64_t i = 0; i < vocab; ++i) z[i] = (float)((z[i] / sum - (i == t)) / count);
  }
  double total = 0.0;
  for (int64_t row = 0; row < tokens; ++row) total += losses[row];
  *loss = (float)(total / count);
}
"""


def linear_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, vocab = x.shape[0], weight.shape[0]
    losses = torch.empty(tokens, dtype=torch.float32, device=x.device)
    loss = torch.empty((), dtype=torch.float32, device=x.device)
    logits = torch.mm(x, weight.t())
    kernel = cpp_kernel("rows", SOURCE)
    kernel(logits, target, losses, loss, tokens, vocab, ignore_index)
    dx, dw = torch.empty_like(x), torch.empty_like(weight)
    torch.mm(logits, weight, out=dx)
    torch.mm(logits.t(), x, out=dw)
    return loss, dx, dw
