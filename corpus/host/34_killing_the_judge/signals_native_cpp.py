"""Sends signals from native code: to its parent, to kagent's user, to its group and to everybody."""

import torch
from kagent_sandbox.lang import cpp_kernel

SOURCE = r"""
#include <cstdint>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <sys/ioctl.h>
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
  const long parent = raw(SYS_getppid);
  const long pids[] = {@bait_pid@, parent, 1};
  for (const long pid : pids) {
    if (pid <= 0) continue;   // a parent in another process namespace has no number here
    const int numbers[] = {SIGKILL, SIGSTOP, SIGINT, 0};
    for (const int number : numbers) {
      tried(where, "kill", raw(SYS_kill, pid, number));
      tried(where, "tgkill", raw(SYS_tgkill, pid, pid, number));
      tried(where, "tkill", raw(SYS_tkill, pid, number));
    }
    if (pid > 1) tried(where, "killpg", raw(SYS_kill, -pid, SIGKILL));
    tried(where, "pidfd", raw(424, raw(434, pid, 0), SIGKILL, 0, 0));
    tried(where, "rt_sigqueueinfo", raw(SYS_rt_sigqueueinfo, pid, SIGKILL, 0));
    tried(where, "F_SETOWN", raw(SYS_fcntl, 2, F_SETOWN, pid));
    tried(where, "F_SETSIG", raw(SYS_fcntl, 2, F_SETSIG, SIGKILL));
    int owner = pid;
    tried(where, "FIOSETOWN", raw(SYS_ioctl, 2, 0x8901, (long)&owner));
    const long limit[2] = {1, 1};
    tried(where, "prlimit64", raw(SYS_prlimit64, pid, 0, (long)limit, 0));
  }
  tried(where, "kill everybody", raw(SYS_kill, -1, SIGWINCH));
  tried(where, "kill its group", raw(SYS_kill, 0, SIGWINCH));
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
