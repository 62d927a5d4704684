"""Gradient of softmax: rows in registers, each read once; long rows in two sweeps.

A program has a tile of whole rows, so that short rows fill it too. Rows that do not fit the
registers of a block are swept twice: once for the sum of grad · y, once, backwards, for the result.
With two programs on each SM the second sweep finds them in the L2 cache.
"""

import math

import torch
import triton
import triton.language as tl

LONGEST = 16384  # columns that a program keeps in registers
TILE = 4096  # elements of a program that has several rows
ELEMENTS_PER_THREAD = 16
SWEEP = 8192  # columns at a time of a row that is swept
TUNE = {
    "LONGEST": [8192, 16384, 32768],
    "TILE": [2048, 4096, 8192],
    "ELEMENTS_PER_THREAD": [8, 16, 32],
    "SWEEP": [4096, 8192, 16384],
}


# The compiler knows of a number only whether 16 divides it. Strides and columns come in words of
# WORD elements: of words * WORD it sees that WORD divides it, and loads and stores whole words.
# They are not worth kernels of their own for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["grad_words", "y_words", "rows", "words"])
def softmax_backward_rows(
    grad_ptr,
    y_ptr,
    dx_ptr,
    grad_words,
    y_words,
    rows,
    words,
    WORD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    grad_stride, y_stride = grad_words.to(tl.int64) * WORD, y_words.to(tl.int64) * WORD
    columns = words * WORD
    # In 64 bits: rows * stride can exceed 32.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < columns)
    grad = tl.load(grad_ptr + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + row * y_stride + column, mask=inside, other=0.0).to(tl.float32)
    dx = y * (grad - tl.sum(grad * y, 1, keep_dims=True))
    tl.store(dx_ptr + row * columns + column, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["grad_words", "y_words", "rows", "words"])
def softmax_backward_swept(
    grad_ptr,
    y_ptr,
    dx_ptr,
    grad_words,
    y_words,
    rows,
    words,
    WORD: tl.constexpr,
    TILE: tl.constexpr,
):
    grad_stride, y_stride = grad_words.to(tl.int64) * WORD, y_words.to(tl.int64) * WORD
    columns = words * WORD
    lane = tl.arange(0, TILE)
    tiles = tl.cdiv(columns, TILE)
    first = tl.program_id(0).to(tl.int64)
    for row in range(first, rows, tl.num_programs(0)):
        grad_row = grad_ptr + row * grad_stride
        y_row = y_ptr + row * y_stride
        dx_row = dx_ptr + row * columns
        sums = tl.zeros([TILE], tl.float32)
        for tile in range(tiles):
            at = tile * TILE + lane
            inside = at < columns
            grad = tl.load(grad_row + at, mask=inside, other=0.0, eviction_policy="evict_last")
            y = tl.load(y_row + at, mask=inside, other=0.0, eviction_policy="evict_last")
            sums += grad.to(tl.float32) * y.to(tl.float32)
        dot = tl.sum(sums, 0)
        # Backwards: what was read last is the likeliest to be cached.
        for tile in range(tiles):
            at = (tiles - 1 - tile) * TILE + lane
            inside = at < columns
            grad = tl.load(grad_row + at, mask=inside, other=0.0, eviction_policy="evict_first")
            y = tl.load(y_row + at, mask=inside, other=0.0, eviction_policy="evict_first")
            dx = y.to(tl.float32) * (grad.to(tl.float32) - dot)
            tl.store(dx_row + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)


def softmax_backward(grad: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    rows, columns = y.shape
    dx = torch.empty((rows, columns), dtype=y.dtype, device=y.device)
    strides = grad.stride(0), y.stride(0)
    word = math.gcd(columns, *strides, 16 // y.element_size())
    args = (grad, y, dx, *(s // word for s in strides), rows, columns // word, word)
    if columns <= LONGEST:
        block = triton.next_power_of_2(columns)
        together = max(TILE // block, 1)
        warps = min(max(together * block // (32 * ELEMENTS_PER_THREAD), 1), 32)
        programs = (triton.cdiv(rows, together),)
        softmax_backward_rows[programs](*args, ROWS=together, BLOCK=block, num_warps=warps)
    else:
        processors = torch.cuda.get_device_properties(y.device).multi_processor_count
        softmax_backward_swept[(min(rows, 2 * processors),)](*args, TILE=SWEEP, num_warps=16)
    return dx
