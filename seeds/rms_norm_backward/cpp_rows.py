"""Gradients of RMS norm on the CPU: two passes over each row, the second from the cache.

Memory sees two reads and one write. Every OpenMP thread adds up its rows' share of the weight's
gradient in buffers of its own, some rows at a time, since one long chain of additions would lose
digits; then the threads add up the shares, each for some of the columns.
"""

import torch
from kagent_sandbox.lang import cpp_kernel

CHUNK = 16384  # floats that a thread takes at a time, in whole rows
LANES = 16  # floats per vector
UNROLL = 2  # sums in flight: an addition waits for the last one of its sum; one alone errs more
STREAM = 1  # 1: write past the caches; a plain store first reads the line that it overwrites
TUNE = {
    "CHUNK": [4096, 16384, 65536, 262144],
    "LANES": [8, 16],
    "UNROLL": [2, 4],
    "STREAM": [0, 1],
}

SOURCE = r"""
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <omp.h>

typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4)));
constexpr int64_t STEP = UNROLL * LANES;   // floats per iteration
constexpr int64_t ROWS = 32;   // whose sum is kept apart

static inline void move(float* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    to[i] += from[i];
    from[i] = 0.0f;
  }
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

extern "C" void rms_norm_backward_rows(const float* grad, const float* x, const float* weight,
                                       float* dx, float* dweight, int64_t rows, int64_t columns,
                                       int64_t grad_stride, int64_t x_stride, float eps) {
  const int64_t chunk = CHUNK > columns ? CHUNK / columns : 1;
  const int64_t pitch = (columns + 15) / 16 * 16;   // no two threads write to one cache line
  const int64_t most = omp_get_max_threads();
  auto shares = (float*)std::aligned_alloc(64, 2 * most * pitch * sizeof(float));
#pragma omp parallel
  {
    float* share = shares + omp_get_thread_num() * pitch;
    float* recent = share + most * pitch;   // of the last rows
    std::memset(share, 0, pitch * sizeof(float));
    std::memset(recent, 0, pitch * sizeof(float));
    int64_t mine = 0;
    // Static: which rows a thread adds up, and thus every bit, is the same every time.
#pragma omp for schedule(static, chunk) nowait
    for (int64_t row = 0; row < rows; ++row) {
      const float* g = grad + row * grad_stride;
      const float* in = x + row * x_stride;
      float* out = dx + row * columns;

      Floats squares[UNROLL] = {}, dots[UNROLL] = {};
      int64_t i = 0;
      for (; i + STEP <= columns; i += STEP)
        for (int u = 0; u < UNROLL; ++u) {
          const int64_t at = i + u * LANES;
          const Floats v = *(const Floats*)(in + at);
          squares[u] += v * v;
          dots[u] += *(const Floats*)(g + at) * *(const Floats*)(weight + at) * v;
        }
      for (int lane = 0; i < columns; ++i, lane = (lane + 1) % LANES) {
        squares[0][lane] += in[i] * in[i];
        dots[0][lane] += g[i] * weight[i] * in[i];
      }
      const float scale = 1.0f / __builtin_sqrtf(total(squares) / (float)columns + eps);
      const float dot = total(dots) * scale / (float)columns;   // mean(h n)

      const auto single = [&](int64_t i) {
        const float normed = in[i] * scale;
        out[i] = scale * (g[i] * weight[i] - normed * dot);
        recent[i] += g[i] * normed;
      };
      const int64_t first = head(out, columns);
      for (i = 0; i < first; ++i) single(i);
      for (; i + LANES <= columns; i += LANES) {
        const Floats gradient = *(const Floats*)(g + i);
        const Floats normed = *(const Floats*)(in + i) * scale;
        const Floats weighted = gradient * *(const Floats*)(weight + i);
        store(out + i, scale * (weighted - normed * dot));
        *(Floats*)(recent + i) += gradient * normed;
      }
      for (; i < columns; ++i) single(i);
      if (++mine % ROWS == 0) move(recent, share, columns);
    }
    move(recent, share, columns);
#pragma omp barrier
#if STREAM && defined(__AVX__)
    asm volatile("sfence" ::: "memory");   // streamed stores land before the caller reads
#endif
    const int64_t count = omp_get_num_threads();
#pragma omp for schedule(static)
    for (int64_t i = 0; i < columns; ++i) {
      float sum = 0.0f;
      for (int64_t thread = 0; thread < count; ++thread) sum += shares[thread * pitch + i];
      dweight[i] = sum;
    }
  }
  std::free(shares);
}
"""


def rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = x.shape
    dx = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    dweight = torch.empty(columns, dtype=x.dtype, device=x.device)
    defines = {"CHUNK": CHUNK, "LANES": LANES, "UNROLL": UNROLL, "STREAM": STREAM}
    kernel = cpp_kernel("rms_norm_backward_rows", SOURCE, defines=defines)
    strides = (grad.stride(0), x.stride(0))
    kernel(grad, x, weight, dx, dweight, rows, columns, *strides, eps)
    return dx, dweight
