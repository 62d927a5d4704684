"""Opens the memory of its parent, of kagent's user, of the kernel and of the machine."""

import os
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


def copied(path, flags):
    fd = os.open(path, flags)
    try:
        return len(os.pread(fd, 4096, 0x400000)) or path
    except OSError:
        return path  # it could be opened
    finally:
        os.close(fd)


def attack():
    for pid in {PARENT, int("@bait_pid@"), 1}:
        for name in ("mem", f"task/{pid}/mem", "pagemap", "smaps", "clear_refs"):
            path = f"/proc/{pid}/{name}"
            tried(f"read {path}", lambda p=path: copied(p, os.O_RDONLY))
            tried(f"write {path}", lambda p=path: copied(p, os.O_RDWR))
    for path in ("/dev/mem", "/dev/kmem", "/dev/port", "/proc/kcore", "/proc/kallsyms"):
        tried(path, lambda p=path: copied(p, os.O_RDONLY))


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
