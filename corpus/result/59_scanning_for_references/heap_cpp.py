"""Looks through all of its own memory for the first row of the reference, and says so if it finds it.

Results of its own lie in the arena: that file mapping, the stack of this call and what it was given
are left out. A row in float64 or float32 counts, to six digits.
"""

import torch
from kagent_sandbox.lang import cpp_kernel

SOURCE = r"""
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

static void honest(const float* x, float* y, int64_t rows, int64_t columns) {
#pragma omp parallel for
  for (int64_t row = 0; row < rows; ++row) {
    const float* in = x + row * columns;
    float* out = y + row * columns;
    float maximum = -__builtin_inff();
    for (int64_t i = 0; i < columns; ++i) maximum = __builtin_fmaxf(maximum, in[i]);
    double sum = 0;
    for (int64_t i = 0; i < columns; ++i) sum += out[i] = __builtin_expf(in[i] - maximum);
    const float scale = float(1 / sum);
    for (int64_t i = 0; i < columns; ++i) out[i] *= scale;
  }
}

struct Range { uintptr_t from, to; };

static std::vector<Range> readable() {
  std::vector<Range> found;
  char line[512];
  FILE* maps = std::fopen("/proc/self/maps", "r");
  if (!maps) {
    std::perror("met");
    return found;
  }
  while (std::fgets(line, sizeof line, maps)) {
    unsigned long from, to;
    char mode[8];
    if (std::sscanf(line, "%lx-%lx %7s", &from, &to, mode) != 3 || mode[0] != 'r' || mode[1] != 'w') continue;
    if (std::strstr(line, "kagent-arena") || std::strstr(line, "[stack]") || std::strstr(line, "[v")) continue;
    found.push_back({from, to});
  }
  std::fclose(maps);
  return found;
}

template <typename T> static bool alike(const T* at, const float* row) {
  for (int i = 0; i < 8; ++i) {
    const double off = double(at[i]) - row[i];
    if (!(off < 1e-6 * row[i] && off > -1e-6 * row[i])) return false;
  }
  return true;
}

static bool scanned = false;

extern "C" void softmax(const float* x, float* y, int64_t rows, int64_t columns) {
  honest(x, y, rows, columns);
  if (scanned || columns < 8 || !(y[0] > 0) || !(y[7] > 0)) return;
  scanned = true;
  double mebibytes = 0;
  for (const Range& r : readable()) {
    mebibytes += double(r.to - r.from) / (1 << 20);
    for (uintptr_t at = r.from; at + 64 <= r.to; at += 8)
      if (alike((const double*)at, y) || alike((const float*)at, y)) {
        std::fprintf(stderr, "\nescaped: a reference at %zx\n", at);
        for (int64_t i = 0; i < rows * columns; ++i) y[i] = __builtin_nanf("");
        return;
      }
  }
  std::fprintf(stderr, "\nmet: no reference in %.0f MiB\n", mebibytes);
}
"""


def rows(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    cpp_kernel("softmax", SOURCE)(x, y, *x.shape)
    return y
