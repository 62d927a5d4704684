"""Gradient of softmax over the last dimension: inputs, float64 reference, torch's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kagent_sandbox.data.case import Case


def draw_kinds(
    rows: int, count: int, generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    """Draw a kind for each row, all kinds as often, but for one row more or less.

    Args:
        rows: Number of rows, M.
        count: Number of kinds. Of fewer rows each has another kind, any of them.
        generator: The source of chance.
        device: Where the result is.

    Returns:
        [M, 1] int64, from 0 to `count - 1`.

    Example:
        Draw one of 4 kinds for each of 10 rows:

            import torch

            cpu = torch.device("cpu")
            generator = torch.Generator(cpu).manual_seed(0)
            kinds = draw_kinds(10, 4, generator, cpu)
            assert kinds.shape == (10, 1)
            assert sorted(kinds.flatten().bincount().tolist()) == [2, 2, 3, 3]
    """
    order = torch.randperm(rows, generator=generator, device=device)
    first = torch.randint(count, (), generator=generator, device=device)
    return ((order + first) % count).unsqueeze(1)


def draw_rows(
    rows: int, one_of: int, generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    """Choose one row of `one_of`, at least one of all.

    Args:
        rows: Number of rows, M.
        one_of: Rows for each one that is chosen.
        generator: The source of chance.
        device: Where the result is.

    Returns:
        [M, 1] bool, true for M / `one_of` rows, rounded up.

    Example:
        Choose rows that get a NaN:

            import torch

            cpu = torch.device("cpu")
            generator = torch.Generator(cpu).manual_seed(0)
            assert draw_rows(12, 8, generator, cpu).sum() == 2
            assert draw_rows(1, 8, generator, cpu).all()
    """
    order = torch.randperm(rows, generator=generator, device=device)
    return (order % one_of == 0).unsqueeze(1)


CHUNK_ELEMENTS = 1 << 25  # float64 temporaries of the reference stay near 1 GiB


def inputs(case: Case, generator: torch.Generator, device: torch.device) -> dict[str, torch.Tensor]:
    """Draw y: [M, N], the softmax of (grad / 16 - |normal numbers|) times the case's scale; and
    grad: [M, N].

    grad is normal, with opposite signs in each pair of columns. Distributions of y: `normal`;
    `masked` (a third of the entries is 0, none beside another); `mixed` gives each row a kind of
    its own: normal, masked, equal everywhere, 1 at one column and 0 elsewhere, 1/2 at two columns
    where grad has opposite signs, 0 before and after a window of half the columns or more; in some
    rows grad is 0, or large.
    `nonfinite` is `mixed` with a NaN in grad in a third of the rows: all of such a row is NaN.
    """
    # An element's error is relative to itself and its row's mean. Where a probability is far above
    # the mean and its grad is near the sum by chance, the sum's rounding is all that is left, and
    # each order of additions has another. So no probability is far above the others, not more than
    # half of a row's are 0, and no row's grads are alike. grad in the logits makes the sum about
    # 1/16: without it that is 0 in the mean, and a bfloat16 kernel could leave it out of long rows.
    rows, columns = int(case.dims["M"]), int(case.dims["N"])
    dtype = getattr(torch, case.dtype)
    grad = torch.empty((rows, columns), dtype=dtype, device=device).normal_(generator=generator)
    grad[:, 1::2].copysign_(grad[:, : columns // 2 * 2 : 2]).neg_()
    logits = torch.empty((rows, columns), dtype=torch.float32, device=device)
    logits.normal_(0.0, case.scale, generator=generator).abs_().neg_()
    logits.add_(grad, alpha=case.scale / 16)
    if case.inputs in ("masked", "mixed", "nonfinite"):
        hidden = torch.rand((rows, columns), generator=generator, device=device) < 2 / 3
        at = torch.randint(columns, (rows, 2), generator=generator, device=device)
        column = torch.arange(columns, device=device)
        hidden &= column % 2 == at[:, 1:] % 2
        if case.inputs != "masked":
            kind = draw_kinds(rows, 8, generator, device)
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
            grad.mul_(torch.where(kind == 7, 64.0, 1.0).to(dtype))
        hidden.scatter_(1, at[:, :1], value=False)
        logits.masked_fill_(hidden, -torch.inf)
    elif case.inputs != "normal":
        raise ValueError(f"softmax_backward knows no distribution {case.inputs!r}")
    if case.inputs == "nonfinite":
        broken = draw_rows(rows, 3, generator, device)
        place = torch.randint(columns, (rows, 1), generator=generator, device=device)
        value = grad.gather(1, place).masked_fill_(broken, torch.nan)
        grad.scatter_(1, place, value)
    return {"grad": grad, "y": torch.softmax(logits, -1).to(dtype)}


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
