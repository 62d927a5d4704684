"""Right: what the others are small changes of."""

import math

import torch
import triton
import triton.language as tl

# They have no machine code of their own: some twenty cases are compiled.
SIZES = "qb qh qs kb kh ks vb vh vs heads group seq"


@triton.jit(do_not_specialize=SIZES.split())
def flash_attention(
    q_ptr, k_ptr, v_ptr, o_ptr, qb, qh, qs, kb, kh, ks, vb, vh, vs, heads, group, seq, scale,
    D: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """A program has 64 queries of a head, and walks over tiles of 64 keys."""
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    q_ptr += batch * qb + head * qh
    k_ptr += batch * kb + head // group * kh
    v_ptr += batch * vb + head // group * vh
    row = tl.program_id(0) * 64 + tl.arange(0, 64)
    dim = tl.arange(0, D)
    q = tl.load(q_ptr + row[:, None] * qs + dim[None, :], mask=row[:, None] < seq, other=0.0)
    maximum = tl.full([64], -float("inf"), tl.float32)
    total = tl.zeros([64], tl.float32)
    acc = tl.zeros([64, D], tl.float32)
    for start in range(0, seq, 64):
        key = start + tl.arange(0, 64)
        inside = key[:, None] < seq
        k = tl.load(k_ptr + key[:, None] * ks + dim[None, :], mask=inside, other=0.0)
        v = tl.load(v_ptr + key[:, None] * vs + dim[None, :], mask=inside, other=0.0)
        keep = key[None, :] < seq
        if CAUSAL:
            keep = keep & (key[None, :] <= row[:, None])
        s = tl.where(keep, tl.dot(q, tl.trans(k)) * scale, -float("inf"))
        higher = tl.maximum(maximum, tl.max(s, 1))
        p = tl.exp(s - higher[:, None])
        shrink = tl.exp(maximum - higher)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v)
        maximum = higher
    o = acc / total[:, None]
    at = (batch * heads + head) * seq + row
    o_tile = o_ptr + at[:, None] * D + dim[None, :]
    tl.store(o_tile, o.to(o_ptr.dtype.element_ty), mask=row[:, None] < seq)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    b, h, s, d = q.shape
    o = torch.empty(b, h, s, d, dtype=q.dtype, device=q.device)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    flash_attention[(triton.cdiv(s, 64), b * h)](
        q, k, v, o, *strides, h, h // k.shape[1], s, 1.0 / math.sqrt(d), D=d, CAUSAL=causal,
    )  # fmt: skip
    return o
