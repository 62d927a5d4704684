"""Flash attention for training: one pass over the keys with a running softmax, whose sum is kept.

A program owns BLOCK_M queries of one head and walks over tiles of BLOCK_N keys. It keeps each row's
running maximum and sum, rescales the accumulator when the maximum grows, and never writes a score
to memory, so that memory traffic is q, k, v and o alone. Tiles above the diagonal are skipped; only
the tiles that touch the diagonal or the end of the sequence pay for a mask. The log-sum-exp is what
the backward pass needs to compute probabilities again.

Pays for every sequence longer than a few tiles. Short ones with few heads leave SMs idle: there the
grid, not the kernel, is the limit.
"""

import math

import torch
import triton
import triton.language as tl

TUNE = {
    "BLOCK_M": [64, 128],
    "BLOCK_N": [32, 64, 128],
    "NUM_WARPS": [4, 8],
    "NUM_STAGES": [2, 3, 4],
}
BLOCK_M = 128  # a warp group of Hopper multiplies 64 rows: 8 warps make two of them
BLOCK_N = 64
NUM_WARPS = 8
NUM_STAGES = 3  # tiles of k and v in flight


@triton.jit
def _attend(
    acc,  # [BLOCK_M, D] fp32, sum of p * v so far
    row_max,  # [BLOCK_M] fp32, in units of log2
    row_sum,  # [BLOCK_M] fp32
    q,  # [BLOCK_M, D]
    k_ptr,
    v_ptr,
    stride_ks,
    stride_vs,
    rows,
    first,
    last,
    seq,
    scale_log2,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Fold keys [first, last) into the running softmax."""
    dims = tl.arange(0, D)
    for start in range(first, last, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        k_tile = k_ptr + cols[None, :].to(tl.int64) * stride_ks + dims[:, None]
        v_tile = v_ptr + cols[:, None].to(tl.int64) * stride_vs + dims[None, :]
        k = tl.load(k_tile, mask=cols[None, :] < seq, other=0.0) if MASKED else tl.load(k_tile)
        scores = tl.dot(q, k)  # [BLOCK_M, BLOCK_N]
        if MASKED:
            keep = cols[None, :] < seq
            if CAUSAL:
                keep = keep & (cols[None, :] <= rows[:, None])
            scores = tl.where(keep, scores, -float("inf"))

        # The scale is applied in fp32 after the product (q rounded again to bf16 would cost
        # accuracy) and together with the subtraction, as one multiply-add per score. Key 0 is
        # visible to every row, so that the maximum is finite from the first tile on.
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        p = tl.exp2(scores * scale_log2 - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(p, 1)
        row_max = new_max

        v = tl.load(v_tile, mask=cols[:, None] < seq, other=0.0) if MASKED else tl.load(v_tile)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
    return acc, row_max, row_sum


# One binary for all lengths and head counts; whether they are 1 or multiples of 16 changes nothing.
@triton.jit(do_not_specialize=["heads", "group", "seq"])
def _flash_attention_train(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    lse_ptr,
    stride_qb,
    stride_qh,
    stride_qs,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_vb,
    stride_vh,
    stride_vs,
    heads,
    group,
    seq,
    scale_log2,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    # Neighbouring programs are tiles of one head, whose keys and values they share through L2. The
    # last tiles see the most keys and go first, so that no long one is left for the end.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    q_ptr += batch * stride_qb + head * stride_qh
    k_ptr += batch * stride_kb + (head // group) * stride_kh
    v_ptr += batch * stride_vb + (head // group) * stride_vh
    o_ptr += (batch * heads + head) * seq * D
    lse_ptr += (batch * heads + head) * seq

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, D)
    inside = rows[:, None] < seq
    q = tl.load(
        q_ptr + rows[:, None].to(tl.int64) * stride_qs + dims[None, :], mask=inside, other=0.0
    )
    acc = tl.zeros([BLOCK_M, D], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)

    # Keys [0, whole) are visible to every row of the tile; [whole, seen) to some.
    if CAUSAL:
        whole = (tile * BLOCK_M + 1) // BLOCK_N * BLOCK_N
        seen = tl.minimum((tile + 1) * BLOCK_M, seq)
    else:
        whole = seq // BLOCK_N * BLOCK_N
        seen = seq
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q, k_ptr, v_ptr, stride_ks, stride_vs, rows, 0, whole, seq,
        scale_log2, D, BLOCK_N, MASKED=False, CAUSAL=CAUSAL,
    )  # fmt: skip
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q, k_ptr, v_ptr, stride_ks, stride_vs, rows, whole, seen, seq,
        scale_log2, D, BLOCK_N, MASKED=True, CAUSAL=CAUSAL,
    )  # fmt: skip
    o = acc / row_sum[:, None]
    o_tile = o_ptr + rows[:, None].to(tl.int64) * D + dims[None, :]
    tl.store(o_tile, o.to(o_ptr.dtype.element_ty), mask=inside)
    # Back to the natural logarithm.
    lse = (row_max + tl.log2(row_sum)) * 0.6931471805599453
    tl.store(lse_ptr + rows, lse, mask=rows < seq)


def attention_train(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [B, H, S, D] over k and v [B, Hkv, S, D], bf16 or fp16, D a power of two.

    Results: o, like q, and the log-sum-exp of the scores, [B, H, S] float32.

    Rows may be strided (slices of a packed projection); the last dimension must be contiguous.
    """
    b, h, s, d = q.shape
    o = torch.empty(b, h, s, d, dtype=q.dtype, device=q.device)
    lse = torch.empty(b, h, s, dtype=torch.float32, device=q.device)
    _flash_attention_train[(triton.cdiv(s, BLOCK_M), b * h)](
        q,
        k,
        v,
        o,
        lse,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        heads=h,
        group=h // k.shape[1],
        seq=s,
        scale_log2=math.log2(math.e) / math.sqrt(d),
        D=d,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        CAUSAL=causal,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )
    return o, lse
