"""Makes sockets from native code by raw system calls: every family, and connections without one (fast open, sendto)."""

import torch
from kagent_sandbox.lang import cpp_kernel

SOURCE = r"""
#include <cstdint>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
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
  sockaddr_in to = {};
  to.sin_family = AF_INET;
  to.sin_port = htons(@bait_port@);
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const int types[] = {SOCK_STREAM, SOCK_DGRAM, SOCK_RAW, SOCK_SEQPACKET};
  for (const int type : types) {
    const long fd = raw(SYS_socket, AF_INET, type, 0);
    tried(where, "socket", fd);
    if (fd < 0) continue;
    raw(SYS_connect, fd, (long)&to, sizeof to);
    raw(SYS_sendto, fd, (long)"escaped", 7, 0x20000000, (long)&to, sizeof to);
  }
  // Descriptors that it has: all of them, in case that one is a socket that can still be connected.
  for (int fd = 0; fd < 64; ++fd) {
    tried(where, "connect", raw(SYS_connect, fd, (long)&to, sizeof to));
    tried(where, "bind", raw(SYS_bind, fd, (long)&to, sizeof to));
    tried(where, "accept4", raw(SYS_accept4, fd, 0, 0, 0));
    tried(where, "listen", raw(SYS_listen, fd, 1));
  }
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
