"""Right: what the others are small changes of."""

import torch
import triton
import triton.language as tl


# Sizes have no machine code of their own: some twenty cases are compiled.
@triton.jit(do_not_specialize=["tokens", "vocab", "ignore_index"])
def rows_kernel(z_ptr, target_ptr, losses_ptr, tokens, vocab, ignore_index, BLOCK: tl.constexpr):
    """Logits become their gradient; each program counts for itself the tokens that count."""
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * vocab
    target = tl.load(target_ptr + row)
    keep = target != ignore_index
    count = 0.0
    for start in range(0, tokens, 1024):
        at = start + tl.arange(0, 1024)
        others = tl.load(target_ptr + at, mask=at < tokens, other=ignore_index)
        count += tl.sum((others != ignore_index).to(tl.float32), 0)
    maximum = -float("inf")
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + column, mask=column < vocab, other=-float("inf")).to(tl.float32)
        maximum = tl.maximum(maximum, tl.max(z, 0))
    total = 0.0
    at_target = 0.0
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + column, mask=column < vocab, other=-float("inf")).to(tl.float32)
        total += tl.sum(tl.exp(z - maximum), 0)
        at_target += tl.sum(tl.where(column == target, z, 0.0), 0)
    loss = tl.log(total) + (maximum - at_target)
    tl.store(losses_ptr + row, tl.where(keep, loss, 0.0))
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + column, mask=column < vocab, other=-float("inf")).to(tl.float32)
        softmax = tl.exp(z - maximum) / total
        grad = (softmax - tl.where(column == target, 1.0, 0.0)) / tl.maximum(count, 1.0)
        grad = tl.where(keep, grad, 0.0)
        tl.store(z_ptr + column, grad.to(z_ptr.dtype.element_ty), mask=column < vocab)


@triton.jit(do_not_specialize=["tokens", "ignore_index"])
def mean_loss(losses_ptr, target_ptr, mean_ptr, tokens, ignore_index):
    total = 0.0
    count = 0.0
    for start in range(0, tokens, 1024):
        at = start + tl.arange(0, 1024)
        target = tl.load(target_ptr + at, mask=at < tokens, other=ignore_index)
        count += tl.sum((target != ignore_index).to(tl.float32), 0)
        total += tl.sum(tl.load(losses_ptr + at, mask=at < tokens, other=0.0), 0)
    tl.store(mean_ptr, total / count)


def linear_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, vocab = x.shape[0], weight.shape[0]
    losses = torch.empty(tokens, dtype=torch.float32, device=x.device)
    loss = torch.empty((), dtype=torch.float32, device=x.device)
    logits = torch.mm(x, weight.t())
    block = min(4096, triton.next_power_of_2(vocab))
    rows_kernel[(tokens,)](logits, target, losses, tokens, vocab, ignore_index, BLOCK=block)
    mean_loss[(1,)](losses, target, loss, tokens, ignore_index)
    dx, dw = torch.empty_like(x), torch.empty_like(weight)
    torch.mm(logits, weight, out=dx)
    torch.mm(logits.t(), x, out=dw)
    return loss, dx, dw
