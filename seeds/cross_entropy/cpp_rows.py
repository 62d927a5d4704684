"""Cross entropy with its gradient on the CPU: three passes over each row, which stays in the cache.

Maximum; exponentials and their sum; scaling. Exponentials wait in a buffer of the thread's own, so
that the gradient can be written past the caches. Rows are divided among OpenMP threads. Losses are
summed in order and in double, so that the result does not depend on the number of threads.
"""

import torch
from kagent_sandbox.lang import cpp_kernel

SCHEDULE = "dynamic"  # rows that do not count cost next to nothing: a static division can be uneven
CHUNK = 16384  # floats that a thread takes at a time, in whole rows
LANES = 16  # floats per vector
UNROLL = 2  # vectors in flight, with maxima and sums of their own
STREAM = 1  # 1: write past the caches; a plain store first reads the line that it overwrites
PREFETCH = 0  # 1: fetch the next row while this one's results are computed
TUNE = {
    "SCHEDULE": ["static", "dynamic", "guided"],
    "CHUNK": [4096, 16384, 65536, 262144],
    "LANES": [8, 16],
    "UNROLL": [2, 4, 8],
    "STREAM": [0, 1],
    "PREFETCH": [0, 1],
}

SOURCE = r"""
#include <cstdint>
#include <cstdlib>
#include <cstring>

typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
constexpr int64_t STEP = UNROLL * LANES;   // floats per iteration

// exp(x) for x <= 0 within 2 ulp; 0 below the smallest normal result (also for -inf).
// x = n ln 2 + r with |r| <= ln(2)/2; a polynomial for exp(r), and n goes into the exponent bits.
static inline Floats exp_nonpositive(Floats x) {
  const Floats shifted = x * 1.44269504f + 12582912.0f;   // + 1.5 * 2^23 rounds to a whole number
  const Floats n = shifted - 12582912.0f;
  const Floats r = (x - n * 0.693145752f) - n * 1.42860677e-6f;   // ln 2 in two parts
  Floats p = 1.9875691500e-4f * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Floats y = (Floats)((Bits)p + ((Bits)shifted << 23));   // n: the low bits of shifted
  return x < -87.0f ? Floats{} : y;
}

static inline float largest(const Floats* v) {
  float result = v[0][0];
  for (int u = 0; u < UNROLL; ++u)
    for (int i = 0; i < LANES; ++i) result = v[u][i] > result ? v[u][i] : result;
  return result;
}

static inline float total(const Floats* v) {   // by halves, whose roundings add up the least
  Floats sum = v[0];
  for (int u = 1; u < UNROLL; ++u) sum += v[u];
  for (int half = LANES / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) sum[i] += sum[i + half];
  return sum[0];
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

// Floats before the first place that can be streamed to; of short rows, whose lines are shared, 0.
static inline int64_t head(const float* to, int64_t columns) {
  return STREAM && columns >= 256 ? -(uintptr_t)to % sizeof(Floats) / 4 : 0;
}

static inline void land() {   // streamed stores are weakly ordered: before the caller reads
#if STREAM && defined(__AVX__)
  asm volatile("sfence" ::: "memory");
#endif
}

// losses: [rows], scratch.
extern "C" void cross_entropy_rows(const float* logits, const int64_t* target, float* losses,
                                   float* loss, float* grad, int64_t rows, int64_t columns,
                                   int64_t stride, int64_t ignore_index) {
  int64_t count = 0;
  for (int64_t row = 0; row < rows; ++row) count += target[row] != ignore_index;
  const float share = 1.0f / static_cast<float>(count);   // not used where count is 0
  const int64_t whole = columns / STEP * STEP;
  const int64_t chunk = CHUNK > columns ? CHUNK / columns : 1;

#pragma omp parallel
  {
    auto buffer = (float*)std::aligned_alloc(64, (whole + STEP + 15) / 16 * 64);
#pragma omp for schedule(SCHEDULE, chunk)
    for (int64_t row = 0; row < rows; ++row) {
      const float* in = logits + row * stride;
      const float* next = row + 1 < rows ? in + stride : in;
      float* out = grad + row * columns;
      if (target[row] == ignore_index) {
        losses[row] = 0.0f;
        std::memset(out, 0, columns * sizeof(float));
        continue;
      }

      Floats rest[UNROLL];   // the last, incomplete step: -inf changes neither maximum nor sum
      for (int64_t i = 0; i < STEP; ++i)
        ((float*)rest)[i] = whole + i < columns ? in[whole + i] : -__builtin_inff();

      Floats maxima[UNROLL], sums[UNROLL] = {};
      for (int u = 0; u < UNROLL; ++u) maxima[u] = rest[u];
      for (int64_t i = 0; i < whole; i += STEP)
        for (int u = 0; u < UNROLL; ++u) {
          const Floats v = *(const Floats*)(in + i + u * LANES);
          maxima[u] = v > maxima[u] ? v : maxima[u];
        }
      const float maximum = largest(maxima);

      for (int64_t i = 0; i <= whole; i += STEP) {
        const Floats* from = i < whole ? (const Floats*)(in + i) : rest;
        for (int u = 0; u < UNROLL; ++u) {
          if (PREFETCH) __builtin_prefetch(next + i + u * LANES);
          const Floats e = exp_nonpositive(from[u] - maximum);
          *(Floats*)(buffer + i + u * LANES) = e;
          sums[u] += e;
        }
      }

      const float sum = total(sums);
      losses[row] = __builtin_logf(sum) + (maximum - in[target[row]]);
      buffer[target[row]] -= sum;   // p - 1, times the sum: the difference before more rounding

      const float scale = share / sum;
      int64_t i = 0;
      for (const int64_t first = head(out, columns); i < first; ++i) out[i] = buffer[i] * scale;
      for (; i + LANES <= columns; i += LANES) store(out + i, *(Floats*)(buffer + i) * scale);
      for (; i < columns; ++i) out[i] = buffer[i] * scale;
    }
    std::free(buffer);
    land();
  }

  double all = 0.0;
  for (int64_t row = 0; row < rows; ++row) all += losses[row];
  *loss = static_cast<float>(all / static_cast<double>(count));   // 0 / 0 = NaN, as torch has it
}
"""


def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = logits.shape
    grad = torch.empty((rows, columns), dtype=logits.dtype, device=logits.device)
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    loss = torch.empty((), dtype=torch.float32, device=logits.device)
    defines = {
        "SCHEDULE": SCHEDULE,
        "CHUNK": CHUNK,
        "LANES": LANES,
        "UNROLL": UNROLL,
        "STREAM": STREAM,
        "PREFETCH": PREFETCH,
    }
    kernel = cpp_kernel("cross_entropy_rows", SOURCE, defines=defines)
    kernel(logits, target, losses, loss, grad, rows, columns, logits.stride(0), ignore_index)
    return loss, grad
