"""Cross entropy with its gradient: two sweeps over each row, with a running maximum and sum.

The first sweep finds the row's log-sum-exp without storing anything; the second reads the row again
and writes the gradient. Pays for rows that do not fit the registers of a block: with few programs
on each SM the rows in flight stay in the L2 cache, so that the second read costs no DRAM traffic.
"""

import math

import torch
import triton
import triton.language as tl

TILE = 8192
NUM_WARPS = 16
PROGRAMS_PER_SM = 1  # rows in flight: more hide latency, fewer keep the second read in L2
TUNE = {"TILE": [4096, 8192, 16384], "NUM_WARPS": [8, 16, 32], "PROGRAMS_PER_SM": [1, 2, 4]}


# One program, in a fixed order: the same bits every time. `rows` only bounds a loop: it is not
# worth kernels of its own for 1 row and for multiples of 16.
@triton.jit(do_not_specialize=["rows"])
def count_targets(target_ptr, count_ptr, rows, ignore_index, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    counts = tl.zeros([BLOCK], tl.int32)
    for start in range(0, rows, BLOCK):
        target = tl.load(target_ptr + start + lane, mask=start + lane < rows, other=ignore_index)
        counts += (target != ignore_index).to(tl.int32)
    tl.store(count_ptr, tl.sum(counts, 0).to(tl.float32))


# The compiler knows of a number only whether 16 divides it. Strides and columns come in words of
# WORD elements: of words * WORD it sees that WORD divides it, and loads and stores whole words.
# They are not worth kernels of their own for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["stride_words", "rows", "words"])
def loss_and_gradient(
    logits_ptr,
    target_ptr,
    count_ptr,
    loss_ptr,
    grad_ptr,
    stride_words,
    rows,
    words,
    ignore_index,
    WORD: tl.constexpr,
    TILE: tl.constexpr,
):
    LOG2E: tl.constexpr = 1.4426950408889634
    stride, columns = stride_words.to(tl.int64) * WORD, words * WORD
    lane = tl.arange(0, TILE)
    tiles = tl.cdiv(columns, TILE)
    first = tl.program_id(0).to(tl.int64)  # rows * columns can exceed 32 bits
    for row in range(first, rows, tl.num_programs(0)):
        logits_row = logits_ptr + row * stride
        grad_row = grad_ptr + row * columns
        target = tl.load(target_ptr + row)
        if target == ignore_index:
            tl.store(loss_ptr + row, 0.0)
            zeros = tl.zeros([TILE], grad_ptr.dtype.element_ty)
            for tile in range(tiles):
                column = tile * TILE + lane
                tl.store(grad_row + column, zeros, mask=column < columns)
        else:
            # A finite lowest value: with -inf, the first -inf would give -inf - -inf.
            maximum = tl.full([TILE], -3.4028234663852886e38, tl.float32)
            total = tl.zeros([TILE], tl.float32)
            for tile in range(tiles):
                column = tile * TILE + lane
                x = tl.load(
                    logits_row + column,
                    mask=column < columns,
                    other=-float("inf"),
                    eviction_policy="evict_last",  # it is read again soon
                ).to(tl.float32)
                # Either the old sum or the new term is scaled, by the same factor: one exponential.
                factor = tl.exp2(-tl.abs(x - maximum) * LOG2E)
                total = tl.where(x > maximum, total * factor + 1.0, total + factor)
                maximum = tl.maximum(maximum, x)

            row_maximum = tl.max(maximum, 0)
            row_total = tl.sum(total * tl.exp2((maximum - row_maximum) * LOG2E), 0)
            at_target = tl.load(logits_row + target).to(tl.float32)
            # The difference first: where the model is sure, it is 0, and the logarithm keeps its
            # digits.
            tl.store(loss_ptr + row, tl.log(row_total) + (row_maximum - at_target))
            # The count is 0 only if all rows are ignored, and then this branch is not taken.
            share = 1.0 / tl.load(count_ptr)
            inverse = 1.0 / row_total

            # Backwards: what was read last is the likeliest to be cached.
            for tile in range(tiles):
                column = (tiles - 1 - tile) * TILE + lane
                inside = column < columns
                x = tl.load(
                    logits_row + column,
                    mask=inside,
                    other=-float("inf"),
                    eviction_policy="evict_first",
                ).to(tl.float32)
                p = tl.exp2((x - row_maximum) * LOG2E) * inverse
                # The mean's factor last: p - 1 at the target cancels, which would magnify its
                # rounding.
                grad = (p - tl.where(column == target, 1.0, 0.0)) * share
                tl.store(grad_row + column, grad.to(grad_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def mean_loss(loss_ptr, count_ptr, mean_ptr, rows, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, rows, BLOCK):
        sums += tl.load(loss_ptr + start + lane, mask=start + lane < rows, other=0.0)
    tl.store(mean_ptr, tl.sum(sums, 0) / tl.load(count_ptr))  # 0 / 0 = NaN, as torch has it


def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = logits.shape
    grad = torch.empty((rows, columns), dtype=logits.dtype, device=logits.device)
    count, loss = (torch.empty((), dtype=torch.float32, device=logits.device) for _ in range(2))
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)

    count_targets[(1,)](target, count, rows, ignore_index, BLOCK=2048, num_warps=8)
    tile = min(TILE, triton.next_power_of_2(columns))
    warps = min(NUM_WARPS, max(tile // 256, 1))
    processors = torch.cuda.get_device_properties(logits.device).multi_processor_count
    # A block of many warps leaves room for fewer programs; short rows need more of them in flight.
    programs = min(rows, processors * PROGRAMS_PER_SM * max(16 // warps, 1))
    word = math.gcd(columns, logits.stride(0), 16 // logits.element_size())
    loss_and_gradient[(programs,)](
        logits,
        target,
        count,
        losses,
        grad,
        logits.stride(0) // word,
        rows,
        columns // word,
        ignore_index,
        WORD=word,
        TILE=tile,
        num_warps=warps,
    )
    mean_loss[(1,)](losses, count, loss, rows, BLOCK=2048, num_warps=8)
    return loss, grad
