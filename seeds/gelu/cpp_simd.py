"""GELU on the CPU: OpenMP threads over chunks of elements, each vectorised by the compiler.

The exponential is a polynomial that the compiler can inline, and the definition's tanh becomes one
division.
"""

import torch
from kagent_sandbox.lang import cpp_kernel

CHUNK = 4096  # elements that a thread takes at a time
STREAM = 0  # 1: write past the caches; pays when the result is larger than they are
TUNE = {"CHUNK": [1024, 4096, 16384, 65536], "STREAM": [0, 1]}

SOURCE = r"""
#include <algorithm>
#include <cstdint>
#include <cstring>
#ifdef __SSE2__
#include <immintrin.h>
#endif

// exp2(x) within 2 ulp, from 2^-126 to 2^126 (and the nearer of the two outside).
// x = n + r with |r| <= 1/2; a polynomial for 2^r, and n goes into the exponent bits.
static inline float exp2_clamped(float x) {
  x = std::min(std::max(x, -126.0f), 126.0f);
  const float magic = 12582912.0f;          // 1.5 * 2^23: adding it rounds to a whole number
  const float shifted = x + magic;
  const float r = x - (shifted - magic);
  float p = 1.535336188e-4f;
  p = p * r + 1.339887440e-3f;
  p = p * r + 9.618437357e-3f;
  p = p * r + 5.550332548e-2f;
  p = p * r + 2.402264791e-1f;
  p = p * r + 6.931472028e-1f;
  p = p * r + 1.0f;
  uint32_t bits, exponent;
  std::memcpy(&bits, &p, 4);
  std::memcpy(&exponent, &shifted, 4);      // n sits in the low bits of shifted
  bits += exponent << 23;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

// x (1 + tanh u) / 2 = x / (1 + exp(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3): no digits cancel
// where x is negative, and -2u log2(e) is one polynomial.
static inline float gelu(float x) {
  return x / (1.0f + exp2_clamped(x * (-2.302208198f - 0.1029432397f * x * x)));
}

extern "C" void gelu_simd(const float* x, float* y, int64_t count) {
#pragma omp parallel
  {
#pragma omp for schedule(static)
    for (int64_t start = 0; start < count; start += CHUNK) {
      const int64_t end = std::min<int64_t>(start + CHUNK, count);
      int64_t i = start;
#if STREAM && defined(__AVX__)
      // Through a block that stays in the cache: a plain store first reads the line it overwrites.
      alignas(32) float block[256];
      if (reinterpret_cast<uintptr_t>(y) % 32 == 0) {
        for (; i + 256 <= end; i += 256) {
#pragma omp simd aligned(block : 32)
          for (int k = 0; k < 256; ++k) block[k] = gelu(x[i + k]);
          for (int k = 0; k < 256; k += 8) _mm256_stream_ps(y + i + k, _mm256_load_ps(block + k));
        }
      }
#endif
#pragma omp simd
      for (int64_t k = i; k < end; ++k) y[k] = gelu(x[k]);
    }
#if STREAM && defined(__AVX__)
    _mm_sfence();   // streamed stores are weakly ordered; let them land before the caller reads
#endif
  }
}
"""


def gelu(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    defines = {"CHUNK": CHUNK, "STREAM": STREAM}
    cpp_kernel("gelu_simd", SOURCE, defines=defines)(x, y, x.numel())
    return y
