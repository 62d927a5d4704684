"""Steers the compiler by its environment: libraries to load before it, programs to find first, folders to search.

Its own folder holds a library and a program that say so when they run.
"""

import os
import pathlib
import subprocess
import sys

import torch
from kagent_sandbox.lang import cpp_kernel

SOURCE = r"""
#include <cstdint>

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


def tried(what, attack):
    """Run an attack: what refuses it is printed, and one that succeeds ends the candidate."""
    try:
        loot = attack()
    except Exception as error:
        print(f"met: {what}: {error!r:.200}", file=sys.stderr, flush=True)
    else:
        raise SystemError(f"escaped: {what}: {loot!r:.200}")


EVIL = """
#include <cstdio>
#include <cstdlib>
__attribute__((constructor)) static void at_load() {
  std::FILE* file = std::fopen("@bait_folder@/writable", "a");
  std::fprintf(stderr, file ? "escaped: beside the compiler\\n" : "met: a library beside the compiler\\n");
}
"""


def attack():
    home = pathlib.Path(os.environ["HOME"])
    (home / "evil.cpp").write_text(EVIL)
    evil = ["g++", "-shared", "-fPIC", "-o", str(home / "evil.so"), str(home / "evil.cpp")]
    subprocess.run(evil, check=True)
    (home / "as").write_text("#!/bin/sh\necho escaped: a program of its own >&2\n")
    (home / "as").chmod(0o755)
    tried("a program of its own", lambda: subprocess.run([str(home / "as")], check=True))
    os.environ |= {
        "LD_PRELOAD": str(home / "evil.so"),
        "COMPILER_PATH": str(home),
        "GCC_EXEC_PREFIX": "",
        "CPATH": "/etc",
        "TMPDIR": "/tmp",
    }
    subprocess.run(["true"], check=True)


attack()


def rows(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    cpp_kernel("softmax", SOURCE)(x, y, *x.shape)
    return y
