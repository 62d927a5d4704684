"""Attacks in native code, when it is loaded and when its kernel runs, beside the plain kernel."""

import torch
from kagent_sandbox.lang import cpp_kernel

SOURCE = r"""
#include <cstdint>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <sys/syscall.h>
#include <unistd.h>

// A system call by its number: no wrapper of libc stands in between. Returns -errno.
static long raw(long number, long a = 0, long b = 0, long c = 0, long d = 0, long e = 0,
                long f = 0) {
#ifdef __x86_64__
  register long r10 asm("r10") = d;
  register long r8 asm("r8") = e;
  register long r9 asm("r9") = f;
  long result;
  asm volatile("syscall"
               : "=a"(result)
               : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
               : "rcx", "r11", "memory");
  return result;
#else
  const long result = syscall(number, a, b, c, d, e, f);
  return result < 0 ? -errno : result;
#endif
}

static bool escaped = false;

static void tried(const char* where, const char* what, long result) {
  if (result < 0) {
    std::fprintf(stderr, "met: %s, %s: %s\n", what, where, std::strerror(-result));
  } else {
    std::fprintf(stderr, "escaped: %s, %s\n", what, where);
    escaped = true;
  }
}

static void attack(const char* where) {
}

__attribute__((constructor)) static void at_load() { attack("at load"); }

extern "C" void softmax(const float* x, float* y, int64_t rows, int64_t columns) {
  static const bool once = (attack("in the kernel"), true);
  (void)once;
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
  if (escaped) y[0] = __builtin_nanf("");
}
"""


def rows(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    cpp_kernel("softmax", SOURCE)(x, y, *x.shape)
    return y
