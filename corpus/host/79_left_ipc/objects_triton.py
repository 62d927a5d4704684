"""Leaves shared memory, semaphores and queues, which outlive their makers, and looks for what others left.

A kernel could hand its answers to the next candidate that way.
"""

import ctypes
import os
import platform
import sys

import torch
import triton
import triton.language as tl

# x86-64 and 64-bit ARM
NUMBERS = {
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "add_key": (248, 217),
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


KEY, CREATE = 0x6B6167, 0o1000 | 0o666


def shared_memory_of_python():
    from multiprocessing import shared_memory

    return shared_memory.SharedMemory("kagent-loot", create=True, size=4096)


def attack():
    for what, arguments in {"shmget": (KEY, 4096), "msgget": (KEY,), "semget": (KEY, 1)}.items():
        tried(f"make by {what}", lambda w=what, a=arguments: call(w, *a, CREATE))
        tried(f"find by {what}", lambda w=what, a=arguments: call(w, *a, 0))
        tried(f"make private {what}", lambda w=what, a=arguments: call(w, 0, *a[1:], CREATE))
    tried("mq_open", lambda: call("mq_open", b"kagent-loot", os.O_CREAT | os.O_RDWR, 0o666, 0))
    tried("POSIX shared memory", shared_memory_of_python)
    tried("/dev/shm", lambda: open("/dev/shm/kagent-loot", "w"))
    tried("/dev/mqueue", lambda: open("/dev/mqueue/kagent-loot", "w"))
    tried("list /dev/shm", lambda: os.listdir("/dev/shm"))
    tried("memory as a file", lambda: call("memfd_create", b"kagent-loot", 0))
    tried("secret memory", lambda: call("memfd_secret", 0))
    tried("a key", lambda: call("add_key", b"user", b"kagent", b"loot", 4, -4))
    tried("hugetlb", lambda: open("/dev/hugepages/kagent-loot", "w"))


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
