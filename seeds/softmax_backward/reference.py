"""Gradient of softmax over the last dimension: inputs, float64 reference, torch's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from kagent_sandbox.draws import draw_kinds, draw_rows

if TYPE_CHECKING:
    from kagent_sandbox.data.case import Case

CHUNK_ELEMENTS = 1 << 25  # float64 temporaries of the reference stay near 1 GiB


def inputs(case: Case, generator: torch.Generator, device: torch.device) -> dict[str, torch.Tensor]:
    """Draw y: [M, N], the softmax of (grad / 16 - |normal numbers|) times the case's scale; and
    grad: [M, N].

    grad is normal, with opposite signs in each pair of columns, times a power of two from 2^-27 to
    2^13 (from 1 to 2^6 in float16, which has few small numbers). Distributions of y: `normal`;
    `huge` (normal, and grad is times a power from 2^14 to 2^120; not in float16);
    `masked` (a third of the entries is 0, none beside another); `mixed` gives each row a power of
    its own, and a kind: normal, masked, equal everywhere, 1 at one column and 0 elsewhere, 1/2 at
    two columns where grad has opposite signs, 0 before and after a window of half the columns or
    more, a grad of 0, nearly 1 at one column (see `_peaked`).
    `nonfinite` is `mixed` with a NaN in grad in a third of the rows: all of such a row is NaN.
    """
    # An element's error is relative to itself and its row's mean. Where a probability is far above
    # the mean and its grad is near the sum by chance, the sum's rounding is all that is left, and
    # each order of additions has another. So no probability is far above the others but where grad
    # is made for it, not more than half of a row's are 0, and no row's grads are alike. grad in the
    # logits makes the sum about 1/16: without it that is 0 in the mean, and a bfloat16 kernel could
    # leave it out of long rows.
    rows, columns = int(case.dims["M"]), int(case.dims["N"])
    dtype = getattr(torch, case.dtype)
    grad = torch.empty((rows, columns), dtype=dtype, device=device).normal_(generator=generator)
    grad[:, 1::2].copysign_(grad[:, : columns // 2 * 2 : 2]).neg_()
    logits = torch.empty((rows, columns), dtype=torch.float32, device=device)
    logits.normal_(0.0, case.scale, generator=generator).abs_().neg_()
    logits.add_(grad, alpha=case.scale / 16)
    least, most = (0, 6) if dtype == torch.float16 else (-27, 13)
    if case.inputs == "huge":
        least, most = 14, 120
    sizes = rows if case.inputs in ("mixed", "nonfinite") else 1
    power = torch.randint(least, most + 1, (sizes, 1), generator=generator, device=device)
    kind = None
    if case.inputs in ("masked", "mixed", "nonfinite"):
        hidden = torch.rand((rows, columns), generator=generator, device=device) < 2 / 3
        at = torch.randint(columns, (rows, 2), generator=generator, device=device)
        column = torch.arange(columns, device=device)
        hidden &= column % 2 == at[:, 1:] % 2
        if case.inputs != "masked":
            kind = draw_kinds(rows, 9, generator, device)
            ends = at.sort(1).values
            half = columns // 2
            first = ends[:, :1].clamp_max(columns - half)
            window = (column < first) | (column > ends[:, 1:].clamp_min(first + half - 1))
            two = grad.gather(1, ends)
            opposite = two[:, 1:].copysign(two[:, :1]).neg()
            grad.scatter_(1, ends[:, 1:], torch.where(kind == 4, opposite, two[:, 1:]))
            hidden &= kind == 1
            hidden |= (kind == 3) & (column != at[:, :1])
            hidden |= (kind == 4) & (column != at[:, :1]) & (column != at[:, 1:])
            hidden |= (kind == 5) & window
            logits.masked_fill_((kind == 2) | (kind == 4), 0.0)
            grad.masked_fill_(kind == 6, 0.0)
        hidden.scatter_(1, at[:, :1], value=False)
        logits.masked_fill_(hidden, -torch.inf)
    elif case.inputs not in ("normal", "huge"):
        raise ValueError(f"softmax_backward knows no distribution {case.inputs!r}")
    y = torch.softmax(logits, -1).to(dtype)
    if kind is not None:
        for i, scale in ((7, 1.0), (8, 2.0)):
            at = (kind == i).flatten().nonzero().flatten()
            grad[at], y[at] = _peaked(len(at), columns, scale, dtype, generator, device)
    grad.mul_(torch.exp2(power.float()).to(dtype))
    if case.inputs == "nonfinite":
        broken = draw_rows(rows, 3, generator, device)
        place = torch.randint(columns, (rows, 1), generator=generator, device=device)
        value = grad.gather(1, place).masked_fill_(broken, torch.nan)
        grad.scatter_(1, place, value)
    return {"grad": grad, "y": y}


def _peaked(
    rows: int,
    columns: int,
    scale: float,
    dtype: torch.dtype,
    generator: torch.Generator,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw grad and y of rows in which one probability is far above all others.

    These are the softmax of normal numbers times `scale`, times a share from 1e-8 to 1/4 (from 1/10
    in float16). Their grads are from 1 to 1.5 or the opposite, of one sign but where y is far below
    their mean: so the sum does not cancel, nor is one of them near it. At the largest, grad is a
    quarter of their sum, and takes as much of it away.
    """

    def uniform(*size: int) -> torch.Tensor:
        return torch.rand(size, generator=generator, device=device)

    at = torch.randint(columns, (rows, 1), generator=generator, device=device)
    logits = torch.randn((rows, columns), generator=generator, device=device) * scale
    low = -1.0 if dtype == torch.float16 else -8.0
    share = 10 ** (low + (-0.6 - low) * uniform(rows, 1))
    others = torch.softmax(logits.scatter_(1, at, -torch.inf), -1) * share
    y = others.scatter(1, at, 1 - share).to(dtype)
    sign = torch.where(uniform(rows, 1) < 0.5, -1.0, 1.0)
    either = torch.where(uniform(rows, columns) < 0.5, -1.0, 1.0)
    grad = 1 + uniform(rows, columns) / 2
    grad *= torch.where(others > share / (4 * columns), sign, either)
    dot = (others * grad).sum(-1, keepdim=True)
    return grad.scatter_(1, at, -dot / 4).to(dtype), y


def reference(*, grad: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The gradient, y (grad - sum(grad · y)), the sum over each row, in float64, [M, N]."""
    dx = torch.empty(y.shape, dtype=torch.float64, device=y.device)
    rows = max(1, CHUNK_ELEMENTS // y.shape[1])
    for g, p, result in zip(grad.split(rows), y.split(rows), dx.split(rows), strict=True):
        wide = p.double()
        dot = (g * wide).sum(-1, keepdim=True)
        torch.mul(wide, g - dot, out=result)
    return dx


def reference_rows(
    rows: tuple[torch.Tensor], *, grad: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """What `reference` has in some rows, [R, N] float64; `rows` are their numbers, [R] int64."""
    return reference(grad=grad[rows[0]], y=y[rows[0]])


def eager(*, grad: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Torch's own kernel, [M, N] in y's dtype."""
    return torch.ops.aten._softmax_backward_data(grad, y, -1, y.dtype)  # noqa: SLF001


def experts() -> Mapping[str, Callable[..., torch.Tensor]]:
    """None: expert libraries offer it within their autograd functions alone."""
    return {}
