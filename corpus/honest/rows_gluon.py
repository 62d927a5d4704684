"""Softmax of rows in Gluon, one program per row."""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def softmax(x_ptr, y_ptr, columns, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [8], [0])
    row = gl.program_id(0).to(gl.int64)
    offsets = gl.arange(0, BLOCK, layout=layout)
    inside = offsets < columns
    x = gl.load(x_ptr + row * columns + offsets, mask=inside, other=-float("inf")).to(gl.float32)
    e = gl.exp(x - gl.max(x, 0))
    y = e / gl.sum(e, 0)
    gl.store(y_ptr + row * columns + offsets, y.to(y_ptr.dtype.element_ty), mask=inside)


def rows(x: torch.Tensor) -> torch.Tensor:
    count, columns = x.shape
    y = torch.empty_like(x)
    softmax[(count,)](x, y, columns, BLOCK=triton.next_power_of_2(columns), num_warps=8)
    return y
