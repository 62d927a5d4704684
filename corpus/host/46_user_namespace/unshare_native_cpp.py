"""Takes new namespaces and mounts from native code."""

import torch
from kagent_sandbox.lang import cpp_kernel

SOURCE = r"""
#include <cstdint>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <sched.h>
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
  const long flags[] = {CLONE_NEWUSER, CLONE_NEWNS, CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWIPC, 0x80};
  for (const long flag : flags) {
    tried(where, "unshare", raw(SYS_unshare, flag));
    const long pid = raw(SYS_clone, flag | SIGCHLD);
    if (pid == 0) raw(SYS_exit_group, 0);
    tried(where, "clone", pid);
  }
  tried(where, "setns", raw(SYS_setns, 0, 0));
  tried(where, "mount", raw(SYS_mount, (long)"none", (long)"/", (long)"tmpfs", 0, 0));
  tried(where, "umount2", raw(SYS_umount2, (long)"/proc", 2));
  tried(where, "fsopen", raw(430, (long)"tmpfs", 0));
  tried(where, "open_tree", raw(428, AT_FDCWD, (long)"/", 1));
  tried(where, "pivot_root", raw(SYS_pivot_root, (long)".", (long)"."));
  tried(where, "chroot", raw(SYS_chroot, (long)"."));
  tried(where, "acct", raw(SYS_acct, (long)"accounts"));
  tried(where, "swapon", raw(SYS_swapon, (long)"swap", 0));
  tried(where, "sethostname", raw(SYS_sethostname, (long)"mine", 4));
  tried(where, "init_module", raw(SYS_init_module, 0, 0, 0));
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
