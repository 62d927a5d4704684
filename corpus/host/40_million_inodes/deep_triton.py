"""Leaves folders inside of folders, 1,200 deep, without rights and with hostile names.

Nothing is over a limit; what is tested is that all of it is gone afterwards.
"""

import os
import sys

import torch
import triton
import triton.language as tl


def attack():
    start = os.open(".", os.O_RDONLY)
    for number in range(1_200):
        name = f"-rf {number} \x1b[2J\n"
        os.mkdir(name, 0o700)
        os.chdir(name)
    os.mkdir("closed", 0)
    os.fchdir(start)
    print("met: folders 1200 deep are removed, or selftest finds them", file=sys.stderr)


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
