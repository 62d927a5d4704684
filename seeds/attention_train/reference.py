"""Attention's forward pass in training: inputs, float64 reference, and what a user would call."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from kagent_sandbox.draws import break_attention, draw_attention

if TYPE_CHECKING:
    from kagent_sandbox.data.case import Case

SCORES = 1 << 26  # float64 scores held at once: 512 MiB, and about three times that in all


def inputs(case: Case, generator: torch.Generator, device: torch.device) -> dict[str, torch.Tensor]:
    """Draw q, k and v from a normal distribution of deviation `scale`.

    "shifted" adds a constant to every key, which moves all scores of a row by the same large
    amount: it finds a softmax that does not subtract the row's maximum. "sunk" lowers the queries,
    too: scores are about -200 (D = 64), and so is the log-sum-exp. "mixed" gives each head of keys
    a kind of its own: normal; scores that rise or fall from key to key; scores about 10000 below
    the others in half of the keys, which are a window or every other block, never the first key.
    "huge" is normal, with values times a power of two from 2^10 to 2^100: o is as large.
    "nonfinite" is normal, with NaN in some queries, in one key of some heads and in the first value
    of some: both results are NaN for such a query, and for all queries of such a key; o alone is in
    such a value's column.
    """
    # Not for a GPU: of a sum that is NaN torch's kernel there makes an infinite log-sum-exp.
    d = case.dims
    queries = tuple(int(d[n]) for n in ("B", "H", "S", "D"))
    dtype = getattr(torch, case.dtype)
    kind = "normal" if case.inputs == "nonfinite" else case.inputs
    q, k, v = draw_attention(kind, queries, int(d["Hkv"]), case.scale, dtype, generator, device)
    if case.inputs == "nonfinite":
        break_attention(q, k, v, bool(d["causal"]), generator)
    return {"q": q, "k": k, "v": v}


def _by_head(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> Iterator[tuple[int, int, int, torch.Tensor, torch.Tensor]]:
    """Batch, head, first query, and the scores and values of some queries of each head, float64."""
    b, h, s, d = q.shape
    rows = max(1, SCORES // s)
    for batch in range(b):
        for head in range(h):
            key_head = head // (h // k.shape[1])
            keys, values = k[batch, key_head].double(), v[batch, key_head].double()
            for start in range(0, s, rows):
                some = q[batch, head, start : start + rows].double()
                scores = some @ keys.mT / math.sqrt(d)
                if causal:
                    later = torch.ones_like(scores, dtype=torch.bool).triu(start + 1)
                    scores = scores.masked_fill(later, -math.inf)
                yield batch, head, start, scores, values


def reference(
    *, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result o, [B, H, S, D], and the scores' log-sum-exp, [B, H, S], in float64.

    Scores are q · k / sqrt(D), the log-sum-exp is the natural logarithm of the sum of their
    exponentials over the keys that a query sees.
    """
    o = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float64, device=q.device)
    for batch, head, start, scores, values in _by_head(q, k, v, causal):
        some = slice(start, start + len(scores))
        lse[batch, head, some] = torch.logsumexp(scores, -1)
        o[batch, head, some] = torch.softmax(scores, -1) @ values
    return o, lse


def reference_rows(
    rows: tuple[torch.Tensor, torch.Tensor],
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `reference` has in some rows: of o, as [B·H·S, D], and of lse, as [B·H, S], in float64.

    `rows` are their numbers, [R] int64 each.
    """
    h, s, d = q.shape[1:]
    query, head, batch = rows[0] % s, rows[0] // s % h, rows[0] // (s * h)
    key_head = head // (h // k.shape[1])
    scores = torch.einsum(
        "rd,rsd->rs", q[batch, head, query].double(), k[batch, key_head].double()
    ) / math.sqrt(d)
    if causal:
        key = torch.arange(s, device=q.device)
        scores = scores.masked_fill(key > query[:, None], -math.inf)
    o = torch.einsum("rs,rsd->rd", torch.softmax(scores, -1), v[batch, key_head].double())
    head, batch = rows[1] % h, rows[1] // h
    key_head = head // (h // k.shape[1])
    lse = torch.empty((len(rows[1]), s), dtype=torch.float64, device=q.device)
    some = (t[batch, i][:, None] for t, i in ((q, head), (k, key_head), (v, key_head)))
    for row, _, start, scores, _ in _by_head(*some, causal):
        lse[row, start : start + len(scores)] = torch.logsumexp(scores, -1)
    return o, lse


def eager(
    *, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operation behind torch's own attention in training: [B, H, S, D] and [B, H, S] float32.

    It is FlashAttention-2 on a GPU. Below the public function it takes the last dimension for the
    fastest without a look, and on a CPU gives wrong numbers where it is not.
    """
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    if q.is_cuda:
        flash = torch.ops.aten._scaled_dot_product_flash_attention  # noqa: SLF001
        return flash(q, k, v, is_causal=causal)[:2]
    group = q.shape[1] // k.shape[1]
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
    o, lse = flash(
        q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), is_causal=causal
    )
    return o, lse.contiguous()


def experts() -> Mapping[str, Callable[..., object]]:
    """The forward pass of cuDNN's attention in training, on a GPU."""
    return {"cuDNN": _cudnn} if torch.cuda.is_available() else {}


def _cudnn(
    *, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(  # noqa: SLF001
        q, k, v, None, True, is_causal=causal
    )
    return found[0], found[1].view(q.shape[:3])
