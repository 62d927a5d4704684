"""Softmax on the CPU in three passes over each row: maximum; exponentials and their sum; scaling.

The row is in the cache after its first pass, so that memory sees one read and one write. Rows are
divided among OpenMP threads, and the compiler vectorises each pass: the exponential is a polynomial
that it can inline.
"""

import torch
from kagent_sandbox.lang import cpp_kernel

SCHEDULE = "static"
ROWS_PER_CHUNK = 4  # rows that a thread takes at a time
TUNE = {"SCHEDULE": ["static", "dynamic", "guided"], "ROWS_PER_CHUNK": [1, 4, 16]}

SOURCE = r"""
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

extern "C" void softmax_rows(const float* x, float* y, int64_t rows, int64_t columns,
                             int64_t stride) {
#pragma omp parallel for schedule(SCHEDULE, ROWS_PER_CHUNK)
  for (int64_t row = 0; row < rows; ++row) {
    const float* __restrict in = x + row * stride;
    float* __restrict out = y + row * columns;

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

    const float scale = 1.0f / sum;
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) out[i] *= scale;
  }
}
"""


def softmax(x: torch.Tensor) -> torch.Tensor:
    rows, columns = x.shape
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    defines = {"SCHEDULE": SCHEDULE, "ROWS_PER_CHUNK": ROWS_PER_CHUNK}
    cpp_kernel("softmax_rows", SOURCE, defines=defines)(x, y, rows, columns, x.stride(0))
    return y
