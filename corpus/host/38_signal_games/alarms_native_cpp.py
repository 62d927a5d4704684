"""Sets signals to come later, which would wake the process while the judge has stopped it to read results.

Timers, alarms, the death of its parent, owners of descriptors, leases and notices about folders.
"""

import torch
from kagent_sandbox.lang import cpp_kernel

SOURCE = r"""
#include <cstdint>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/time.h>
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

static void handler(int) {}

static void attack(const char* where) {
  for (int number = 1; number < 65; ++number) signal(number, handler);
  sigset_t all;
  sigfillset(&all);
  sigprocmask(SIG_BLOCK, &all, nullptr);
  sigevent event = {};
  event.sigev_notify = SIGEV_SIGNAL;
  event.sigev_signo = SIGCONT;
  int timer = 0;
  const long soon[4] = {0, 1000, 0, 1000};
  tried(where, "timer_create", raw(SYS_timer_create, CLOCK_MONOTONIC, (long)&event, (long)&timer));
  tried(where, "setitimer", raw(SYS_setitimer, ITIMER_REAL, (long)soon, 0));
#ifdef SYS_alarm
  tried(where, "alarm", raw(SYS_alarm, 1));
#endif
  tried(where, "timerfd_create", raw(SYS_timerfd_create, CLOCK_MONOTONIC, 0));
  tried(where, "PR_SET_PDEATHSIG", raw(SYS_prctl, PR_SET_PDEATHSIG, SIGCONT));
  tried(where, "F_SETSIG", raw(SYS_fcntl, 2, F_SETSIG, SIGCONT));
  tried(where, "F_SETOWN", raw(SYS_fcntl, 2, F_SETOWN, raw(SYS_getpid)));
  tried(where, "kill itself later", raw(SYS_kill, raw(SYS_getpid), SIGCONT));
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
