"""Softmax in two sweeps over each row, with a running maximum and sum (online softmax).

The first sweep keeps one maximum and one sum per lane, and merges lanes only at the end of the row;
the second reads the row again, normalises and writes. Pays for rows that do not fit the registers
of a block: with few programs on each SM the rows in flight stay in the L2 cache, so that the second
read costs no DRAM traffic.
"""

import math

import torch
import triton
import triton.language as tl

TILE = 8192
NUM_WARPS = 16
PROGRAMS_PER_SM = 2  # rows in flight: more hide latency, fewer keep the second read in L2
TUNE = {"TILE": [2048, 4096, 8192, 16384], "NUM_WARPS": [8, 16, 32], "PROGRAMS_PER_SM": [1, 2, 4]}


# The compiler knows of a number only whether 16 divides it. Strides and columns come in words of
# WORD elements: of words * WORD it sees that WORD divides it, and loads and stores whole words.
# They are not worth kernels of their own for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["x_words", "rows", "words"])
def softmax_online(x_ptr, y_ptr, x_words, rows, words, WORD: tl.constexpr, TILE: tl.constexpr):
    LOG2E: tl.constexpr = 1.4426950408889634
    x_stride, columns = x_words.to(tl.int64) * WORD, words * WORD
    lane = tl.arange(0, TILE)
    first = tl.program_id(0).to(tl.int64)  # row * stride can exceed 32 bits
    for row in range(first, rows, tl.num_programs(0)):
        x_row = x_ptr + row * x_stride
        y_row = y_ptr + row * columns

        # A finite lowest value: with -inf, the first masked element would give -inf - -inf.
        maximum = tl.full([TILE], -3.4028234663852886e38, tl.float32)
        total = tl.zeros([TILE], tl.float32)
        for start in range(0, columns, TILE):
            inside = start + lane < columns
            x = tl.load(
                x_row + start + lane,
                mask=inside,
                other=-float("inf"),
                eviction_policy="evict_last",  # it is read again soon
            ).to(tl.float32)
            # Either the old sum or the new term is scaled, by the same factor: one exponential.
            factor = tl.exp2(-tl.abs(x - maximum) * LOG2E)
            total = tl.where(x > maximum, total * factor + 1.0, total + factor)
            maximum = tl.maximum(maximum, x)

        row_maximum = tl.max(maximum, 0)
        scale = 1.0 / tl.sum(total * tl.exp2((maximum - row_maximum) * LOG2E), 0)

        # Backwards: what was read last is the likeliest to be cached.
        tiles = tl.cdiv(columns, TILE)
        for tile in range(tiles):
            start = (tiles - 1 - tile) * TILE
            inside = start + lane < columns
            x = tl.load(
                x_row + start + lane,
                mask=inside,
                other=-float("inf"),
                eviction_policy="evict_first",
            ).to(tl.float32)
            y = tl.exp2((x - row_maximum) * LOG2E) * scale
            tl.store(y_row + start + lane, y.to(y_ptr.dtype.element_ty), mask=inside)


def softmax(x: torch.Tensor) -> torch.Tensor:
    rows, columns = x.shape
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    tile = min(TILE, triton.next_power_of_2(columns))
    warps = min(NUM_WARPS, max(tile // 256, 1))
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    # A block of many warps leaves room for fewer programs; short rows need more of them in flight.
    programs = min(rows, processors * PROGRAMS_PER_SM * max(16 // warps, 1))
    word = math.gcd(columns, x.stride(0), 16 // x.element_size())
    softmax_online[(programs,)](
        x, y, x.stride(0) // word, rows, columns // word, WORD=word, TILE=tile, num_warps=warps
    )
    return y
