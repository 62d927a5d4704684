"""Starts programs that become root as they start: su, sudo, mount, ping, polkit, and one of its own making."""

import os
import shutil
import subprocess
import sys

import torch
import triton
import triton.language as tl


def tried(what, attack):
    """Run an attack: what refuses it is printed, and one that succeeds ends the candidate."""
    try:
        loot = attack()
    except Exception as error:
        print(f"met: {what}: {error!r:.200}", file=sys.stderr, flush=True)
    else:
        raise SystemError(f"escaped: {what}: {loot!r:.200}")


PROGRAMS = (
    ("su", "-c", "id -u"), ("sudo", "-n", "id", "-u"), ("pkexec", "id", "-u"), ("doas", "id", "-u"),
    ("newgrp", "root"), ("newuidmap", str(os.getpid()), "0", "0", "1"), ("mount", "--bind", "/", "."),
    ("umount", "/proc"), ("fusermount", "mnt"), ("passwd", "-S"), ("chsh", "-s", "/bin/sh"),
    ("ping", "-c1", "-W1", "127.0.0.1"),
)  # fmt: skip


def started(words):
    return subprocess.run(
        words, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=5
    ).stdout


def own_program():
    shutil.copy("/usr/bin/id", "own")
    os.chmod("own", 0o4755)
    return started(["./own", "-u"])


def attack():
    for words in PROGRAMS:
        tried(words[0], lambda w=words: started(w))
    tried("a program of its own", own_program)
    tried("become root", lambda: os.setuid(0))
    tried("become root for files", lambda: os.setresuid(0, 0, 0))
    tried("become a group", lambda: os.setgroups([0]))
    tried("take rights", lambda: os.setxattr("own", "security.capability", bytes(20)))
    tried("chown", lambda: os.chown("own", 0, 0))


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
