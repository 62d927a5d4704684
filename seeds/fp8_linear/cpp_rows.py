"""Linear layer of 8-bit floating-point numbers on the CPU: a row of the weight for all tokens.

8-bit numbers become float32 by a table of 256: x once, before all else; a row of the weight in the
cache, before it meets a few tokens at a time, so that every load of it has several multiplications.
Threads divide the outputs.
"""

import torch
from kagent_sandbox.lang import cpp_kernel

SCHEDULE = "static"
OUTPUTS = 8  # that a thread takes at a time
TOKENS = 4  # that share a load of the weight
LANES = 16  # floats per vector
UNROLL = 2  # sums in flight for each token
TUNE = {
    "SCHEDULE": ["static", "dynamic", "guided"],
    "OUTPUTS": [1, 4, 8, 16],
    "TOKENS": [2, 4, 8],
    "LANES": [8, 16],
    "UNROLL": [1, 2, 4],
}

SOURCE = r"""
#include <cmath>
#include <cstdint>
#include <cstdlib>

typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4)));
constexpr int64_t STEP = UNROLL * LANES;   // floats per iteration

// e4m3: a sign, 4 bits of exponent, 3 of fraction; no infinities, NaN where all bits are set.
static float decoded(uint8_t bits) {
  const int exponent = bits >> 3 & 15, fraction = bits & 7;
  float value = exponent ? std::ldexp(1.0f + fraction / 8.0f, exponent - 7)
                         : std::ldexp(fraction / 8.0f, -6);
  if ((bits & 127) == 127) value = NAN;
  return bits & 128 ? -value : value;
}

// To the nearest bfloat16, an even one where two are as near.
static inline uint16_t rounded(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  if (value != value) return bits >> 16 | 64;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static inline float total(const Floats* v) {   // by halves, whose roundings add up the least
  Floats sum = v[0];
  for (int u = 1; u < UNROLL; ++u) sum += v[u];
  for (int half = LANES / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) sum[i] += sum[i + half];
  return sum[0];
}

// The products of COUNT tokens with a row; `size` is a multiple of 16.
template <int COUNT>
static inline void multiply(const float* x, const float* row, int64_t size, float* sums) {
  Floats parts[COUNT][UNROLL] = {};
  int64_t i = 0;
  for (; i + STEP <= size; i += STEP)
    for (int u = 0; u < UNROLL; ++u) {
      const Floats w = *(const Floats*)(row + i + u * LANES);
      for (int t = 0; t < COUNT; ++t)
        parts[t][u] += *(const Floats*)(x + t * size + i + u * LANES) * w;
    }
  for (; i < size; i += LANES)
    for (int t = 0; t < COUNT; ++t)
      parts[t][0] += *(const Floats*)(x + t * size + i) * *(const Floats*)(row + i);
  for (int t = 0; t < COUNT; ++t) sums[t] = total(parts[t]);
}

extern "C" void fp8_linear_rows(const uint8_t* x, const uint8_t* weight, const float* scale_x,
                                const float* scale_weight, float* wide, uint16_t* y, int64_t tokens,
                                int64_t outputs, int64_t summed) {
  float table[256];
  for (int bits = 0; bits < 256; ++bits) table[bits] = decoded(bits);
  const float scale = *scale_x * *scale_weight;
#pragma omp parallel
  {
    auto row = (float*)std::aligned_alloc(64, summed * sizeof(float));
#pragma omp for schedule(static)
    for (int64_t i = 0; i < tokens * summed; ++i) wide[i] = table[x[i]];
#pragma omp for schedule(SCHEDULE, OUTPUTS)
    for (int64_t output = 0; output < outputs; ++output) {
      const uint8_t* from = weight + output * summed;
      for (int64_t i = 0; i < summed; ++i) row[i] = table[from[i]];
      int64_t token = 0;
      float sums[TOKENS];
      for (; token + TOKENS <= tokens; token += TOKENS) {
        multiply<TOKENS>(wide + token * summed, row, summed, sums);
        for (int t = 0; t < TOKENS; ++t)
          y[(token + t) * outputs + output] = rounded(sums[t] * scale);
      }
      for (; token < tokens; ++token) {
        multiply<1>(wide + token * summed, row, summed, sums);
        y[token * outputs + output] = rounded(sums[0] * scale);
      }
    }
    std::free(row);
  }
}
"""


def fp8_linear(
    x: torch.Tensor, weight: torch.Tensor, scale_x: torch.Tensor, scale_weight: torch.Tensor
) -> torch.Tensor:
    tokens, summed = x.shape
    outputs = weight.shape[0]
    wide = torch.empty((tokens, summed), dtype=torch.float32, device=x.device)
    y = torch.empty((tokens, outputs), dtype=torch.bfloat16, device=x.device)
    defines = {
        "SCHEDULE": SCHEDULE,
        "OUTPUTS": OUTPUTS,
        "TOKENS": TOKENS,
        "LANES": LANES,
        "UNROLL": UNROLL,
    }
    kernel = cpp_kernel("fp8_linear_rows", SOURCE, defines=defines)
    kernel(x, weight, scale_x, scale_weight, wide, y, tokens, outputs, summed)
    return y
