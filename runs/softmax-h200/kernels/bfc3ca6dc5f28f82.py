"""Softmax with one program per row: the padded row stays in registers, one read and one write.

Pays while a row fits the registers of one block: up to 16384 columns it runs at the speed of a copy
on an H100; at 65536 it spills, and `triton_online` or `cuda_cluster` is better.
"""

import torch
import triton
import triton.language as tl

ELEMENTS_PER_THREAD = 16  # more threads for the same row hide more latency, but reduce more slowly
TUNE = {"ELEMENTS_PER_THREAD": [8, 16, 32, 64]}


@triton.jit
def softmax_rows(x_ptr, y_ptr, x_stride, y_stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # rows * stride can exceed 32 bits
    offsets = tl.arange(0, BLOCK)
    inside = offsets < columns
    x = tl.load(x_ptr + row * x_stride + offsets, mask=inside, other=-float("inf")).to(tl.float32)
    # exp(x) = exp2(x * log2(e)): the hardware's exponential is base 2. The maximum is subtracted
    # first: rounding the product of a large x would cost the result its low bits.
    e = tl.exp2((x - tl.max(x, 0)) * 1.4426950408889634)
    y = e * (1.0 / tl.sum(e, 0))
    tl.store(y_ptr + row * y_stride + offsets, y.to(y_ptr.dtype.element_ty), mask=inside)


def softmax(x: torch.Tensor) -> torch.Tensor:
    rows, columns = x.shape
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(columns)
    warps = min(max(block // (32 * ELEMENTS_PER_THREAD), 1), 32)
    softmax_rows[(rows,)](x, y, x.stride(0), y.stride(0), columns, BLOCK=block, num_warps=warps)
    return y
