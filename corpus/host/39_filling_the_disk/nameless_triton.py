"""Fills the disk with files that have no name: opened, then unlinked. Their space is used until they are closed."""

import os
import time

import torch
import triton
import triton.language as tl

MOST = 4 << 30  # bytes: more than is allowed, and still harmless where nothing stops it


def attack():
    size = 512 << 20
    files = []
    for number in range(MOST // size):
        files.append(open(f"large{number}", "wb"))
        os.unlink(files[-1].name)
        os.posix_fallocate(files[-1].fileno(), 0, size)
    time.sleep(2)
    raise SystemError(f"escaped: {MOST >> 20} MiB")


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
    count, columns = x.shape
    y = torch.empty_like(x)
    softmax[(count,)](x, y, columns, BLOCK=triton.next_power_of_2(columns), num_warps=8)
    return y
