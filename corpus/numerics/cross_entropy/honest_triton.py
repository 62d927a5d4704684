"""Right: what the others are small changes of."""

import torch
import triton
import triton.language as tl


# Sizes and strides have no machine code of their own: some twenty cases are compiled.
@triton.jit(do_not_specialize=["rows", "ignore_index"])
def count_targets(target_ptr, count_ptr, rows, ignore_index, BLOCK: tl.constexpr):
    counts = tl.zeros([BLOCK], tl.int32)
    for start in range(0, rows, BLOCK):
        at = start + tl.arange(0, BLOCK)
        target = tl.load(target_ptr + at, mask=at < rows, other=ignore_index)
        counts += (target != ignore_index).to(tl.int32)
    tl.store(count_ptr, tl.sum(counts, 0).to(tl.float32))


@triton.jit(do_not_specialize=["stride", "columns", "ignore_index"])
def loss_and_gradient(
    logits_ptr,
    target_ptr,
    count_ptr,
    losses_ptr,
    grad_ptr,
    stride,
    columns,
    ignore_index,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    target = tl.load(target_ptr + row)
    keep = target != ignore_index
    x = tl.load(logits_ptr + row * stride + column, mask=inside, other=-float("inf"))
    x = x.to(tl.float32)
    maximum = tl.max(x, 0)
    e = tl.exp(x - maximum)
    total = tl.sum(e, 0)
    at_target = tl.load(logits_ptr + row * stride + target, mask=keep, other=0.0).to(tl.float32)
    loss = tl.log(total) + (maximum - at_target)
    tl.store(losses_ptr + row, tl.where(keep, loss, 0.0))
    grad = e / total - tl.where(column == target, 1.0, 0.0)
    grad = tl.where(keep, grad / tl.maximum(tl.load(count_ptr), 1.0), 0.0)
    tl.store(grad_ptr + row * columns + column, grad.to(grad_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def mean_loss(losses_ptr, count_ptr, mean_ptr, rows, BLOCK: tl.constexpr):
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, rows, BLOCK):
        at = start + tl.arange(0, BLOCK)
        sums += tl.load(losses_ptr + at, mask=at < rows, other=0.0)
    tl.store(mean_ptr, tl.sum(sums, 0) / tl.load(count_ptr))


def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = logits.shape
    grad = torch.empty((rows, columns), dtype=logits.dtype, device=logits.device)
    count, loss = (torch.empty((), dtype=torch.float32, device=logits.device) for _ in range(2))
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    count_targets[(1,)](target, count, rows, ignore_index, BLOCK=1024)
    block = triton.next_power_of_2(columns)
    warps = min(max(block // 1024, 1), 32)
    loss_and_gradient[(rows,)](
        logits, target, count, losses, grad, logits.stride(0), columns, ignore_index,
        BLOCK=block, num_warps=warps,
    )  # fmt: skip
    mean_loss[(1,)](losses, count, loss, rows, BLOCK=1024)
    return loss, grad
