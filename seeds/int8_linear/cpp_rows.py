"""Linear layer with weights of 8 bits on the CPU: a row of the weight is read once for all tokens.

Threads divide the outputs. A block of a row becomes float32 in the first-level cache, and then
meets a few tokens at a time, so that every load of it has several multiplications.
"""

import torch
from kagent_sandbox.lang import cpp_kernel

SCHEDULE = "static"
OUTPUTS = 8  # that a thread takes at a time
BLOCK = 2048  # of the summed dimension: 8 KiB as float32
TOKENS = 4  # that share a load of the weight
LANES = 16  # floats per vector
UNROLL = 2  # sums in flight for each token
TUNE = {
    "SCHEDULE": ["static", "dynamic", "guided"],
    "OUTPUTS": [1, 4, 8, 16],
    "BLOCK": [512, 1024, 2048, 4096],
    "TOKENS": [2, 4, 8],
    "LANES": [8, 16],
    "UNROLL": [1, 2, 4],
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

// Adds to `sums` the products of COUNT tokens with a block of a row.
template <int COUNT>
static inline void multiply(const float* x, int64_t stride, const float* row, int64_t size,
                            float* sums) {
  Floats parts[COUNT][UNROLL] = {};
  int64_t i = 0;
  for (; i + STEP <= size; i += STEP)
    for (int u = 0; u < UNROLL; ++u) {
      const Floats w = *(const Floats*)(row + i + u * LANES);
      for (int t = 0; t < COUNT; ++t)
        parts[t][u] += *(const Floats*)(x + t * stride + i + u * LANES) * w;
    }
  for (int lane = 0; i < size; ++i, lane = (lane + 1) % LANES)
    for (int t = 0; t < COUNT; ++t) parts[t][0][lane] += x[t * stride + i] * row[i];
  for (int t = 0; t < COUNT; ++t) sums[t] += total(parts[t]);
}

extern "C" void int8_linear_rows(const float* x, const int8_t* weight, const float* scale, float* y,
                                 int64_t tokens, int64_t outputs, int64_t summed, int64_t x_stride,
                                 int64_t weight_stride) {
#pragma omp parallel for schedule(SCHEDULE, OUTPUTS)
  for (int64_t output = 0; output < outputs; ++output) {
    const int8_t* from = weight + output * weight_stride;
    alignas(64) float row[BLOCK];
    float sums[MOST_TOKENS] = {};
    for (int64_t start = 0; start < summed; start += BLOCK) {
      const int64_t size = start + BLOCK < summed ? BLOCK : summed - start;
      for (int64_t i = 0; i < size; ++i) row[i] = from[start + i];
      const float* at = x + start;
      int64_t token = 0;
      for (; token + TOKENS <= tokens; token += TOKENS)
        multiply<TOKENS>(at + token * x_stride, x_stride, row, size, sums + token);
      for (; token < tokens; ++token)
        multiply<1>(at + token * x_stride, x_stride, row, size, sums + token);
    }
    for (int64_t token = 0; token < tokens; ++token)
      y[token * outputs + output] = sums[token] * scale[output];
  }
}
"""


def int8_linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    tokens, summed = x.shape
    outputs = weight.shape[0]
    y = torch.empty((tokens, outputs), dtype=x.dtype, device=x.device)
    defines = {
        "SCHEDULE": SCHEDULE,
        "OUTPUTS": OUTPUTS,
        "BLOCK": BLOCK,
        "TOKENS": TOKENS,
        "LANES": LANES,
        "UNROLL": UNROLL,
        "MOST_TOKENS": 64,
    }
    kernel = cpp_kernel("int8_linear_rows", SOURCE, defines=defines)
    strides = (x.stride(0), weight.stride(0))
    kernel(x, weight, scale, y, tokens, outputs, summed, *strides)
    return y
