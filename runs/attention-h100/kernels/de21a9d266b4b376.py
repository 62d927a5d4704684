"""Attention in two passes over the keys: each row's maximum and sum, then the weighted values.

The plain way to keep scores out of memory: the first pass computes them only for the maximum and
the sum, the second computes them again, relative to the final maximum, and multiplies by v. Half as
many products again as flash attention, but no accumulator to rescale and hardly any state in the
first pass. A starting point that is easy to check and to change, and the fastest way only while a
whole row of keys fits one or two tiles.
"""

import math

import torch
import triton
import triton.language as tl

TUNE = {
    "BLOCK_M": [32, 64, 128],
    "BLOCK_N": [32, 64, 128],
    "NUM_WARPS": [4, 8],
    "NUM_STAGES": [1, 2, 3],
}
BLOCK_M = 64
BLOCK_N = 64
NUM_WARPS = 4
NUM_STAGES = 2


@triton.jit
def _scores(
    q,
    k_ptr,
    stride_ks,
    start,
    rows,
    seq,
    scale_log2,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Scores of one tile in units of log2, [BLOCK_M, BLOCK_N]; -inf where a key is not visible."""
    cols = start + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, D)
    k_tile = k_ptr + cols[None, :].to(tl.int64) * stride_ks + dims[:, None]
    k = tl.load(k_tile, mask=cols[None, :] < seq, other=0.0)
    keep = cols[None, :] < seq
    if CAUSAL:
        keep = keep & (cols[None, :] <= rows[:, None])
    return tl.where(keep, tl.dot(q, k) * scale_log2, -float("inf"))


# One binary for all lengths and head counts; whether they are 1 or multiples of 16 changes nothing.
@triton.jit(do_not_specialize=["heads", "group", "seq"])
def _two_pass_attention(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
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
    tile = tl.program_id(0)
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    q_ptr += batch * stride_qb + head * stride_qh
    k_ptr += batch * stride_kb + (head // group) * stride_kh
    v_ptr += batch * stride_vb + (head // group) * stride_vh
    o_ptr += (batch * heads + head) * seq * D

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, D)
    inside = rows[:, None] < seq
    q_tile = q_ptr + rows[:, None].to(tl.int64) * stride_qs + dims[None, :]
    q = tl.load(q_tile, mask=inside, other=0.0)
    seen = tl.minimum((tile + 1) * BLOCK_M, seq) if CAUSAL else seq

    # Every row sees key 0, so that the maximum is finite from the first tile on.
    row_max = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    for start in range(0, seen, BLOCK_N):
        s = _scores(q, k_ptr, stride_ks, start, rows, seq, scale_log2, D, BLOCK_N, CAUSAL)
        new_max = tl.maximum(row_max, tl.max(s, 1))
        row_sum = row_sum * tl.exp2(row_max - new_max) + tl.sum(tl.exp2(s - new_max[:, None]), 1)
        row_max = new_max

    # Normalised only at the end: with flat scores every p would be the same 1 / seq, rounded to
    # bf16 with the same error, and the whole row would be off by it.
    acc = tl.zeros([BLOCK_M, D], dtype=tl.float32)
    for start in range(0, seen, BLOCK_N):
        s = _scores(q, k_ptr, stride_ks, start, rows, seq, scale_log2, D, BLOCK_N, CAUSAL)
        cols = start + tl.arange(0, BLOCK_N)
        v_tile = v_ptr + cols[:, None].to(tl.int64) * stride_vs + dims[None, :]
        v = tl.load(v_tile, mask=cols[:, None] < seq, other=0.0)
        acc = tl.dot(tl.exp2(s - row_max[:, None]).to(v.dtype), v, acc)
    o_tile = o_ptr + rows[:, None].to(tl.int64) * D + dims[None, :]
    tl.store(o_tile, (acc / row_sum[:, None]).to(o_ptr.dtype.element_ty), mask=inside)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Attention of q [B, H, S, D] over k and v [B, Hkv, S, D], bf16 or fp16, D a power of two.

    Rows may be strided (slices of a packed projection); the last dimension must be contiguous.
    """
    b, h, s, d = q.shape
    o = torch.empty(b, h, s, d, dtype=q.dtype, device=q.device)
    _two_pass_attention[(triton.cdiv(s, BLOCK_M), b * h)](
        q,
        k,
        v,
        o,
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
    return o
