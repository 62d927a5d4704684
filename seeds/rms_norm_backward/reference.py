"""Gradients of RMS norm: inputs, float64 reference, and what a user would call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from kagent_sandbox.draws import draw_kinds, draw_rows, plant
from torch.nn import functional as F

if TYPE_CHECKING:
    from kagent_sandbox.data.case import Case

CHUNK_ELEMENTS = 1 << 25  # float64 temporaries of the reference stay near 1 GiB
MANY = 64  # columns


def inputs(case: Case, generator: torch.Generator, device: torch.device) -> dict[str, torch.Tensor]:
    """Draw x: [M, N], times the case's scale; grad: [M, N]; and weight: [N].

    grad is normal, times a power of two from 2^-27 to 2^13 (not in float16). A quarter of the
    weights is about -1, the others about 1; of MANY and more, one in 16 is 0, small, or large.
    Distributions of x: `normal`; `mixed` gives each row a kind of its own: normal, zeros, few
    values, rising along the row, one entry 4 times as large as the others, a thousandth of normal
    (so that eps counts), 30 times normal; in some rows grad is 0. `nonfinite` is `mixed` with a NaN
    in grad in some rows: dx is NaN in all of such a row, dweight in the NaN's column.
    `nonfinite_x` has it in x: dx is NaN in all of such a row, and dweight everywhere.
    """
    rows, columns = int(case.dims["M"]), int(case.dims["N"])
    dtype = getattr(torch, case.dtype)
    weight = torch.randn(columns, generator=generator, device=device).mul_(0.2).add_(1.0)
    weight[torch.rand(columns, generator=generator, device=device) < 1 / 4] *= -1
    if columns >= MANY:
        plant(weight, (0.0, 1 / 64, 8.0, -8.0), 1 / 16, generator)
    x = torch.empty((rows, columns), dtype=dtype, device=device)
    grad = torch.empty_like(x).normal_(generator=generator)
    power = torch.randint(-27, 14, (1,), generator=generator, device=device).to(torch.float32)
    if dtype != torch.float16:
        grad.mul_(power.exp2().to(dtype))
    given = {"grad": grad, "x": x, "weight": weight.to(dtype)}
    if case.inputs == "normal":  # in one pass: every timed execution has such inputs of its own
        x.normal_(0.0, case.scale, generator=generator)
        return given
    if case.inputs not in ("mixed", "nonfinite", "nonfinite_x"):
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
    if case.inputs != "mixed":
        broken = draw_rows(rows, 8, generator, device)
        one = grad if case.inputs == "nonfinite" else x
        one.scatter_(1, at, one.gather(1, at).masked_fill_(broken, torch.nan))
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
