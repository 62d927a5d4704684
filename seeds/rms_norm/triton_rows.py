"""RMS norm with rows in registers: one read and one write.

A program has a tile of whole rows, so that short rows (the heads of a query-key norm) fill it too.
Many programs on an SM hide each other's latencies. A tile's width is a power of two. A row that is
long, or would leave a good part of its tile empty, is taken in pieces, of which only the last one
may be wider than what is left: fewer registers and threads are lost, and several rows are on their
way on an SM at a time. All pieces are loaded before the first is used. The weight is read by every
program; it stays in the L2 cache.
"""

import math

import torch
import triton
import triton.language as tl

TILE = 4096  # elements of a program that has several rows
ELEMENTS_PER_THREAD = 16
LONG = 2048  # columns from which on a row is taken in pieces
PIECES = 8  # of such a row, at most; a thread has 16 bytes of each
TUNE = {
    "TILE": [2048, 4096, 8192],
    "ELEMENTS_PER_THREAD": [8, 16, 32],
    "LONG": [2048, 4096, 8192, 32768],
    "PIECES": [4, 8, 16],
}
SHORT = 1024  # columns up to which rows are never taken in pieces
EMPTY = 4  # the part of a tile, one of so many, from which on it is too empty


@triton.jit
def _norm(x_ptr, weight, y_ptr, row, column, stride, rows, columns, eps):
    inside = (row < rows) & (column < columns)
    x = tl.load(x_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    weight = weight.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1, keep_dims=True) / columns + eps)
    y = x * scale * weight
    tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=inside)


# The compiler knows of a number only whether 16 divides it. Strides and columns come in words of
# WORD elements: of words * WORD it sees that WORD divides it, and loads and stores whole words.
# They are not worth kernels of their own for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["stride_words", "rows", "words"])
def rms_norm_rows(
    x_ptr,
    weight_ptr,
    y_ptr,
    stride_words,
    rows,
    words,
    eps,
    WORD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    stride, columns = stride_words.to(tl.int64) * WORD, words * WORD
    # In 64 bits: rows * stride can exceed 32.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0)
    _norm(x_ptr, weight, y_ptr, row, column, stride, rows, columns, eps)


@triton.jit(do_not_specialize=["stride_words", "words"])
def rms_norm_in_pieces(
    x_ptr,
    weight_ptr,
    y_ptr,
    stride_words,
    words,
    eps,
    WORD: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
):
    stride, columns = stride_words.to(tl.int64) * WORD, words * WORD
    row = tl.program_id(0).to(tl.int64)  # row * stride can exceed 32 bits
    x_row, y_row, lane = x_ptr + row * stride, y_ptr + row * columns, tl.arange(0, PIECE)
    pieces = ()
    total = tl.zeros([PIECE], tl.float32)
    for i in tl.static_range(PIECES):
        inside = (i * PIECE + lane < columns) | (i < PIECES - 1)  # only the last one has an end
        x = tl.load(x_row + i * PIECE + lane, mask=inside, other=0.0).to(tl.float32)
        pieces = pieces + (x,)  # noqa: RUF005 - no unpacking in Triton
        total += x * x
    scale = 1.0 / tl.sqrt_rn(tl.sum(total, 0) / columns + eps)
    for i in tl.static_range(PIECES):
        inside = (i * PIECE + lane < columns) | (i < PIECES - 1)
        weight = tl.load(weight_ptr + i * PIECE + lane, mask=inside, other=0.0).to(tl.float32)
        y = (pieces[i] * scale * weight).to(y_ptr.dtype.element_ty)
        tl.store(y_row + i * PIECE + lane, y, mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    rows, columns = x.shape
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(columns)
    together = max(TILE // block, 1)
    warps = min(max(together * block // (32 * ELEMENTS_PER_THREAD), 1), 32)
    programs = triton.cdiv(rows, together)
    word = math.gcd(columns, x.stride(0), 16 // x.element_size())
    strides, words = x.stride(0) // word, columns // word
    vector = 16 // x.element_size()
    piece = max(triton.next_power_of_2(triton.cdiv(columns, PIECES)), 32 * vector)
    empty = columns > SHORT and (block - columns) * EMPTY > block
    if (empty or columns >= LONG) and piece <= 1024 * vector:
        rms_norm_in_pieces[(rows,)](
            *(x, weight, y, strides, words, eps, word),
            PIECE=piece,
            PIECES=triton.cdiv(columns, piece),
            num_warps=piece // vector // 32,
        )
    else:
        rms_norm_rows[(programs,)](
            *(x, weight, y, strides, rows, words, eps, word),
            ROWS=together,
            BLOCK=block,
            num_warps=warps,
        )
    return y
