"""Scaled dot product attention: reference, baselines and inputs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from kagent_sandbox.draws import break_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

if TYPE_CHECKING:
    from kagent_sandbox.data.task import Case
    from torch.nn.attention.flex_attention import BlockMask

SCORES = 1 << 27  # float64 scores held at once: 1 GiB, and about three times that with temporaries


def inputs(case: Case, generator: torch.Generator, device: torch.device) -> dict[str, torch.Tensor]:
    """q, k and v from a normal distribution of deviation `scale`.

    "shifted" adds a constant to every key, which moves all scores of a row by the same large amount
    and leaves the result alone: it finds a softmax that does not subtract the row's maximum. "sunk"
    lowers the queries too: scores are about -200 (D = 64), too little to exponentiate unshifted.
    "mixed" gives each head of keys a kind of its own: normal; all keys alike, so that all scores of
    a row are equal; scores that rise or fall from key to key; scores about 10000 below the others
    before and after a window of keys or in every other block, never for the first key. "huge" is
    normal, with values times a power of two from 2^10 to 2^100: the result is as large. "nonfinite"
    is normal, with NaN in some queries, in one key of some heads and in the first value of some:
    all of such a query's row is NaN, and the rows of all queries of such a key; of such a value all
    rows are NaN in its column.
    """
    # No short sequences with NaN: of 5 keys torch's kernel for a CPU makes 0 of it. And none in
    # values that a causal query does not see: times a probability of 0, some kernels have NaN.
    kinds = ("normal", "shifted", "sunk", "mixed", "huge", "nonfinite")
    if case.inputs not in kinds:
        raise ValueError(f"inputs = {case.inputs!r}: use one of {', '.join(kinds)}")
    d = case.dims
    b, h, hkv, s, size = (int(d[n]) for n in ("B", "H", "Hkv", "S", "D"))
    dtype: torch.dtype = getattr(torch, case.dtype)

    def draw(heads: int, shift: float = 0.0) -> torch.Tensor:
        x = torch.empty(b, heads, s, size, dtype=dtype, device=device)
        return x.normal_(shift, case.scale, generator=generator)

    q = draw(h, shift=-3.0 if case.inputs == "sunk" else 0.0)
    k = draw(hkv, shift=8.0 if case.inputs in ("shifted", "sunk") else 0.0)
    if case.inputs == "mixed":
        _mix(q, k, generator)
    v = draw(hkv)
    if case.inputs == "nonfinite":
        break_attention(q, k, v, bool(d["causal"]), generator)
    elif case.inputs == "huge":
        power = torch.randint(10, 101, (1,), generator=generator, device=device)
        v.mul_(power.float().exp2().to(dtype))
    return {"q": q, "k": k, "v": v}


def _mix(q: torch.Tensor, k: torch.Tensor, generator: torch.Generator) -> None:
    """Make the heads of "mixed": every fourth dimension lifts or lowers all scores of a key.

    Were it one dimension, all additions of a chain after it would be rounded as a large number's,
    and of torch's chain only those before the end.
    """
    lift = 4.0
    s, size = k.shape[2:]
    key = torch.arange(s, device=k.device)
    q[..., 3::4] = lift

    def whole(most: int) -> int:
        return int(torch.randint(most, (), generator=generator, device=k.device))

    first = whole(6)
    for i, head in enumerate(k.flatten(0, 1)):
        kind = (first + i) % 6
        hidden = torch.zeros_like(key, dtype=torch.bool)
        score = torch.zeros(s, device=k.device)
        if kind == 1:
            head.copy_(head[:1].clone().expand_as(head))
        elif kind in (2, 3):
            score = torch.linspace(-8, 8, s, device=k.device) * (1 if kind == 2 else -1)
        elif kind == 4:
            start, end = sorted((whole(s), whole(s)))
            hidden = (key < start) | (key > end)
        elif kind == 5:
            hidden = (key // (16 << whole(5)) + whole(2)) % 2 == 0
        hidden[0] = False
        each = score.masked_fill(hidden, -1e4) * math.sqrt(size) / (lift * (size // 4))
        head[:, 3::4] = each.to(head.dtype)[:, None]


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """The definition in float64, over chunks of queries: [B, H, S, D]."""
    b, h, s, d = q.shape
    group = h // k.shape[1]
    k64 = k.double().repeat_interleave(group, 1)
    v64 = v.double().repeat_interleave(group, 1)
    o = torch.empty(b, h, s, d, dtype=torch.float64, device=q.device)
    rows = max(1, SCORES // (b * h * s))
    for start in range(0, s, rows):
        stop = min(s, start + rows)
        seen = stop if causal else s
        scores = q[:, :, start:stop].double() @ k64[:, :, :seen].mT
        scores *= 1.0 / math.sqrt(d)
        if causal:
            query = torch.arange(start, stop, device=q.device)[:, None]
            key = torch.arange(seen, device=q.device)[None, :]
            scores.masked_fill_(key > query, -math.inf)
        o[:, :, start:stop] = torch.softmax(scores, -1) @ v64[:, :, :seen]
    return o


def reference_rows(
    rows: tuple[torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> torch.Tensor:
    """What `reference` has in some rows of [B·H·S, D], [R, D] float64; `rows` are their numbers,
    [R] int64.
    """
    h, s, d = q.shape[1:]
    query = rows[0] % s
    head, batch = rows[0] // s % h, rows[0] // (s * h)
    key_head = head // (h // k.shape[1])
    scores = torch.einsum(
        "rd,rsd->rs", q[batch, head, query].double(), k[batch, key_head].double()
    ) / math.sqrt(d)
    if causal:
        key = torch.arange(s, device=q.device)
        scores = scores.masked_fill(key > query[:, None], -math.inf)
    return torch.einsum("rs,rsd->rd", torch.softmax(scores, -1), v[batch, key_head].double())


def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """What torch picks by itself (FlashAttention-2 on an H100)."""
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
    )


def experts() -> Mapping[str, Callable[..., object]]:
    """SDPA's fused kernels and FlexAttention, on a GPU."""
    if not torch.cuda.is_available():
        return {}
    return {
        "sdpa flash": functools.partial(_sdpa, SDPBackend.FLASH_ATTENTION),
        "sdpa cuDNN": functools.partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
        "FlexAttention": _flex,
    }


def _sdpa(
    backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> torch.Tensor:
    with sdpa_kernel(backend):
        return eager(q, k, v, causal)


def _flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    mask = _causal_blocks(q.shape[2], q.device) if causal else None
    return _compiled_flex()(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


@functools.cache
def _compiled_flex() -> Callable[..., torch.Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


@functools.cache
def _causal_blocks(s: int, device: torch.device) -> BlockMask:
    """Which blocks a causal call visits. Made once, as a user of FlexAttention would; not timed."""
    from torch.nn.attention.flex_attention import create_block_mask

    def keep(
        batch: torch.Tensor,  # noqa: ARG001 - FlexAttention's signature
        head: torch.Tensor,  # noqa: ARG001
        query: torch.Tensor,
        key: torch.Tensor,
    ) -> torch.Tensor:
        return query >= key

    return create_block_mask(keep, None, None, s, s, device=device)
