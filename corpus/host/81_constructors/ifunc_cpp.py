"""Attacks while the loader still relocates the library: a resolver of an indirect function runs before any constructor."""

import torch
from kagent_sandbox.lang import cpp_kernel

SOURCE = r"""
#include <cstdint>
#include <cstdio>
#include <sys/syscall.h>
#include <unistd.h>

static long resolved = -1;

static void plain() {}

// libc is not relocated yet, so a bare system call.
extern "C" void (*resolve_it())() {
#ifdef __x86_64__
  long result;
  asm volatile("syscall" : "=a"(result) : "a"(57L) : "rcx", "r11", "memory");   // fork
  resolved = result;
#endif
  return plain;
}
extern "C" void chosen() __attribute__((ifunc("resolve_it")));

__attribute__((constructor)) static void at_load() {
  chosen();
  std::fprintf(stderr, "%s: fork while relocating answered %ld\n", resolved < 0 ? "met" : "escaped", resolved);
}

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
