"""GELU on the CPU: OpenMP threads over chunks of elements, in explicit vectors.

The exponential is a polynomial, and the definition's tanh becomes one division.
"""

import torch
from kagent_sandbox.lang import cpp_kernel

SCHEDULE = "static"
CHUNK = 4096  # elements that a thread takes at a time
LANES = 16  # floats per vector
UNROLL = 2  # independent vectors in flight: the polynomial is one long chain
STREAM = 0  # 1: write past the caches; pays when the result is larger than they are
PREFETCH = 0  # floats ahead that are fetched, beyond what the CPU does by itself
TUNE = {
    "SCHEDULE": ["static", "dynamic", "guided"],
    "CHUNK": [1024, 4096, 16384, 65536],
    "LANES": [8, 16],
    "UNROLL": [1, 2, 4],
    "STREAM": [0, 1],
    "PREFETCH": [0, 256, 1024],
}

SOURCE = r"""
#include <cstdint>

typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
constexpr int64_t STEP = UNROLL * LANES;   // floats per iteration

// exp2(x) within 2 ulp; 2^-126 for whatever is less, and infinity from 2^128 on.
// x = n + r with |r| <= 1/2; a polynomial for 2^r, and n goes into the exponent bits.
static inline Floats exp2_clamped(Floats x) {
  x = x < -126.0f ? Floats{} - 126.0f : x;
  x = x > 128.0f ? Floats{} + 128.0f : x;
  const Floats shifted = x + 12582912.0f;   // + 1.5 * 2^23 rounds to a whole number
  const Floats r = x - (shifted - 12582912.0f);
  Floats p = 1.535336188e-4f * r + 1.339887440e-3f;
  p = p * r + 9.618437357e-3f;
  p = p * r + 5.550332548e-2f;
  p = p * r + 2.402264791e-1f;
  p = p * r + 6.931472028e-1f;
  p = p * r + 1.0f;
  return (Floats)((Bits)p + ((Bits)shifted << 23));   // n: the low bits of shifted
}

// x (1 + tanh u) / 2 = x / (1 + exp(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3): no digits cancel
// where x is negative, and -2u log2(e) is one polynomial.
static inline Floats gelu(Floats x) {
  return x / (1.0f + exp2_clamped(x * (-2.302208198f - 0.1029432397f * x * x)));
}

// Streams where `to` is aligned. In assembler, since <immintrin.h> takes longer than all the rest.
static inline void store(float* to, Floats v) {
#if STREAM && (defined(__AVX512F__) || defined(__AVX__) && LANES == 8)
  if ((uintptr_t)to % sizeof v == 0) {
    asm volatile("vmovntps %1, %0" : "=m"(*(Floats*)to) : "v"(v));
    return;
  }
#endif
  *(Floats*)to = v;
}

extern "C" void gelu_simd(const float* x, float* y, int64_t count) {
#pragma omp parallel
  {
#pragma omp for schedule(SCHEDULE)
    for (int64_t start = 0; start < count; start += CHUNK) {
      const int64_t end = start + CHUNK < count ? start + CHUNK : count;
      int64_t i = start;
      for (; i + STEP <= end; i += STEP)
        for (int u = 0; u < UNROLL; ++u) {
          const float* from = x + i + u * LANES;
          if (PREFETCH) __builtin_prefetch(from + PREFETCH);
          store(y + i + u * LANES, gelu(*(const Floats*)from));
        }
      for (; i < end; ++i) y[i] = gelu(Floats{} + x[i])[0];
    }
#if STREAM && defined(__AVX__)
    asm volatile("sfence" ::: "memory");   // streamed stores land before the caller reads
#endif
  }
}
"""


def gelu(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    defines = {
        "SCHEDULE": SCHEDULE,
        "CHUNK": CHUNK,
        "LANES": LANES,
        "UNROLL": UNROLL,
        "STREAM": STREAM,
        "PREFETCH": PREFETCH,
    }
    cpp_kernel("gelu_simd", SOURCE, defines=defines)(x, y, x.numel())
    return y
