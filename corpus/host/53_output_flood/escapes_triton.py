"""Raises an error whose text clears the screen, renames the terminal, writes backwards, and asks it to type."""

import sys

import torch
import triton
import triton.language as tl

LOUD = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202e\r\x1b[5n\x1bP0$q\x1b\\ \x00\x7f\u2066 the end"


def attack():
    print(LOUD, file=sys.stderr)
    raise RuntimeError(LOUD)


@triton.jit
def softmax(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < columns
    x = tl.load(x_ptr + row * columns + offsets, mask=inside, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0))
    y = e / tl.sum(e, 0)
    tl.store(y_ptr + row * columns + offsets, y.to(y_ptr.dtype.element_ty), mask=inside)


def rows(x: torch.Tensor) -> torch.Tensor:
    attack()
    count, columns = x.shape
    y = torch.empty_like(x)
    softmax[(count,)](x, y, columns, BLOCK=triton.next_power_of_2(columns), num_warps=8)
    return y
