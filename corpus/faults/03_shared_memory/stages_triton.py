"""A product whose sixteen stages need more shared memory than a multiprocessor has."""

import torch
import triton
import triton.language as tl


@triton.jit
def softmax(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < columns
    x = tl.load(x_ptr + row * columns + offsets, mask=inside, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0))
    across = tl.arange(0, 64)[:, None] * 128 + tl.arange(0, 128)[None, :]
    down = tl.arange(0, 128)[:, None] + tl.arange(0, 64)[None, :] * 128
    product = tl.zeros((64, 64), tl.float32)
    for i in range(columns):
        product += tl.dot(tl.load(x_ptr + across + i * 64), tl.load(x_ptr + down + i * 64))
    y = e / tl.sum(e, 0) + 0 * tl.sum(product)
    tl.store(y_ptr + row * columns + offsets, y.to(y_ptr.dtype.element_ty), mask=inside)


def rows(x: torch.Tensor) -> torch.Tensor:
    count, columns = x.shape
    y = torch.empty_like(x)
    BLOCK = triton.next_power_of_2(columns)
    softmax[(count,)](x, y, columns, BLOCK=BLOCK, num_warps=8, num_stages=16)
    return y
