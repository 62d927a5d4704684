"""Linear cross entropy over chunks of tokens: logits of a chunk, their gradient in place, products.

Only CHUNK rows of logits exist at a time. One kernel turns them into their gradient where they lie
(a row's loss needs its maximum and sum, and then every probability is known), and torch's matrix
products do the rest, so that nothing is computed twice: 6·T·D·V operations, the fewest there are.

Memory against time and accuracy: scratch is CHUNK x vocabulary; every chunk reads the weight twice
and updates all of dw, and each update rounds dw to bf16. With 8192 tokens, CHUNK = 2048 means four
roundings (1.6 times the error of one product) and 501 MiB at a vocabulary of 128256; 1024 halves
the memory and rounds eight times.
"""

import torch
import triton
import triton.language as tl

TUNE = {
    "CHUNK": [512, 1024, 2048, 4096],
    "BLOCK": [4096, 8192, 16384],
    "NUM_WARPS": [8, 16, 32],
}
CHUNK = 2048  # tokens
BLOCK = 8192  # logits of a row that a program holds in registers at a time
NUM_WARPS = 16


@triton.jit(do_not_specialize=["tokens", "ignore_index"])
def _count_kept(target_ptr, count_ptr, tokens, ignore_index, BLOCK: tl.constexpr):
    """Number of targets that are not ignored, as fp32: host code must not wait for it."""
    kept = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, tokens, BLOCK):
        i = start + tl.arange(0, BLOCK)
        target = tl.load(target_ptr + i, mask=i < tokens, other=ignore_index)
        kept += (target != ignore_index).to(tl.int32)
    tl.store(count_ptr, tl.sum(kept, 0).to(tl.float32))


@triton.jit(do_not_specialize=["vocab", "ignore_index"])
def _loss_and_gradient(
    z_ptr,  # [rows, stride]: logits in, their gradient out
    target_ptr,
    count_ptr,
    loss_ptr,
    stride,
    vocab,
    ignore_index,
    BLOCK: tl.constexpr,
):
    """One row per program: read it for maximum and sum, read it again (from L2) and overwrite.

    The padding of a row is read and written along: masks at `stride`, a multiple of 16, keep the
    accesses wide for any vocabulary.
    """
    row = tl.program_id(0)
    z_ptr += row.to(tl.int64) * stride
    target = tl.load(target_ptr + row)
    keep = target != ignore_index
    # Read before anything is overwritten; the reductions below are barriers in between.
    z_target = tl.load(z_ptr + target, mask=keep, other=0.0).to(tl.float32)

    row_max = -float("inf")
    row_sum = 0.0
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + column, mask=column < stride, other=0.0).to(tl.float32)
        z = tl.where(column < vocab, z, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(z, 0))
        row_sum = row_sum * tl.exp(row_max - new_max) + tl.sum(tl.exp(z - new_max), 0)
        row_max = new_max
    loss = row_max + tl.log(row_sum) - z_target
    tl.store(loss_ptr + row, tl.where(keep, loss, 0.0))

    # An ignored row becomes zeros; so does every row when none counts, and only the loss is NaN.
    share = tl.where(keep, 1.0 / tl.maximum(tl.load(count_ptr), 1.0), 0.0)
    scale = share / row_sum
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + column, mask=column < stride, other=0.0).to(tl.float32)
        dz = tl.exp(z - row_max) * scale - tl.where(column == target, share, 0.0)
        tl.store(z_ptr + column, dz.to(z_ptr.dtype.element_ty), mask=column < stride)


@triton.jit(do_not_specialize=["tokens"])
def _mean(losses_ptr, count_ptr, loss_ptr, tokens, BLOCK: tl.constexpr):
    """Mean loss over what was counted: 0 / 0, NaN, if nothing was, like torch."""
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, tokens, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(losses_ptr + i, mask=i < tokens, other=0.0)
    tl.store(loss_ptr, tl.sum(total, 0) / tl.load(count_ptr))


def linear_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean loss (fp32) of x [T, D] @ weight.T [D, V] against target [T], and d loss / dx and dw."""
    tokens, vocab = x.shape[0], weight.shape[0]
    count, loss = (torch.empty((), dtype=torch.float32, device=x.device) for _ in range(2))
    losses = torch.empty(tokens, dtype=torch.float32, device=x.device)
    dx, dw = torch.empty_like(x), torch.empty_like(weight)
    # Rows start at multiples of 16 elements, so that an odd vocabulary is read in wide words too.
    pitch = triton.cdiv(vocab, 16) * 16
    logits = torch.empty(min(CHUNK, tokens), pitch, dtype=x.dtype, device=x.device)

    _count_kept[(1,)](target, count, tokens, ignore_index, BLOCK=1024)
    for start in range(0, tokens, CHUNK):
        rows = x[start : start + CHUNK]
        z = logits[: rows.shape[0], :vocab]
        torch.mm(rows, weight.t(), out=z)
        _loss_and_gradient[(rows.shape[0],)](
            z,
            target[start : start + CHUNK],
            count,
            losses[start : start + CHUNK],
            z.stride(0),
            vocab,
            ignore_index,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
        torch.mm(z, weight, out=dx[start : start + CHUNK])
        if start == 0:
            torch.mm(z.t(), rows, out=dw)
        else:
            dw.addmm_(z.t(), rows)
    _mean[(1,)](losses, count, loss, tokens, BLOCK=1024)
    return loss, dx, dw
