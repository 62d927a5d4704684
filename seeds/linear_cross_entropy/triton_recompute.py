"""Linear cross entropy whose forward pass writes no logits; the backward computes them again.

The first kernel multiplies hidden states by the weight tile by tile and folds each tile of logits
into a running maximum and sum, as flash attention does: what leaves the chip is one pair per token
and split of the vocabulary. With the log-sum-exp known, the gradients then go over chunks of the
*vocabulary*: logits of all tokens for CHUNK columns again, their gradient in place, two products.

A third more operations than the chunked way (8·T·D·V), but each row of dw is one product over all
tokens, rounded once, and dx is summed in fp32: pays where accuracy of dw matters or tokens are so
many that chunks of them would be. Scratch is tokens x CHUNK, whatever the vocabulary.
"""

import torch
import triton
import triton.language as tl

TUNE = {
    "CHUNK": [4096, 8192, 16384],
    "SPLITS": [4, 8, 16],
    "BLOCK_V": [128, 256],
    "NUM_STAGES": [3, 4],
}
CHUNK = 8192  # columns of logits that exist at a time in the backward pass
SPLITS = 8  # parts of the vocabulary: enough programs for every SM, and few partial results
BLOCK_T = 128
BLOCK_V = 256  # 128 x 256 is the largest tile whose fp32 accumulator fits 8 warps' registers
BLOCK_K = 64
NUM_WARPS = 8
NUM_STAGES = 3
GROUP = 16  # token tiles that run side by side, so that x and weight tiles meet in L2


@triton.jit(do_not_specialize=["tokens", "vocab", "splits", "split_columns"])
def _partial_lse(
    x_ptr,
    w_ptr,
    target_ptr,
    max_ptr,  # [splits, tokens], with the next: softmax state of each part of the vocabulary
    sum_ptr,
    z_target_ptr,  # [tokens]: logit of the target
    tokens,
    hidden,
    vocab,
    splits,
    split_columns,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    WHOLE_K: tl.constexpr,  # hidden is a multiple of BLOCK_K: no masks in the inner loop
):
    # Programs in order: GROUP token tiles of split 0, the same tiles of split 1, ..., the next
    # group.
    tiles = tl.cdiv(tokens, BLOCK_T)
    group = tl.program_id(0) // (GROUP * splits)
    width = tl.minimum(tiles - group * GROUP, GROUP)
    rest = tl.program_id(0) % (GROUP * splits)
    tile = group * GROUP + rest % width
    split = rest // width

    row = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    k = tl.arange(0, BLOCK_K)
    inside = row < tokens
    target = tl.load(target_ptr + row, mask=inside, other=-1)
    row_max = tl.full([BLOCK_T], -float("inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_T], dtype=tl.float32)
    z_target = tl.zeros([BLOCK_T], dtype=tl.float32)
    # Rows past the end read the last one again instead of being masked; they are not stored.
    x_tile = x_ptr + tl.minimum(row, tokens - 1)[:, None].to(tl.int64) * hidden + k[None, :]

    first = split * split_columns
    last = tl.minimum(first + split_columns, vocab)
    for start in range(first, last, BLOCK_V):
        column = start + tl.arange(0, BLOCK_V)
        w_tile = w_ptr + tl.minimum(column, last - 1)[None, :].to(tl.int64) * hidden + k[:, None]
        z = tl.zeros([BLOCK_T, BLOCK_V], dtype=tl.float32)
        for done in range(0, hidden, BLOCK_K):
            if WHOLE_K:
                a = tl.load(x_tile + done)
                b = tl.load(w_tile + done)
            else:
                a = tl.load(x_tile + done, mask=(k < hidden - done)[None, :], other=0.0)
                b = tl.load(w_tile + done, mask=(k < hidden - done)[:, None], other=0.0)
            z = tl.dot(a, b, z)
        # Rounded as the backward pass will see them, so that the probabilities there sum to one.
        z = z.to(x_ptr.dtype.element_ty).to(tl.float32)
        z = tl.where((column < last)[None, :], z, -float("inf"))
        z_target += tl.sum(tl.where(column[None, :] == target[:, None], z, 0.0), 1)
        new_max = tl.maximum(row_max, tl.max(z, 1))
        row_sum = row_sum * tl.exp(row_max - new_max) + tl.sum(tl.exp(z - new_max[:, None]), 1)
        row_max = new_max

    at = split.to(tl.int64) * tokens + row
    tl.store(max_ptr + at, row_max, mask=inside)
    tl.store(sum_ptr + at, row_sum, mask=inside)
    # Exactly one split holds a token's target; of an ignored token the logit is never used.
    tl.store(z_target_ptr + row, z_target, mask=inside & (target >= first) & (target < last))


@triton.jit(do_not_specialize=["tokens", "splits", "ignore_index"])
def _combine(
    max_ptr,
    sum_ptr,
    z_target_ptr,
    target_ptr,
    lse_ptr,  # [tokens]
    count_ptr,
    loss_ptr,
    tokens,
    splits,
    ignore_index,
    BLOCK: tl.constexpr,
):
    """Merge the splits' states; mean loss and number of counted targets. One program does it all:
    it reads a few hundred KiB, and needs no atomics and no second launch.
    """
    total = tl.zeros([BLOCK], dtype=tl.float32)
    kept = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, tokens, BLOCK):
        row = start + tl.arange(0, BLOCK)
        inside = row < tokens
        row_max = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
        row_sum = tl.zeros([BLOCK], dtype=tl.float32)
        for split in range(splits):
            part_max = tl.load(max_ptr + split * tokens + row, mask=inside, other=0.0)
            part_sum = tl.load(sum_ptr + split * tokens + row, mask=inside, other=1.0)
            new_max = tl.maximum(row_max, part_max)
            row_sum = row_sum * tl.exp(row_max - new_max) + part_sum * tl.exp(part_max - new_max)
            row_max = new_max
        lse = row_max + tl.log(row_sum)
        tl.store(lse_ptr + row, lse, mask=inside)
        keep = inside & (tl.load(target_ptr + row, mask=inside, other=0) != ignore_index)
        total += tl.where(keep, lse - tl.load(z_target_ptr + row, mask=keep, other=0.0), 0.0)
        kept += keep.to(tl.int32)
    count = tl.sum(kept, 0).to(tl.float32)
    tl.store(count_ptr, count)
    tl.store(loss_ptr, tl.sum(total, 0) / count)  # 0 / 0, NaN, if nothing counts, like torch


@triton.jit(do_not_specialize=["first", "ignore_index"])
def _gradient_of_logits(
    z_ptr,  # [tokens, stride]: logits of columns from `first` on in, their gradient out
    target_ptr,
    lse_ptr,
    count_ptr,
    stride,
    first,
    ignore_index,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    target = tl.load(target_ptr + row)
    share = 1.0 / tl.maximum(tl.load(count_ptr), 1.0)
    share = tl.where(target != ignore_index, share, 0.0)
    lse = tl.load(lse_ptr + row)
    # The padding of a row is computed along: masks at multiples of 16 keep the accesses wide.
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z_ptr += row.to(tl.int64) * stride
    z = tl.load(z_ptr + column, mask=column < stride, other=0.0).to(tl.float32)
    dz = (tl.exp(z - lse) - tl.where(first + column == target, 1.0, 0.0)) * share
    tl.store(z_ptr + column, dz.to(z_ptr.dtype.element_ty), mask=column < stride)


@triton.jit
def _accumulate(
    part_ptr, sum_ptr, out_ptr, numel, FIRST: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum += part in fp32; the last part goes to the result instead."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(part_ptr + i, mask=i < numel, other=0.0).to(tl.float32)
    if not FIRST:
        total += tl.load(sum_ptr + i, mask=i < numel, other=0.0)
    if LAST:
        tl.store(out_ptr + i, total.to(out_ptr.dtype.element_ty), mask=i < numel)
    else:
        tl.store(sum_ptr + i, total, mask=i < numel)


def _log_sum_exp(x, weight, target, ignore_index):
    """Lse [T], number of counted targets and mean loss, all fp32."""
    tokens, hidden = x.shape
    vocab = weight.shape[0]
    fp32 = {"dtype": torch.float32, "device": x.device}
    # Splits are whole tiles; a small vocabulary has fewer tiles than SPLITS.
    split_columns = triton.cdiv(triton.cdiv(vocab, BLOCK_V), SPLITS) * BLOCK_V
    splits = triton.cdiv(vocab, split_columns)
    part_max, part_sum = (torch.empty(splits, tokens, **fp32) for _ in range(2))
    z_target, lse = (torch.empty(tokens, **fp32) for _ in range(2))
    count, loss = (torch.empty((), **fp32) for _ in range(2))
    _partial_lse[(triton.cdiv(tokens, BLOCK_T) * splits,)](
        x,
        weight,
        target,
        part_max,
        part_sum,
        z_target,
        tokens,
        hidden,
        vocab,
        splits,
        split_columns,
        BLOCK_T=BLOCK_T,
        BLOCK_V=BLOCK_V,
        BLOCK_K=BLOCK_K,
        GROUP=GROUP,
        WHOLE_K=hidden % BLOCK_K == 0,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )
    _combine[(1,)](
        part_max,
        part_sum,
        z_target,
        target,
        lse,
        count,
        loss,
        tokens,
        splits,
        ignore_index,
        BLOCK=1024,
        num_warps=8,
    )
    return lse, count, loss


def linear_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean loss (fp32) of x [T, D] @ weight.T [D, V] against target [T], and d loss / dx and dw."""
    tokens, vocab = x.shape[0], weight.shape[0]
    lse, count, loss = _log_sum_exp(x, weight, target, ignore_index)

    dx, dw = torch.empty_like(x), torch.empty_like(weight)
    # Rows start at multiples of 16 elements, so that an odd vocabulary is read in wide words too.
    pitch = triton.cdiv(min(CHUNK, vocab), 16) * 16
    logits = torch.empty(tokens, pitch, dtype=x.dtype, device=x.device)
    dx_part = torch.empty_like(x)
    dx_sum = torch.empty_like(x, dtype=torch.float32)
    for first in range(0, vocab, CHUNK):
        columns = weight[first : first + CHUNK]
        z = logits[:, : columns.shape[0]]
        torch.mm(x, columns.t(), out=z)
        _gradient_of_logits[(tokens, triton.cdiv(pitch, 2048))](
            z, target, lse, count, pitch, first, ignore_index, BLOCK=2048
        )
        torch.mm(z.t(), x, out=dw[first : first + CHUNK])
        torch.mm(z, columns, out=dx_part)
        _accumulate[(triton.cdiv(x.numel(), 4096),)](
            dx_part,
            dx_sum,
            dx,
            x.numel(),
            FIRST=first == 0,
            LAST=first + CHUNK >= vocab,
            BLOCK=4096,
            num_warps=8,
        )
    return loss, dx, dw
