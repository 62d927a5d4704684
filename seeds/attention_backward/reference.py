"""Gradients of attention: inputs, float64 reference, and what a user would call."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from kagent_sandbox.draws import draw_attention

if TYPE_CHECKING:
    from kagent_sandbox.data.case import Case

SCORES = 1 << 26  # float64 scores held at once: 512 MiB, and about four times that in all


def inputs(case: Case, generator: torch.Generator, device: torch.device) -> dict[str, torch.Tensor]:
    """Draw q, k and v from a normal distribution of deviation `scale`, and grad from a normal one.

    grad is times a power of two from 2^-27 to 2^13, from 1 to 2^6 in float16. o and lse are what
    torch's forward pass has of them. "shifted" adds a constant to every key, which moves all scores
    of a row, and its log-sum-exp, by the same large amount. "mixed" gives each head of keys a kind
    of its own: normal; scores that rise or fall from key to key; scores about 10000 below the
    others in half of the keys, which are a window or every other block, never the first key.
    """
    d = case.dims
    queries = tuple(int(d[n]) for n in ("B", "H", "S", "D"))
    dtype = getattr(torch, case.dtype)
    # Of "sunk" ones gradients would hang on the rounding of scores alone; "huge" is for values.
    if case.inputs in ("sunk", "huge"):
        raise ValueError(f"attention_backward knows no distribution {case.inputs!r}")
    q, k, v = draw_attention(
        case.inputs, queries, int(d["Hkv"]), case.scale, dtype, generator, device
    )
    grad = torch.empty_like(q).normal_(generator=generator)
    least, most = (0, 6) if dtype == torch.float16 else (-27, 13)
    power = torch.randint(least, most + 1, (1,), generator=generator, device=device)
    grad.mul_(power.float().exp2().to(dtype))
    o, lse = _forward(q, k, v, bool(d["causal"]))
    return {"grad": grad, "q": q, "k": k, "v": v, "o": o, "lse": lse}


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    aten = torch.ops.aten
    if q.is_cuda:
        return aten._scaled_dot_product_flash_attention(q, k, v, is_causal=causal)[:2]  # noqa: SLF001
    o, lse = aten._scaled_dot_product_flash_attention_for_cpu(  # noqa: SLF001
        q, _for_queries(k, q), _for_queries(v, q), is_causal=causal
    )
    return o, lse.contiguous()


def _for_queries(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """A head of keys or values for each head of queries."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def reference(
    *,
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, [B, H, S, D], k and v, [B, Hkv, S, D], in float64, for o and lse as given.

    With p = exp(q · k / sqrt(D) - lse) for the keys that a query sees, else 0, and
    t = p (grad · v - grad · o): dq is the sum of t k / sqrt(D) over the keys, dk that of
    t q / sqrt(D) and dv that of p grad over the queries of all heads that read them.
    """
    group = q.shape[1] // k.shape[1]
    dq, dk, dv = (torch.zeros(t.shape, dtype=torch.float64, device=q.device) for t in (q, k, v))
    for batch in range(q.shape[0]):
        for head in range(q.shape[1]):
            at, key_at = (batch, head), (batch, head // group)
            given = (grad[at], q[at], k[key_at], v[key_at], o[at], lse[at])
            found = _gradients_of_a_head(*given, causal)
            dq[at] = found[0]
            dk[key_at] += found[1]
            dv[key_at] += found[2]
    return dq, dk, dv


def _gradients_of_a_head(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of tensors [S, D], and lse: [S], in float64, over chunks of queries."""
    s, d = q.shape
    keys, values = k.double(), v.double()
    dq, dk, dv = (torch.zeros(s, d, dtype=torch.float64, device=q.device) for _ in range(3))
    step = max(1, SCORES // s)
    for start in range(0, s, step):
        some = slice(start, start + step)
        above, queries = grad[some].double(), q[some].double()
        p = torch.exp(queries @ keys.mT / math.sqrt(d) - lse[some, None])
        if causal:
            p = p.tril(start)
        t = p * (above @ values.mT - (above * o[some]).sum(-1, keepdim=True)) / math.sqrt(d)
        dq[some] = t @ keys
        dk += t.mT @ queries
        dv += p.mT @ above
    return dq, dk, dv


def reference_rows(
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `reference` has in some rows, in float64: dq [R, S·D], whose rows are heads, and dk and
    dv, [R, D] each.

    `rows[0]` are numbers of heads of queries, [R] int64; the others are numbers of keys, counted
    over all heads of keys.
    """
    heads, key_heads, s = q.shape[1], k.shape[1], q.shape[2]
    group = heads // key_heads
    found: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def of(batch: int, head: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        at, key_at = (batch, head), (batch, head // group)
        if at not in found:
            given = (grad[at], q[at], k[key_at], v[key_at], o[at], lse[at])
            found[at] = _gradients_of_a_head(*given, causal)
        return found[at]

    def of_key(row: int, which: int) -> torch.Tensor:
        key_head, key = divmod(row, s)
        batch, first = key_head // key_heads, key_head % key_heads * group
        return torch.stack([of(batch, first + i)[which][key] for i in range(group)]).sum(0)

    dq = [of(row // heads, row % heads)[0].flatten() for row in rows[0].tolist()]
    dk, dv = ([of_key(row, n) for row in rows[n].tolist()] for n in (1, 2))
    return torch.stack(dq), torch.stack(dk), torch.stack(dv)


def eager(
    *,
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operation behind the gradient of torch's own attention: the shapes of q, k and v.

    It is FlashAttention-2 on a GPU. Below the public function it takes the last dimension for the
    fastest without a look, and on a CPU gives wrong numbers where it is not.
    """
    tensors = (grad, q, k, v, o)
    grad, q, k, v, o = (t if t.stride(-1) == 1 else t.contiguous() for t in tensors)
    lse = lse.contiguous()
    aten, s = torch.ops.aten, q.shape[2]
    if q.is_cuda:
        seed = torch.empty(0, dtype=torch.int64, device=q.device)  # there is no dropout
        return aten._scaled_dot_product_flash_attention_backward(  # noqa: SLF001
            grad, q, k, v, o, lse, None, None, s, s, 0.0, causal, seed, seed
        )
    wide = (_for_queries(k, q), _for_queries(v, q))
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(  # noqa: SLF001
        grad, q, *wide, o, lse, 0.0, causal
    )
    heads = (-1, q.shape[1] // k.shape[1])
    dk, dv = (t.unflatten(1, heads).sum(2) for t in (dk, dv))
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


def experts() -> Mapping[str, Callable[..., object]]:
    """The gradient of cuDNN's attention, on a GPU."""
    return {"cuDNN": _cudnn} if torch.cuda.is_available() else {}


def _cudnn(
    *,
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
) -> object:
    s = q.shape[2]
    seed = torch.empty((), dtype=torch.int64, device=q.device)  # there is no dropout
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(  # noqa: SLF001
        grad, q, k, v, o, lse[..., None], seed, seed, None, None, None, s, s, 0.0, causal
    )
