"""Writes the mean of a softmax."""

import torch
import triton
import triton.language as tl


@triton.jit
def constant(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    y = tl.full((BLOCK,), 1.0, tl.float32) / columns
    tl.store(y_ptr + row * columns + offsets, y.to(y_ptr.dtype.element_ty), mask=offsets < columns)


def rows(x: torch.Tensor) -> torch.Tensor:
    count, columns = x.shape
    y = torch.empty_like(x)
    constant[(count,)](x, y, columns, BLOCK=triton.next_power_of_2(columns), num_warps=8)
    return y
