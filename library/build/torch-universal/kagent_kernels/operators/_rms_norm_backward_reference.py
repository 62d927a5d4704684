"""Gradients of RMS norm: inputs, float64 reference, and what a user would call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

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


def plant(
    tensor: torch.Tensor,
    values: Sequence[float],
    share: float,
    generator: torch.Generator,
    *,
    where: torch.Tensor | None = None,
) -> None:
    """Overwrite some elements of a tensor in place, at least one of them.

    Args:
        tensor: Any shape, of numbers of 16 bits or more; with no elements it stays as it is.
        values: They are written, each as likely as the others.
        share: Of the elements, from 0 to 1.
        generator: The source of chance, on the tensor's device.
        where: Places that may be overwritten, bool of the tensor's shape; all of them by default,
            and one anywhere where it allows none.

    Example:
        Plant infinities and NaN among gradients:

            import math

            import torch

            generator = torch.Generator().manual_seed(0)
            grad = torch.zeros(8, 3)
            plant(grad, (math.inf, math.nan), 0.05, generator)
            assert not grad.isfinite().all()
    """
    if not tensor.numel():
        return
    shape, device = tensor.shape, tensor.device
    position = torch.rand(shape, generator=generator, device=device)
    if where is not None:
        position.masked_fill_(~where, 1.0)
    position.view(-1)[position.argmin()] = -1.0
    which = torch.randint(len(values), shape, generator=generator, device=device)
    for i, value in enumerate(values):
        tensor.masked_fill_((position < share) & (which == i), value)


CHUNK_ELEMENTS = 1 << 25  # float64 temporaries of the reference stay near 1 GiB
MANY = 64  # columns


def inputs(case: Case, generator: torch.Generator, device: torch.device) -> dict[str, torch.Tensor]:
    """Draw x: [M, N], times the case's scale; grad: [M, N], normal; and weight: [N].

    A quarter of the weights is about -1, the others about 1; of MANY and more, one in 16 is 0,
    small, or large. Distributions of x: `normal`; `mixed` gives each row a kind of its own:
    normal, zeros, few values, rising along the row, one entry 4 times as large as the others, a
    thousandth of normal (so that eps counts), 30 times normal; in some rows grad is 0. `nonfinite`
    is `mixed` with a NaN in grad in some rows: dx is NaN in all of such a row, dweight in the NaN's
    column.
    """
    rows, columns = int(case.dims["M"]), int(case.dims["N"])
    dtype = getattr(torch, case.dtype)
    weight = torch.randn(columns, generator=generator, device=device).mul_(0.2).add_(1.0)
    weight[torch.rand(columns, generator=generator, device=device) < 1 / 4] *= -1
    if columns >= MANY:
        plant(weight, (0.0, 1 / 64, 8.0, -8.0), 1 / 16, generator)
    x = torch.empty((rows, columns), dtype=dtype, device=device)
    grad = torch.empty_like(x).normal_(generator=generator)
    given = {"grad": grad, "x": x, "weight": weight.to(dtype)}
    if case.inputs == "normal":  # in one pass: every timed execution has such inputs of its own
        x.normal_(0.0, case.scale, generator=generator)
        return given
    if case.inputs not in ("mixed", "nonfinite"):
        raise ValueError(f"rms_norm_backward knows no distribution {case.inputs!r}")
    wide = torch.randn((rows, columns), generator=generator, device=device) * case.scale
    kind = draw_kinds(rows, 8, generator, device)
    at = torch.randint(columns, (rows, 1), generator=generator, device=device)
    # Of a larger one, dx is what is left of two products that are near each other by chance.
    spiked = wide.scatter(1, at, 4.0 * case.scale)
    ramp = torch.linspace(-4, 4, columns, device=device).expand(rows, columns)
    few = (wide / case.scale).round() * case.scale
    others = (wide * 0, few, ramp, spiked, wide / 1000, wide * 30)
    for i, other in enumerate(others):
        wide = torch.where(kind == i, other, wide)
    x.copy_(wide)
    grad.masked_fill_(kind == 6, 0.0)
    if case.inputs == "nonfinite":
        broken = draw_rows(rows, 8, generator, device)
        grad.scatter_(1, at, grad.gather(1, at).masked_fill_(broken, torch.nan))
    return given


def reference(
    *, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x, [M, N], and of weight, [N], in float64.

    With s = 1 / sqrt(mean(x²) + eps), n = x · s and h = grad · weight, dx is
    s (h - n · mean(h · n)), the means over each row; dweight is the sum of grad · n over the rows.
    """
    dx = torch.empty(x.shape, dtype=torch.float64, device=x.device)
    dweight = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
    rows = max(1, CHUNK_ELEMENTS // x.shape[1])
    for g, source, result in zip(grad.split(rows), x.split(rows), dx.split(rows), strict=True):
        wide = source.double()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        normed, h = wide * scale, g * weight.double()
        torch.mul(scale, h - normed * (h * normed).mean(-1, keepdim=True), out=result)
        dweight += (g * normed).sum(0)
    return dx, dweight


def reference_rows(
    rows: tuple[torch.Tensor, torch.Tensor],
    *,
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `reference` has: some rows of dx, [R, N], and dweight as one row, [1, N], in float64.

    `rows[0]` are the numbers of dx's rows, [R] int64. dweight of 16-bit inputs is a product of
    float32 numbers that is added up in float64: far finer than what it is held against.
    """
    some, _ = reference(grad=grad[rows[0]], x=x[rows[0]], weight=weight, eps=eps)
    work = torch.float64 if x.dtype == torch.float32 else torch.float32
    dweight = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
    step = max(1, CHUNK_ELEMENTS // x.shape[1])
    for g, source in zip(grad.split(step), x.split(step), strict=True):
        wide = source.to(work)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        dweight += wide.mul_(scale).mul_(g).sum(0, dtype=torch.float64)
    return some, dweight[None]


def eager(
    *, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch's own function and its gradients by autograd: [M, N] and [N] in x's dtype."""
    with torch.enable_grad():
        leaf, w = x.detach().requires_grad_(), weight.detach().requires_grad_()
        y = F.rms_norm(leaf, (x.shape[1],), w, eps)
        dx, dweight = torch.autograd.grad(y, (leaf, w), grad)
    return dx, dweight


def experts() -> Mapping[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]]:
    """None: expert libraries take what their forward pass has kept."""
    return {}
