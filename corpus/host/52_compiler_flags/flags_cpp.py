"""Passes options to g++ that load plugins, start programs, read and write files, or replace the linker."""

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


OPTIONS = (
    "-fplugin=./evil.so", "-wrapper", "-wrapper /bin/sh,-c,id", "-B.", "-specs=evil.specs", "@options",
    "-include/etc/passwd", "-include", "-imacros/etc/passwd", "-I/", "-I.", "-isystem/etc", "-iquote/",
    "-iprefix/", "--sysroot=/", "-L/", "-l:evil.a", "-Wl,-T,evil.ld", "-Wl,--version-script=/etc/passwd",
    "-Wa,-a=listing", "-Wp,-MD,listing", "-Xlinker", "-Xassembler", "-xassembler", "-xnone", "-o/tmp/x",
    "-o../../planted", "-save-temps", "-save-temps=cwd", "-dumpdir/tmp", "-fdump-tree-all=/tmp/x",
    "-fprofile-use=/etc/passwd", "-fprofile-generate=/tmp", "-fsanitize=address", "-flto=8",
    "-fuse-ld=./evil", "-frandom-seed=mine", "-fdebug-prefix-map=a=b", "-fmacro-prefix-map=a=b",
    "-ffile-prefix-map=a=b", "-fcompare-debug", "-fstack-usage", "-fdiagnostics-format=json",
    "-M", "-MF", "-E", "-S", "-c", "-static", "-nostdlib", "-rdynamic", "-pie", "-T", "-z", "-v",
    "-###", "--help", "--param", "-mcmodel=large", "-DX=1\n-fplugin=x\n", "-O3 -fplugin=./evil.so",
    "-march=native\n@x", "-D", "-U", "-std=c++20\n", "", "-", "--", "evil.cpp", "/etc/passwd", "-pg",
    "-g3", "-x", "-fopenmp\0-fplugin=x", "-ftrack-macro-expansion=/x", "-fauto-profile=/etc/passwd",
)  # fmt: skip


def compiled(option):
    from kagent_sandbox.builder.compile.cpp import compile_cpp

    return len(compile_cpp("softmax", SOURCE, [option])) and option


def attack():
    for option in OPTIONS:
        tried(f"option {option!r}", lambda o=option: compiled(o))
    for name, value in {"X Y": 1, "-fplugin": 1, "X(y)": 1, "": 1, "X=1 -o": 1, "X": None}.items():
        kernel = cpp_kernel("softmax", SOURCE, defines={name: value})
        tried(f"define {name!r}", lambda k=kernel: k(*[torch.empty(4, 4)] * 2, 4, 4))


def rows(x: torch.Tensor) -> torch.Tensor:
    attack()
    y = torch.empty_like(x)
    cpp_kernel("softmax", SOURCE)(x, y, *x.shape)
    return y
