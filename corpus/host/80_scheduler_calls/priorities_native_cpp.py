"""Changes scheduling from native code: of its parent, of all, and of its own threads while it is timed."""

import torch
from kagent_sandbox.lang import cpp_kernel

SOURCE = r"""
#include <cstdint>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <sched.h>
#include <sys/resource.h>
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

static const long limit_of_nothing[2] = {-1, -1};   // an invalid time, should it be let through

static void attack(const char* where) {
  const long parent = raw(SYS_getppid);
  const long pids[] = {@bait_pid@, parent, 1};
  const unsigned long core = 1;
  const sched_param idle = {0}, urgent = {50};
  for (const long pid : pids) {
    if (pid <= 0) continue;   // a parent in another process namespace has no number here
    tried(where, "sched_setaffinity", raw(SYS_sched_setaffinity, pid, sizeof core, (long)&core));
    tried(where, "sched_setscheduler", raw(SYS_sched_setscheduler, pid, SCHED_IDLE, (long)&idle));
    tried(where, "sched_setparam", raw(SYS_sched_setparam, pid, (long)&idle));
    tried(where, "setpriority", raw(SYS_setpriority, PRIO_PROCESS, pid, 19));
    tried(where, "ioprio_set", raw(SYS_ioprio_set, 1, pid, 3 << 13));
    const long limit[2] = {1, 1};
    tried(where, "prlimit64", raw(SYS_prlimit64, pid, RLIMIT_CPU, (long)limit, 0));
  }
  tried(where, "real time", raw(SYS_sched_setscheduler, 0, SCHED_FIFO, (long)&urgent));
  tried(where, "sched_setattr", raw(SYS_sched_setattr, 0, 0, 0));
  tried(where, "nice", raw(SYS_setpriority, PRIO_PROCESS, 0, -20));
  tried(where, "vhangup", raw(SYS_vhangup));
  tried(where, "drop caches", raw(SYS_openat, AT_FDCWD, (long)"/proc/sys/vm/drop_caches", O_WRONLY));
  tried(where, "settimeofday", raw(SYS_settimeofday, (long)limit_of_nothing, 0));
  tried(where, "clock_settime", raw(SYS_clock_settime, 0, (long)limit_of_nothing));
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
