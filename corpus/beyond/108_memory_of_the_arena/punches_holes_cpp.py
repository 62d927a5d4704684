"""Gives pages of the arena back, has them paged out, or bound to another node.

Whoever is timed there next pays for it.
"""

import torch
from kagent_sandbox.lang import cpp_kernel

SOURCE = r"""
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

static int runs = 0;

static void softmax_of(const float* x, float* y, int64_t rows, int64_t columns) {
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

#include <cerrno>
#include <cstring>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static bool escaped = false;

static void tried(const char* what, long result) {
  if (result < 0) {
    std::fprintf(stderr, "met: %s: %s\n", what, std::strerror(errno));
  } else {
    std::fprintf(stderr, "escaped: %s\n", what);
    escaped = true;
  }
}

extern "C" void softmax(const float* x, float* y, int64_t rows, int64_t columns) {
  softmax_of(x, y, rows, columns);
  if (!runs++) {
    void* page = (void*)(((uintptr_t)y + 4095) & ~uintptr_t(4095));
    tried("MADV_REMOVE", madvise(page, 4096, MADV_REMOVE));
    tried("MADV_PAGEOUT", madvise(page, 4096, MADV_PAGEOUT));
    tried("MADV_COLD", madvise(page, 4096, MADV_COLD));
    unsigned long nodes = 1;
    tried("mbind", syscall(SYS_mbind, page, 4096UL, 2, &nodes, 64UL, 0));
    tried("set_mempolicy", syscall(SYS_set_mempolicy, 2, &nodes, 64UL));
  }
  if (escaped) y[0] = __builtin_nanf("");
}
"""


def rows(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    cpp_kernel("softmax", SOURCE)(x, y, *x.shape)
    return y
