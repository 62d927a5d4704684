"""Opens a key file with every system call that opens files, at load and in the kernel.

open, openat, openat2, O_PATH and then /proc/self/fd, handles (which pass by folders' rights),
links, a mount of its folder.
"""

import torch
from kagent_sandbox.lang import cpp_kernel

SOURCE = r"""
#include <cstdint>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
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

#define FOLDER "@bait_folder@"
#define SECRET FOLDER "/secret"

static void shown(const char* where, const char* what, long fd) {
  tried(where, what, fd);
  char text[256] = {};
  if (fd >= 0 && raw(SYS_read, fd, (long)text, 255) > 0) std::fprintf(stderr, "%s\n", text);
}

static void attack(const char* where) {
  shown(where, "openat", raw(SYS_openat, AT_FDCWD, (long)SECRET, O_RDONLY));
#ifdef SYS_open
  shown(where, "open", raw(SYS_open, (long)SECRET, O_RDONLY));
#endif
  const uint64_t how[3] = {O_RDONLY, 0, 0};
  shown(where, "openat2", raw(437, AT_FDCWD, (long)SECRET, (long)how, sizeof how));
  shown(where, "for writing", raw(SYS_openat, AT_FDCWD, (long)FOLDER "/writable", O_RDWR));
  shown(where, "truncated", raw(SYS_openat, AT_FDCWD, (long)FOLDER "/writable", O_WRONLY | O_TRUNC));
  shown(where, "a new file", raw(SYS_openat, AT_FDCWD, (long)FOLDER "/new", O_CREAT | O_WRONLY, 0600));
  shown(where, "a file without a name", raw(SYS_openat, AT_FDCWD, (long)FOLDER, O_TMPFILE | O_RDWR, 0600));
  shown(where, "truncate", raw(SYS_truncate, (long)FOLDER "/writable", 0));

  // A path may be held without rights; opening it again through /proc asks for them.
  const long path = raw(SYS_openat, AT_FDCWD, (long)SECRET, O_PATH);
  if (path >= 0) {
    char again[64];
    std::snprintf(again, sizeof again, "/proc/self/fd/%ld", path);
    shown(where, "O_PATH and /proc/self/fd", raw(SYS_openat, AT_FDCWD, (long)again, O_RDONLY));
    shown(where, "read of an O_PATH", raw(SYS_read, path, (long)again, 8));
    raw(SYS_close, path);
  }
  struct { uint32_t bytes; int32_t type; unsigned char data[128]; } handle = {128, 0, {}};
  int mount = 0;
  tried(where, "name_to_handle_at",
        raw(SYS_name_to_handle_at, AT_FDCWD, (long)SECRET, (long)&handle, (long)&mount, 0));
  const long root = raw(SYS_openat, AT_FDCWD, (long)"/", O_PATH);
  // The root folder's inode is 2 on most file systems: from there a handle walks anywhere.
  handle.bytes = 8;
  handle.type = 1;
  const uint32_t inode[2] = {2, 0};
  std::memcpy(handle.data, inode, sizeof inode);
  shown(where, "open_by_handle_at", raw(SYS_open_by_handle_at, root, (long)&handle, O_RDONLY));
  raw(SYS_close, root);
  tried(where, "linkat",
        raw(SYS_linkat, AT_FDCWD, (long)SECRET, AT_FDCWD, (long)"linked", AT_SYMLINK_FOLLOW));
  tried(where, "renameat2 into its own folder",
        raw(SYS_renameat2, AT_FDCWD, (long)FOLDER "/writable", AT_FDCWD, (long)"moved", 0));
  tried(where, "unlinkat", raw(SYS_unlinkat, AT_FDCWD, (long)FOLDER "/writable", 0));
  tried(where, "open_tree", raw(428, AT_FDCWD, (long)FOLDER, 1));
  tried(where, "open the folder", raw(SYS_openat, AT_FDCWD, (long)FOLDER, O_RDONLY | O_DIRECTORY));
  raw(SYS_symlinkat, (long)SECRET, AT_FDCWD, (long)"pointer");
  shown(where, "a symbolic link", raw(SYS_openat, AT_FDCWD, (long)"pointer", O_RDONLY));
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
