"""Gradient of GELU on the CPU: OpenMP threads over chunks of elements, in explicit vectors.

The exponential is a polynomial, and one division gives both sigmoid(2u) and 1 - sigmoid(2u).
"""

import torch
from kagent_sandbox.lang import cpp_kernel

SCHEDULE = "static"
CHUNK = 4096  # elements that a thread takes at a time
LANES = 16  # floats per vector
UNROLL = 2  # independent vectors in flight: the polynomial is one long chain
STREAM = 0  # 1: write past the caches; pays when the result is larger than they are
TUNE = {
    "SCHEDULE": ["static", "dynamic", "guided"],
    "CHUNK": [1024, 4096, 16384, 65536],
    "LANES": [8, 16],
    "UNROLL": [1, 2, 4],
    "STREAM": [0, 1],
}

SOURCE = r"""
#include <cstdint>

typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
constexpr int64_t STEP = UNROLL * LANES;   // floats per iteration

// 2^x for x <= 0 within 2 ulp, as `high` times `low`: numbers that are normal, while 2^x may be far
// below all of them. 2^-252 for whatever is less.
// x = n + r with |r| <= 1/2; a polynomial for 2^r, and n goes into the exponent bits of both.
static inline Floats exp2_nonpositive(Floats x, Floats& low) {
  x = x < -252.0f ? Floats{} - 252.0f : x;
  const Floats shifted = x + 12582912.0f;   // + 1.5 * 2^23 rounds to a whole number
  const Floats n = shifted - 12582912.0f;
  const Floats r = x - n;
  Floats p = 1.535336188e-4f * r + 1.339887440e-3f;
  p = p * r + 9.618437357e-3f;
  p = p * r + 5.550332548e-2f;
  p = p * r + 2.402264791e-1f;
  p = p * r + 6.931472028e-1f;
  p = p * r + 1.0f;
  const Floats most = n < -125.0f ? Floats{} - 125.0f : n;   // p may be less than 1
  low = (Floats)((Bits)(n - most + 12583039.0f) << 23);      // 1.5 * 2^23 + 127
  return (Floats)((Bits)p + ((Bits)(most + 12582912.0f) << 23));
}

// gelu(x) = x s, s = sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3); the derivative is
// s + x s (1 - s) 2u'. With t = exp(-|2u|), which is at most 1, s and 1 - s are 1 / (1 + t) and
// t / (1 + t), the larger first where u is positive: no digits cancel, nothing overflows. Where u
// is negative, all is proportional to t: what t has below the normal numbers multiplies the result,
// which is then as small as it should be. Elsewhere it multiplies what is added to s alone: of a
// huge x that is as much as x^3 t.
static inline Floats gelu_backward(Floats grad, Floats x) {
  const Floats square = x * x;
  const Floats twice_u = x * (1.595769122f + 0.0713548163f * square);
  const Floats slope = 1.595769122f + 0.214064449f * square;
  Floats low;
  const Floats t = exp2_nonpositive(1.442695041f * (x > 0.0f ? -twice_u : twice_u), low);
  const Floats larger = 1.0f / (1.0f + t);
  const Floats smaller = t * larger;
  const Floats s = x > 0.0f ? larger : smaller;
  const Floats rest = x * (slope * (larger * smaller)) * low;   // x * slope alone may overflow
  return grad * (s * (x > 0.0f ? Floats{} + 1.0f : low) + rest);
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

extern "C" void gelu_backward_simd(const float* grad, const float* x, float* dx, int64_t count) {
#pragma omp parallel
  {
#pragma omp for schedule(SCHEDULE)
    for (int64_t start = 0; start < count; start += CHUNK) {
      const int64_t end = start + CHUNK < count ? start + CHUNK : count;
      int64_t i = start;
      for (; i + STEP <= end; i += STEP)
        for (int u = 0; u < UNROLL; ++u) {
          const int64_t at = i + u * LANES;
          store(dx + at, gelu_backward(*(const Floats*)(grad + at), *(const Floats*)(x + at)));
        }
      for (; i < end; ++i) dx[i] = gelu_backward(Floats{} + grad[i], Floats{} + x[i])[0];
    }
#if STREAM && defined(__AVX__)
    asm volatile("sfence" ::: "memory");   // streamed stores land before the caller reads
#endif
  }
}
"""


def gelu_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    grad, x = grad.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    defines = {
        "SCHEDULE": SCHEDULE,
        "CHUNK": CHUNK,
        "LANES": LANES,
        "UNROLL": UNROLL,
        "STREAM": STREAM,
    }
    cpp_kernel("gelu_backward_simd", SOURCE, defines=defines)(grad, x, dx, x.numel())
    return dx
