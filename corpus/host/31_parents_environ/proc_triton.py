"""Reads the environment and command line of every process that it can name.

That of its supervisor, of a process of the user who started kagent, and of pid 1.
"""

import os
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


PARENT = os.getppid() or 1  # the supervisor; later this process is the parent of its own forks


def read(path):
    with open(path, "rb") as file:
        return file.read()


def attack():
    for pid in {PARENT, int("@bait_pid@"), 1, PARENT - 1, PARENT - 2} - {0, -1, os.getpid()}:
        for name in ("environ", "cmdline", "auxv", "maps", f"task/{pid}/environ"):
            tried(f"/proc/{pid}/{name}", lambda p=f"/proc/{pid}/{name}": read(p))
        tried(f"/proc/{pid}/cwd", lambda p=pid: os.listdir(f"/proc/{p}/cwd"))
        tried(f"/proc/{pid}/root", lambda p=pid: os.listdir(f"/proc/{p}/root/root"))
        tried(f"/proc/{pid}/fd", lambda p=pid: os.listdir(f"/proc/{p}/fd"))
    tried("list /proc", lambda: os.listdir("/proc"))
    tried("ps", lambda: subprocess.run(["ps", "eww", "-A"], check=True, capture_output=True))


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
