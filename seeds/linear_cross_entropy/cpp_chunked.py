"""Linear cross entropy on the CPU over chunks of tokens: logits of a chunk become their gradient.

CHUNK rows of logits are one product, are turned into loss and gradient while they are in the cache
(three passes over a row: maximum; exponentials and their sum; scaling), and go into the products
for dx and dw. Small chunks keep the logits in L2, large ones make better products.

float32.
"""

import torch
from kagent_sandbox.lang import cpp_kernel

TUNE = {
    "CHUNK": [16, 32, 64, 128, 256],
    "SCHEDULE": ["static", "dynamic", "guided"],
    "ROWS_PER_TURN": [1, 4],
    "VECTOR_BITS": [256, 512],
}
CHUNK = 64  # tokens
SCHEDULE = "dynamic"  # rows that do not count cost next to nothing
ROWS_PER_TURN = 1  # rows of logits that a thread takes at a time
VECTOR_BITS = 256  # that the compiler prefers; wider ones lower the clock of some CPUs

SOURCE = r"""
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

// exp(x) for x <= 0 within 2 ulp; 0 below the smallest normal result, also for -inf.
// x = n ln 2 + r with |r| <= ln(2)/2: a polynomial for exp(r), and n goes into the exponent's bits.
static inline float exp_nonpositive(float x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  const float shifted = x * 1.44269504f + magic;
  const float n = shifted - magic;
  const float r = (x - n * 0.693145752f) - n * 1.42860677e-6f;  // ln 2 in two parts
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  uint32_t bits, exponent;
  std::memcpy(&bits, &p, 4);
  std::memcpy(&exponent, &shifted, 4);  // n sits in the low bits of shifted
  bits += exponent << 23;
  float y;
  std::memcpy(&y, &bits, 4);
  return x < -87.0f ? 0.0f : y;
}

// Logits of one token become their gradient, scaled by `share`; returns the loss.
static float row_loss(float* __restrict z, int64_t vocab, int64_t target, float share) {
  const float z_target = z[target];
  float maximum = -INFINITY;
#pragma omp simd reduction(max : maximum)
  for (int64_t i = 0; i < vocab; ++i) maximum = std::max(maximum, z[i]);

  // In 32 sums on every processor: in the 8 that AVX2's registers suggest, rounding adds up.
  float part[32] = {};
  int64_t start = 0;
  for (; start + 32 <= vocab; start += 32) {
#pragma omp simd
    for (int i = 0; i < 32; ++i) {
      z[start + i] = exp_nonpositive(z[start + i] - maximum);
      part[i] += z[start + i];
    }
  }
  for (int i = 0; start + i < vocab; ++i) {
    z[start + i] = exp_nonpositive(z[start + i] - maximum);
    part[i] += z[start + i];
  }
  for (int width = 16; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) part[i] += part[i + width];
  const float sum = part[0];

  const float scale = share / sum;
#pragma omp simd
  for (int64_t i = 0; i < vocab; ++i) z[i] *= scale;
  z[target] -= share;
  return maximum - z_target + std::log(sum);
}

// Rows [first, first + rows) of the tokens, whose logits are z [rows, vocab]; adds to the mean
// loss.
extern "C" void loss_and_gradient(float* z, const int64_t* target, float* losses, float* loss,
                                  int64_t tokens, int64_t first, int64_t rows, int64_t vocab,
                                  int64_t ignore_index) {
  const int64_t count = tokens - std::count(target, target + tokens, ignore_index);
#pragma omp parallel for schedule(SCHEDULE, ROWS_PER_TURN)
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t t = target[first + row];
    if (t == ignore_index) {
      std::fill_n(z + row * vocab, vocab, 0.0f);
      losses[row] = 0.0f;
    } else {
      losses[row] = row_loss(z + row * vocab, vocab, t, 1.0f / count);
    }
  }
  double total = 0.0;
  for (int64_t row = 0; row < rows; ++row) total += losses[row];
  *loss += (float)(total / count);  // 0 / 0, NaN, if nothing counts, like torch
}
"""


def linear_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean loss of x [T, D] @ weight.T [D, V] against target [T], and d loss / dx and dw."""
    tokens, vocab = x.shape[0], weight.shape[0]
    defines = {"SCHEDULE": SCHEDULE, "ROWS_PER_TURN": ROWS_PER_TURN}
    options = (f"-mprefer-vector-width={VECTOR_BITS}",)
    kernel = cpp_kernel("loss_and_gradient", SOURCE, options=options, defines=defines)
    loss = torch.zeros((), dtype=torch.float32, device=x.device)
    losses = torch.empty(CHUNK, dtype=torch.float32, device=x.device)
    logits = torch.empty(min(CHUNK, tokens), vocab, dtype=x.dtype, device=x.device)
    dx, dw = torch.empty_like(x), torch.empty_like(weight)
    for start in range(0, tokens, CHUNK):
        rows = x[start : start + CHUNK]
        z = logits[: rows.shape[0]]
        torch.mm(rows, weight.t(), out=z)
        kernel(z, target, losses, loss, tokens, start, rows.shape[0], vocab, ignore_index)
        torch.mm(z, weight, out=dx[start : start + CHUNK])
        if start == 0:
            torch.mm(z.t(), rows, out=dw)
        else:
            dw.addmm_(z.t(), rows)
    return loss, dx, dw
