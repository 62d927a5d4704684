"""Gradients of attention in two sweeps, each of which owns what it writes.

The first has a tile of queries and walks over the keys: dq, and the sums of grad · o, which it
leaves for the second. That one has a tile of keys and walks over the queries of all heads that read
them: dk and dv. Probabilities are computed again from the log-sum-exp in both, so that seven
products are done instead of five; but nothing is added up in memory, and results are the same in
every run. In the second sweep tiles of scores are transposed ([keys, queries]): probabilities are
then the left operand of a product as they are.
"""

import math

import torch
import triton
import triton.language as tl

TUNE = {
    "QUERIES": [64, 128],
    "KEYS_AT_ONCE": [32, 64],
    "KEYS": [64, 128],
    "QUERIES_AT_ONCE": [32, 64],
    "NUM_WARPS": [4, 8],
    "NUM_STAGES": [2, 3],
}
QUERIES = 128  # of a program of the first sweep
KEYS_AT_ONCE = 64
KEYS = 128  # of a program of the second sweep
QUERIES_AT_ONCE = 64
NUM_WARPS = 8
NUM_STAGES = 2


# One binary for all lengths and head counts; whether they are 1 or multiples of 16 changes nothing.
@triton.jit(do_not_specialize=["heads", "group", "seq"])
def gradient_of_queries(
    grad_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    stride_gb,
    stride_gh,
    stride_gs,
    stride_qb,
    stride_qh,
    stride_qs,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_vb,
    stride_vh,
    stride_vs,
    stride_ob,
    stride_oh,
    stride_os,
    stride_lb,
    stride_lh,
    heads,
    group,
    seq,
    scale,
    scale_log2,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    # The last tiles see the most keys and go first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    q_ptr += batch * stride_qb + head * stride_qh
    grad_ptr += batch * stride_gb + head * stride_gh
    o_ptr += batch * stride_ob + head * stride_oh
    k_ptr += batch * stride_kb + (head // group) * stride_kh
    v_ptr += batch * stride_vb + (head // group) * stride_vh
    lse_ptr += batch * stride_lb + head * stride_lh
    delta_ptr += (batch * heads + head) * seq
    dq_ptr += (batch * heads + head) * seq * D

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, D)[None, :]
    inside = rows < seq
    row = rows[:, None].to(tl.int64)
    q = tl.load(q_ptr + row * stride_qs + dims, mask=inside[:, None], other=0.0)
    grad = tl.load(grad_ptr + row * stride_gs + dims, mask=inside[:, None], other=0.0)
    o = tl.load(o_ptr + row * stride_os + dims, mask=inside[:, None], other=0.0)
    lse = tl.load(lse_ptr + rows, mask=inside, other=0.0) * 1.4426950408889634
    delta = tl.sum(grad.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(delta_ptr + rows, delta, mask=inside)

    dq = tl.zeros([BLOCK_M, D], dtype=tl.float32)
    seen = tl.minimum((tile + 1) * BLOCK_M, seq) if CAUSAL else seq
    for start in range(0, seen, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        col = cols[:, None].to(tl.int64)
        there = cols[:, None] < seq
        k = tl.load(k_ptr + col * stride_ks + dims, mask=there, other=0.0)
        v = tl.load(v_ptr + col * stride_vs + dims, mask=there, other=0.0)
        p = tl.exp2(tl.dot(q, tl.trans(k)) * scale_log2 - lse[:, None])
        keep = cols[None, :] < seq
        if CAUSAL:
            keep = keep & (cols[None, :] <= rows[:, None])
        t = tl.where(keep, p, 0.0) * (tl.dot(grad, tl.trans(v)) - delta[:, None])
        dq = tl.dot(t.to(k.dtype), k, dq)
    tl.store(dq_ptr + row * D + dims, (dq * scale).to(q.dtype), mask=inside[:, None])


@triton.jit(do_not_specialize=["heads", "group", "seq"])
def gradient_of_keys(
    grad_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    stride_gb,
    stride_gh,
    stride_gs,
    stride_qb,
    stride_qh,
    stride_qs,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_vb,
    stride_vh,
    stride_vs,
    stride_lb,
    stride_lh,
    heads,
    group,
    seq,
    scale,
    scale_log2,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    tile = tl.program_id(0)  # the first keys are seen by the most queries
    key_heads = heads // group
    batch = (tl.program_id(1) // key_heads).to(tl.int64)
    key_head = (tl.program_id(1) % key_heads).to(tl.int64)
    k_ptr += batch * stride_kb + key_head * stride_kh
    v_ptr += batch * stride_vb + key_head * stride_vh

    cols = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, D)[None, :]
    col = cols[:, None].to(tl.int64)
    there = cols[:, None] < seq
    k = tl.load(k_ptr + col * stride_ks + dims, mask=there, other=0.0)
    v = tl.load(v_ptr + col * stride_vs + dims, mask=there, other=0.0)
    dk = tl.zeros([BLOCK_N, D], dtype=tl.float32)
    dv = tl.zeros([BLOCK_N, D], dtype=tl.float32)
    first = tile * BLOCK_N // BLOCK_M * BLOCK_M if CAUSAL else 0
    for member in range(group):
        head = key_head * group + member
        q_head = q_ptr + batch * stride_qb + head * stride_qh
        grad_head = grad_ptr + batch * stride_gb + head * stride_gh
        lse_head = lse_ptr + batch * stride_lb + head * stride_lh
        delta_head = delta_ptr + (batch * heads + head) * seq
        for start in range(first, seq, BLOCK_M):
            rows = start + tl.arange(0, BLOCK_M)
            row = rows[:, None].to(tl.int64)
            inside = rows < seq
            q = tl.load(q_head + row * stride_qs + dims, mask=inside[:, None], other=0.0)
            grad = tl.load(grad_head + row * stride_gs + dims, mask=inside[:, None], other=0.0)
            # Of a query past the end nothing is left: grad and delta are 0, and so is q.
            lse = tl.load(lse_head + rows, mask=inside, other=0.0) * 1.4426950408889634
            delta = tl.load(delta_head + rows, mask=inside, other=0.0)
            p = tl.exp2(tl.dot(k, tl.trans(q)) * scale_log2 - lse[None, :])
            if CAUSAL:
                p = tl.where(cols[:, None] <= rows[None, :], p, 0.0)
            dv = tl.dot(p.to(grad.dtype), grad, dv)
            t = p * (tl.dot(v, tl.trans(grad)) - delta[None, :])
            dk = tl.dot(t.to(q.dtype), q, dk)
    at = (batch * key_heads + key_head) * seq * D + col * D + dims
    tl.store(dk_ptr + at, (dk * scale).to(k.dtype), mask=there)
    tl.store(dv_ptr + at, dv.to(v.dtype), mask=there)


def attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q: [B, H, S, D], k and v: [B, Hkv, S, D], bf16 or fp16, D a power of two.

    grad and o are like q, lse is [B, H, S] float32. Rows may be strided; the last dimension must be
    contiguous.
    """
    b, h, s, d = q.shape
    hkv = k.shape[1]
    dq = torch.empty(b, h, s, d, dtype=q.dtype, device=q.device)
    dk = torch.empty(b, hkv, s, d, dtype=q.dtype, device=q.device)
    dv = torch.empty(b, hkv, s, d, dtype=q.dtype, device=q.device)
    delta = torch.empty(b, h, s, dtype=torch.float32, device=q.device)
    strides = (*grad.stride()[:3], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    shared = {
        "heads": h,
        "group": h // hkv,
        "seq": s,
        "scale": 1 / math.sqrt(d),
        "scale_log2": math.log2(math.e) / math.sqrt(d),
        "D": d,
        "CAUSAL": causal,
        "num_warps": NUM_WARPS,
        "num_stages": NUM_STAGES,
    }
    gradient_of_queries[(triton.cdiv(s, QUERIES), b * h)](
        grad, q, k, v, o, lse, delta, dq, *strides, *o.stride()[:3], *lse.stride()[:2],
        BLOCK_M=QUERIES, BLOCK_N=KEYS_AT_ONCE, **shared,
    )  # fmt: skip
    gradient_of_keys[(triton.cdiv(s, KEYS), b * hkv)](
        grad, q, k, v, lse, delta, dk, dv, *strides, *lse.stride()[:2],
        BLOCK_N=KEYS, BLOCK_M=QUERIES_AT_ONCE, **shared,
    )  # fmt: skip
    return dq, dk, dv
