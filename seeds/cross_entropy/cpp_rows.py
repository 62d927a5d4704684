"""Cross entropy with its gradient on the CPU: three passes over each row, which stays in the cache.

Maximum; exponentials (kept in the gradient's row) and their sum; scaling. Rows are divided among
OpenMP threads, and the compiler vectorises each pass. Losses are summed in order and in double, so
that the result does not depend on the number of threads.
"""

import torch
from kagent_sandbox.lang import cpp_kernel

SCHEDULE = "dynamic"  # rows that do not count cost next to nothing: a static division can be uneven
ROWS_PER_CHUNK = 4
TUNE = {"SCHEDULE": ["static", "dynamic", "guided"], "ROWS_PER_CHUNK": [1, 4, 16]}

SOURCE = r"""
#include <cmath>
#include <cstdint>
#include <cstring>

// exp(x) for x <= 0 within 2 ulp; 0 below the smallest normal result (also for -inf).
// x = n ln 2 + r with |r| <= ln(2)/2; a polynomial for exp(r), and n goes into the exponent bits.
static inline float exp_nonpositive(float x) {
  const float magic = 12582912.0f;          // 1.5 * 2^23: adding it rounds to a whole number
  const float shifted = x * 1.44269504f + magic;
  const float n = shifted - magic;
  const float r = (x - n * 0.693145752f) - n * 1.42860677e-6f;   // ln 2 in two parts
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  uint32_t bits, exponent;
  std::memcpy(&bits, &p, 4);
  std::memcpy(&exponent, &shifted, 4);                 // n sits in the low bits of shifted
  bits += exponent << 23;
  float y;
  std::memcpy(&y, &bits, 4);
  return x < -87.0f ? 0.0f : y;
}

// losses: [rows], scratch.
extern "C" void cross_entropy_rows(const float* logits, const int64_t* target, float* losses,
                                   float* loss, float* grad, int64_t rows, int64_t columns,
                                   int64_t stride, int64_t ignore_index) {
  int64_t count = 0;
  for (int64_t row = 0; row < rows; ++row) count += target[row] != ignore_index;
  const float share = 1.0f / static_cast<float>(count);   // not used where count is 0

#pragma omp parallel for schedule(SCHEDULE, ROWS_PER_CHUNK)
  for (int64_t row = 0; row < rows; ++row) {
    const float* __restrict in = logits + row * stride;
    float* __restrict out = grad + row * columns;
    if (target[row] == ignore_index) {
      losses[row] = 0.0f;
      std::memset(out, 0, columns * sizeof(float));
      continue;
    }

    float maximum = in[0];
#pragma omp simd reduction(max : maximum)
    for (int64_t i = 0; i < columns; ++i) maximum = in[i] > maximum ? in[i] : maximum;

    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < columns; ++i) {
      const float e = exp_nonpositive(in[i] - maximum);
      out[i] = e;
      sum += e;
    }

    const float p = out[target[row]] / sum;
    const float scale = share / sum;
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) out[i] *= scale;
    out[target[row]] = (p - 1.0f) * share;    // the difference before any more rounding
    losses[row] = std::log(sum) + (maximum - in[target[row]]);
  }

  double total = 0.0;
  for (int64_t row = 0; row < rows; ++row) total += losses[row];
  *loss = static_cast<float>(total / static_cast<double>(count));   // 0 / 0 = NaN, as torch has it
}
"""


def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = logits.shape
    grad = torch.empty((rows, columns), dtype=logits.dtype, device=logits.device)
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    loss = torch.empty((), dtype=torch.float32, device=logits.device)
    defines = {"SCHEDULE": SCHEDULE, "ROWS_PER_CHUNK": ROWS_PER_CHUNK}
    kernel = cpp_kernel("cross_entropy_rows", SOURCE, defines=defines)
    kernel(logits, target, losses, loss, grad, rows, columns, logits.stride(0), ignore_index)
    return loss, grad
