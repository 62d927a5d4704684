"""RMS norm on the CPU in two passes over each row: the sum of squares, and the result.

Memory sees one read and one write: the row is in the cache after its first pass, and the weight is
always. Rows are divided among OpenMP threads.
"""

import torch
from kagent_sandbox.lang import cpp_kernel

SCHEDULE = "static"
CHUNK = 16384  # floats that a thread takes at a time, in whole rows
LANES = 16  # floats per vector
UNROLL = 4  # sums in flight: an addition waits for the last one of its sum
STREAM = 1  # 1: write past the caches; a plain store first reads the line that it overwrites
TUNE = {
    "SCHEDULE": ["static", "dynamic", "guided"],
    "CHUNK": [4096, 16384, 65536, 262144],
    "LANES": [8, 16],
    "UNROLL": [2, 4, 8],
    "STREAM": [0, 1],
}

SOURCE = r"""
#include <cstdint>

typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4)));
constexpr int64_t STEP = UNROLL * LANES;   // floats per iteration

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

extern "C" void rms_norm_rows(const float* x, const float* weight, float* y, int64_t rows,
                              int64_t columns, int64_t stride, float eps) {
  const int64_t chunk = CHUNK > columns ? CHUNK / columns : 1;
#pragma omp parallel
  {
#pragma omp for schedule(SCHEDULE, chunk)
    for (int64_t row = 0; row < rows; ++row) {
      const float* in = x + row * stride;
      float* out = y + row * columns;

      Floats sums[UNROLL] = {};
      int64_t i = 0;
      for (; i + STEP <= columns; i += STEP)
        for (int u = 0; u < UNROLL; ++u) {
          const Floats v = *(const Floats*)(in + i + u * LANES);
          sums[u] += v * v;
        }
      for (int lane = 0; i < columns; ++i, lane = (lane + 1) % LANES)
        sums[0][lane] += in[i] * in[i];
      const float scale = 1.0f / __builtin_sqrtf(total(sums) / (float)columns + eps);

      const int64_t first = head(out, columns);
      for (i = 0; i < first; ++i) out[i] = in[i] * scale * weight[i];
      for (; i + LANES <= columns; i += LANES)
        store(out + i, *(const Floats*)(in + i) * scale * *(const Floats*)(weight + i));
      for (; i < columns; ++i) out[i] = in[i] * scale * weight[i];
    }
#if STREAM && defined(__AVX__)
    asm volatile("sfence" ::: "memory");   // streamed stores land before the caller reads
#endif
  }
}
"""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    rows, columns = x.shape
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    defines = {
        "SCHEDULE": SCHEDULE,
        "CHUNK": CHUNK,
        "LANES": LANES,
        "UNROLL": UNROLL,
        "STREAM": STREAM,
    }
    kernel = cpp_kernel("rms_norm_rows", SOURCE, defines=defines)
    kernel(x, weight, y, rows, columns, x.stride(0), eps)
    return y
