"""Softmax with one program per row: the padded row stays in registers, one read and one write.

Pays while a row fits the registers of one block: up to 16384 columns it runs at the speed of a copy
on an H100; at 65536 it spills, and `triton_online` or `cuda_cluster` is better.
"""

import math

import torch
import triton
import triton.language as tl

ELEMENTS_PER_THREAD = 16  # more threads for the same row hide more latency, but reduce more slowly
TUNE = {"ELEMENTS_PER_THREAD": [8, 16, 32, 64]}


# The compiler knows of a number only whether 16 divides it. Strides and columns come in words of
# WORD elements: of words * WORD it sees that WORD divides it, and loads and stores whole words.
# They are not worth kernels of their own for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["x_words", "words"])
def softmax_rows(x_ptr, y_ptr, x_words, words, WORD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # rows * stride can exceed 32 bits
    x_stride, columns = x_words.to(tl.int64) * WORD, words * WORD
    offsets = tl.arange(0, BLOCK)
    inside = offsets < columns
    x = tl.load(x_ptr + row * x_stride + offsets, mask=inside, other=-float("inf")).to(tl.float32)
    # exp(x) = exp2(x * log2(e)): the hardware's exponential is base 2. The maximum is subtracted
    # first: rounding the product of a large x would cost the result its low bits.
    e = tl.exp2((x - tl.max(x, 0)) * 1.4426950408889634)
    y = e * (1.0 / tl.sum(e, 0))
    tl.store(y_ptr + row * columns + offsets, y.to(y_ptr.dtype.element_ty), mask=inside)


def softmax(x: torch.Tensor) -> torch.Tensor:
    rows, columns = x.shape
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(columns)
    warps = min(max(block // (32 * ELEMENTS_PER_THREAD), 1), 32)
    word = math.gcd(columns, x.stride(0), 16 // x.element_size())
    softmax_rows[(rows,)](
        x, y, x.stride(0) // word, columns // word, WORD=word, BLOCK=block, num_warps=warps
    )
    return y
