"""Cross entropy with its gradient: one program per row, which stays in registers; read once.

Three launches: how many rows count; each row's loss and gradient; the mean. The count comes first,
since the gradient is divided by it. Pays while a row fits the registers of one block: 32768 columns
are 32 values for each of 1024 threads. Beyond that `triton_online` or `cuda_cluster` is better.
"""

import math

import torch
import triton
import triton.language as tl

ELEMENTS_PER_THREAD = 32
TUNE = {"ELEMENTS_PER_THREAD": [16, 32, 64]}


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
@triton.jit(do_not_specialize=["stride_words", "words"])
def loss_and_gradient(
    logits_ptr,
    target_ptr,
    count_ptr,
    loss_ptr,
    grad_ptr,
    stride_words,
    words,
    ignore_index,
    WORD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    LOG2E: tl.constexpr = 1.4426950408889634
    stride, columns = stride_words.to(tl.int64) * WORD, words * WORD
    row = tl.program_id(0).to(tl.int64)  # rows * columns can exceed 32 bits
    column = tl.arange(0, BLOCK)
    inside = column < columns
    grad_row = grad_ptr + row * columns
    target = tl.load(target_ptr + row)
    if target == ignore_index:
        tl.store(loss_ptr + row, 0.0)
        zeros = tl.zeros([BLOCK], grad_ptr.dtype.element_ty)
        tl.store(grad_row + column, zeros, mask=inside)
    else:
        x = tl.load(logits_ptr + row * stride + column, mask=inside, other=-float("inf"))
        x = x.to(tl.float32)
        maximum = tl.max(x, 0)
        e = tl.exp2((x - maximum) * LOG2E)
        total = tl.sum(e, 0)
        at_target = tl.load(logits_ptr + row * stride + target).to(tl.float32)
        # The difference first: where the model is sure, it is 0, and log(total) keeps its digits.
        tl.store(loss_ptr + row, tl.log(total) + (maximum - at_target))
        # The count is 0 only if all rows are ignored, and then this branch is not taken. The mean's
        # factor comes last, since p - 1 at the target cancels and would magnify its rounding.
        p = e * (1.0 / total)
        grad = (p - tl.where(column == target, 1.0, 0.0)) * (1.0 / tl.load(count_ptr))
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
    block = triton.next_power_of_2(columns)
    warps = min(max(block // (32 * ELEMENTS_PER_THREAD), 1), 32)
    word = math.gcd(columns, logits.stride(0), 16 // logits.element_size())
    loss_and_gradient[(rows,)](
        logits,
        target,
        count,
        losses,
        grad,
        logits.stride(0) // word,
        columns // word,
        ignore_index,
        WORD=word,
        BLOCK=block,
        num_warps=warps,
    )
    mean_loss[(1,)](losses, count, loss, rows, BLOCK=2048, num_warps=8)
    return loss, grad
