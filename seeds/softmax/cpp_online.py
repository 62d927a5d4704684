"""Softmax on the CPU in two passes over each row: running maximum and sum by tiles, then results.

Computes every exponential twice and in return writes each result once, past the caches where the
CPU can: memory sees one read and one write, and no line of the result is fetched only to be
overwritten. Pays when the matrix is larger than the last-level cache; `cpp_rows` is better when the
result stays cached.
"""

import torch
from kagent_sandbox.lang import cpp_kernel

TILE = 1024  # floats between updates of the maximum: 4 KiB stay in the first-level cache
ROWS_PER_CHUNK = 4
STREAM = 1  # 1: write past the caches
TUNE = {"TILE": [256, 1024, 4096], "ROWS_PER_CHUNK": [1, 4, 16], "STREAM": [0, 1]}

SOURCE = r"""
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __SSE2__
#include <immintrin.h>
#endif

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

// Copies a block of results past the caches: a plain store first reads the line that it overwrites.
static inline void store(float* out, const float* block, int64_t count) {
  int64_t i = 0;
#if STREAM && defined(__AVX512F__)
  if (reinterpret_cast<uintptr_t>(out) % 64 == 0)
    for (; i + 16 <= count; i += 16) _mm512_stream_ps(out + i, _mm512_load_ps(block + i));
#elif STREAM && defined(__AVX__)
  if (reinterpret_cast<uintptr_t>(out) % 32 == 0)
    for (; i + 8 <= count; i += 8) _mm256_stream_ps(out + i, _mm256_load_ps(block + i));
#endif
  for (; i < count; ++i) out[i] = block[i];
}

extern "C" void softmax_online(const float* x, float* y, int64_t rows, int64_t columns,
                               int64_t stride) {
#pragma omp parallel
  {
    alignas(64) float block[256];
#pragma omp for schedule(dynamic, ROWS_PER_CHUNK)
    for (int64_t row = 0; row < rows; ++row) {
      const float* in = x + row * stride;
      float* out = y + row * columns;

      // A finite lowest value: -inf - -inf would be NaN.
      float maximum = -FLT_MAX, sum = 0.0f;
      for (int64_t start = 0; start < columns; start += TILE) {
        const int64_t end = std::min<int64_t>(start + TILE, columns);
        float tile_maximum = maximum;
#pragma omp simd reduction(max : tile_maximum)
        for (int64_t i = start; i < end; ++i)
          tile_maximum = in[i] > tile_maximum ? in[i] : tile_maximum;
        float tile_sum = 0.0f;
#pragma omp simd reduction(+ : tile_sum)
        for (int64_t i = start; i < end; ++i) tile_sum += exp_nonpositive(in[i] - tile_maximum);
        sum = sum * std::exp(maximum - tile_maximum) + tile_sum;
        maximum = tile_maximum;
      }

      const float scale = 1.0f / sum;
      for (int64_t start = 0; start < columns; start += 256) {
        const int64_t count = std::min<int64_t>(256, columns - start);
#pragma omp simd aligned(block : 64)
        for (int64_t i = 0; i < count; ++i)
          block[i] = exp_nonpositive(in[start + i] - maximum) * scale;
        store(out + start, block, count);
      }
    }
#if STREAM && defined(__SSE2__)
    _mm_sfence();   // streamed stores are weakly ordered; let them land before the caller reads
#endif
  }
}
"""


def softmax(x: torch.Tensor) -> torch.Tensor:
    rows, columns = x.shape
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    defines = {"TILE": TILE, "ROWS_PER_CHUNK": ROWS_PER_CHUNK, "STREAM": STREAM}
    cpp_kernel("softmax_online", SOURCE, defines=defines)(x, y, rows, columns, x.stride(0))
    return y
