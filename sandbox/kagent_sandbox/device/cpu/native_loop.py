"""The loop in a CPU launcher that answers requests for executions, without Python.

Native code shares the launcher's process. What it saved by answering in the launcher's place would
count as its speed: equal kernels differed by 5 % where Python answered, since its code and objects
lie in no cache when a sample begins. So the launcher's own answer is as short as any can be. Plans
that need Python, for operations of torch, are executed there; so are kernels with more arguments
than a call here passes.

Every kernel is called alike, with all registers for arguments and a fixed number of places on the
stack. Integers and floating-point numbers are counted apart in the calling conventions of x86-64
(System V) and 64-bit ARM, and what a function does not read does not matter to it.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import struct
from collections.abc import Sequence
from pathlib import Path

from kagent_sandbox.device.cpu.execution_request import MOST_BYTES, TOKEN_BYTES
from kagent_sandbox.runtime.cpp import compile_cpp
from kagent_sandbox.runtime.errors import CompileError, KernelUnavailable

_INTEGERS = {"x86_64": 6, "aarch64": 8}  # registers; there are 8 for floating point on both
_FLOATS, _STACK = 8, 24
_SOURCE = r"""
#include <cstdint>
#include <unistd.h>

struct Launch {
  void* function;
  int64_t integers[INTEGERS];
  double floats[8];
  int64_t stack[24];
};
struct Plan {
  const Launch* launches;
  int64_t count;   // -1: it needs Python
};

static void call(const Launch& launch) {
  const int64_t *i = launch.integers, *s = launch.stack;
  const double* f = launch.floats;
#define FLOATS f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7]
#define STACK s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], s[9], s[10], s[11], s[12], \
  s[13], s[14], s[15], s[16], s[17], s[18], s[19], s[20], s[21], s[22], s[23]
#define I int64_t
#define D double
#define TYPES D, D, D, D, D, D, D, D, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, \
  I, I, I, I
#if INTEGERS == 6
  ((void (*)(I, I, I, I, I, I, TYPES))launch.function)(
      i[0], i[1], i[2], i[3], i[4], i[5], FLOATS, STACK);
#else
  ((void (*)(I, I, I, I, I, I, I, I, TYPES))launch.function)(
      i[0], i[1], i[2], i[3], i[4], i[5], i[6], i[7], FLOATS, STACK);
#endif
}

// Answers requests until one needs Python; returns its bytes, as read(2) does.
extern "C" int64_t answer(int socket, const Plan* plans, int64_t known, unsigned char* request) {
  for (;;) {
    const ssize_t got = read(socket, request, MOST);
    if (got < TOKEN) return got;
    const uint32_t* numbers = (const uint32_t*)(request + TOKEN);
    const int64_t count = (got - TOKEN) / 4;
    for (int64_t n = 0; n < count; ++n)
      if (numbers[n] >= known || plans[numbers[n]].count < 0) return got;
    for (int64_t n = 0; n < count; ++n) {
      const Plan& plan = plans[numbers[n]];
      for (int64_t k = 0; k < plan.count; ++k) call(plan.launches[k]);
    }
    if (write(socket, request, TOKEN) != TOKEN) return -1;
  }
}
"""


class NativeLaunch(ctypes.Structure):
    """A call of a kernel: its address, and its arguments where the convention has them."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("integers", ctypes.c_int64 * _INTEGERS.get(platform.machine(), 6)),
        ("floats", ctypes.c_uint64 * _FLOATS),
        ("stack", ctypes.c_int64 * _STACK),
    )


class _NativePlan(ctypes.Structure):
    _fields_ = (("launches", ctypes.c_void_p), ("count", ctypes.c_int64))


@functools.cache
def native_loop() -> bytes:
    """The loop as a shared library; empty where it cannot be had: Python answers then."""
    machine = platform.machine()
    if machine not in _INTEGERS:
        return b""
    defines = {"INTEGERS": _INTEGERS[machine], "MOST": MOST_BYTES, "TOKEN": TOKEN_BYTES}
    try:
        return compile_cpp("answer", _SOURCE, ["-O2", "-fno-openmp"], defines)
    except (KernelUnavailable, CompileError):  # no kernels can be compiled then, either
        return b""


def native_launch(function: int, arguments: Sequence[object]) -> NativeLaunch | None:
    """A kernel's call; None if it has more arguments than a call passes.

    Args:
        function: The kernel's address.
        arguments: Instances of ctypes' simple types.
    """
    launch = NativeLaunch(function)
    integers = floats = stack = 0
    for argument in arguments:
        assert isinstance(argument, ctypes._SimpleCData)  # noqa: SLF001 - ctypes has no other name
        value = argument.value or 0
        if isinstance(argument, ctypes.c_float | ctypes.c_double):
            code = "<f4x" if isinstance(argument, ctypes.c_float) else "<d"
            bits = int.from_bytes(struct.pack(code, value), "little")
            if floats < _FLOATS:
                launch.floats[floats] = bits
                floats += 1
                continue
        else:
            bits = int(value)
            if integers < len(launch.integers):
                launch.integers[integers] = _signed(bits)
                integers += 1
                continue
        if stack == _STACK:
            return None
        launch.stack[stack] = _signed(bits)
        stack += 1
    return launch


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >= 1 << 63 else bits


class NativeLoop:
    """The loop in this process, over plans by number."""

    def __init__(self, binary: bytes, folder: Path) -> None:
        """Load the library, which is written to `folder`."""
        path = folder / "loop"
        path.write_bytes(binary)
        self._answer = ctypes.CDLL(str(path)).answer
        self._answer.restype = ctypes.c_int64
        self._request = ctypes.create_string_buffer(MOST_BYTES)
        self._plans = (_NativePlan * 64)()
        self._launches: dict[int, ctypes.Array[NativeLaunch]] = {}
        for plan in self._plans:
            plan.count = -1

    def keep(self, number: int, launches: Sequence[NativeLaunch] | None) -> None:
        """Take a plan's launches; None: it needs Python."""
        while number >= len(self._plans):
            longer = (_NativePlan * (2 * len(self._plans)))()
            for plan in longer:
                plan.count = -1
            ctypes.memmove(longer, self._plans, ctypes.sizeof(self._plans))
            self._plans = longer
        self._launches.pop(number, None)
        self._plans[number].count = -1
        if launches is not None:
            kept = self._launches[number] = (NativeLaunch * len(launches))(*launches)
            self._plans[number].launches = ctypes.addressof(kept)
            self._plans[number].count = len(launches)

    def answer(self, socket: int) -> bytes:
        """Answer requests until one needs Python: that one; empty at the end.

        Raises:
            OSError: The socket fails.
        """
        got = self._answer(socket, self._plans, ctypes.c_int64(len(self._plans)), self._request)
        if got < 0:
            raise OSError("the judge's socket failed")
        return ctypes.string_at(self._request, got)
