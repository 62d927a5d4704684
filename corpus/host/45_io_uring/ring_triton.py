"""Sets up a ring of requests that the kernel would carry out beside every filter of calls. And the older asynchronous ones."""

import ctypes
import os
import platform
import sys

import torch
import triton
import triton.language as tl

# x86-64 and 64-bit ARM
NUMBERS = {
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_setup": (206, 0),
    "unknown": (1000, 1000),
}

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def call(name, *arguments):
    """A raw system call, by number: no wrapper of libc or Python stands in between."""
    number = NUMBERS[name][platform.machine() == "aarch64"]
    result = libc.syscall(
        number, *(a if isinstance(a, bytes) else ctypes.c_long(a) for a in arguments)
    )
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def tried(what, attack):
    """Run an attack: what refuses it is printed, and one that succeeds ends the candidate."""
    try:
        loot = attack()
    except Exception as error:
        print(f"met: {what}: {error!r:.200}", file=sys.stderr, flush=True)
    else:
        raise SystemError(f"escaped: {what}: {loot!r:.200}")


def attack():
    parameters = ctypes.create_string_buffer(256)
    for entries in (1, 8, 4096):
        tried("set up", lambda n=entries: call("io_uring_setup", n, ctypes.addressof(parameters)))
    for fd in range(3, 16):
        tried("enter", lambda f=fd: call("io_uring_enter", f, 1, 0, 0, 0, 0))
        tried("register", lambda f=fd: call("io_uring_register", f, 0, 0, 0))
    tried("io_setup", lambda: call("io_setup", 8, ctypes.addressof(parameters)))
    tried("a call of the future", lambda: call("unknown", 0, 0, 0))


@triton.jit
def softmax(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < columns
    x = tl.load(x_ptr + row * columns + offsets, mask=inside, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0))
    y = e / tl.sum(e, 0)
    tl.store(y_ptr + row * columns + offsets, y.to(y_ptr.dtype.element_ty), mask=inside)


attack()


def rows(x: torch.Tensor) -> torch.Tensor:
    attack()
    count, columns = x.shape
    y = torch.empty_like(x)
    softmax[(count,)](x, y, columns, BLOCK=triton.next_power_of_2(columns), num_warps=8)
    return y
