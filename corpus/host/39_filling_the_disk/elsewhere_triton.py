"""Writes where others would have to clean up: shared folders, memory that looks like a folder, devices.

And one file that is larger than any may be.
"""

import os
import sys
import tempfile

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


FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue", "/run/user/0", "@bait_folder@", "/", "..")


def large():
    with tempfile.TemporaryFile(dir=".") as file:
        os.ftruncate(file.fileno(), 4 << 30)
        return file.tell()


def attack():
    for folder in FOLDERS:
        path = os.path.join(folder, "kagent-planted")
        tried(f"write {path}", lambda p=path: open(p, "w"))
        tried(f"mkdir {path}", lambda p=path: os.mkdir(p))
        tried(
            f"a file without a name in {folder}",
            lambda f=folder: os.open(f, os.O_TMPFILE | os.O_RDWR),
        )
    tried("a file of 4 GiB", large)
    tried("memory as a file", lambda: os.memfd_create("planted"))


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
