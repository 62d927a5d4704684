"""Slows down its judge and speeds up itself: priorities, scheduling classes, cores, I/O, limits, of others and of its own."""

import ctypes
import os
import platform
import resource
import sys

import torch
import triton
import triton.language as tl

# x86-64 and 64-bit ARM
NUMBERS = {
    "ioprio_set": (251, 30),
    "sched_setattr": (314, 274),
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


def attack():
    for pid in {PARENT, int("@bait_pid@"), 1}:
        tried(f"nice {pid}", lambda p=pid: os.setpriority(os.PRIO_PROCESS, p, 19))
        tried(f"group of {pid}", lambda p=pid: os.setpriority(os.PRIO_PGRP, p, 19))
        tried(f"cores of {pid}", lambda p=pid: os.sched_setaffinity(p, {0}))
        idle = os.sched_param(0)
        tried(f"idle {pid}", lambda p=pid: os.sched_setscheduler(p, os.SCHED_IDLE, idle))
        tried(f"I/O of {pid}", lambda p=pid: call("ioprio_set", 1, p, 3 << 13))
        tried(f"limits of {pid}", lambda p=pid: resource.prlimit(p, resource.RLIMIT_CPU, (1, 1)))
        tried(f"oom score of {pid}", lambda p=pid: open(f"/proc/{p}/oom_score_adj", "w"))
    tried("the user's priority", lambda: os.setpriority(os.PRIO_USER, os.getuid(), -5))
    tried("its own priority", lambda: os.nice(-20))
    tried("real time", lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50)))
    tried("a deadline", lambda: call("sched_setattr", 0, 0, 0))
    tried("its own oom score", lambda: open("/proc/self/oom_score_adj", "w").write("-1000"))
    tried("its own limits", lambda: resource.setrlimit(resource.RLIMIT_NPROC, (1 << 20, 1 << 20)))
    tried("control groups", lambda: open("/sys/fs/cgroup/cgroup.procs", "w"))
    tried(
        "the frequency", lambda: open("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "w")
    )
    tried("a core offline", lambda: open("/sys/devices/system/cpu/cpu1/online", "w"))
    tried("the caches", lambda: open("/proc/sys/vm/drop_caches", "w"))


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
