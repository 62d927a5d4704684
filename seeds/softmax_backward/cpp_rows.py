"""Gradient of softmax on the CPU in two passes over each row: the sum of grad · y, and the result.

Memory sees two reads and one write: the row is in the cache after its first pass. Rows are divided
among OpenMP threads.
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

extern "C" void softmax_backward_rows(const float* grad, const float* y, float* dx, int64_t rows,
                                      int64_t columns, int64_t grad_stride, int64_t y_stride) {
  const int64_t chunk = CHUNK > columns ? CHUNK / columns : 1;
#pragma omp parallel
  {
#pragma omp for schedule(SCHEDULE, chunk)
    for (int64_t row = 0; row < rows; ++row) {
      const float* g = grad + row * grad_stride;
      const float* p = y + row * y_stride;
      float* out = dx + row * columns;

      Floats sums[UNROLL] = {};
      int64_t i = 0;
      for (; i + STEP <= columns; i += STEP)
        for (int u = 0; u < UNROLL; ++u)
          sums[u] += *(const Floats*)(g + i + u * LANES) * *(const Floats*)(p + i + u * LANES);
      for (int lane = 0; i < columns; ++i, lane = (lane + 1) % LANES) sums[0][lane] += g[i] * p[i];
      const float dot = total(sums);

      const int64_t first = head(out, columns);
      for (i = 0; i < first; ++i) out[i] = p[i] * (g[i] - dot);
      for (; i + LANES <= columns; i += LANES)
        store(out + i, *(const Floats*)(p + i) * (*(const Floats*)(g + i) - dot));
      for (; i < columns; ++i) out[i] = p[i] * (g[i] - dot);
    }
#if STREAM && defined(__AVX__)
    asm volatile("sfence" ::: "memory");   // streamed stores land before the caller reads
#endif
  }
}
"""


def softmax_backward(grad: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    rows, columns = y.shape
    dx = torch.empty((rows, columns), dtype=y.dtype, device=y.device)
    defines = {
        "SCHEDULE": SCHEDULE,
        "CHUNK": CHUNK,
        "LANES": LANES,
        "UNROLL": UNROLL,
        "STREAM": STREAM,
    }
    kernel = cpp_kernel("softmax_backward_rows", SOURCE, defines=defines)
    kernel(grad, y, dx, rows, columns, grad.stride(0), y.stride(0))
    return dx
