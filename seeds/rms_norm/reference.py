"""RMS norm over the last dimension: inputs, float64 reference, and what a user would call."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from kagent_sandbox.draws import draw_kinds, draw_rows, plant
from torch.nn import functional as F

if TYPE_CHECKING:
    from kagent_sandbox.data.case import Case

CHUNK_ELEMENTS = 1 << 26  # float64 temporaries of the reference stay near 1 GiB
MANY = 64  # columns


def inputs(case: Case, generator: torch.Generator, device: torch.device) -> dict[str, torch.Tensor]:
    """Draw x: [M, N] in the case's dtype, times the case's scale; and weight: [N].

    A quarter of the weights is about -1, the others about 1; of MANY and more, one in 16 is 0,
    small, or large. Distributions: `normal`; `mixed` gives each row a kind of its own: normal,
    zeros, few values, rising along the row, one entry 30 times as large as the others, subnormal
    numbers, a thousandth of normal (so that eps counts), 30 times normal, a power of two up to 2^50
    times normal (as far as float16 goes; the square of more overflows). `nonfinite` also has rows
    with +inf (where the result is NaN, and 0 in the rest of the row) and with NaN (all of the row
    is NaN), and NaN in one weight of 64, at least one (whose column is NaN).
    """
    rows, columns = int(case.dims["M"]), int(case.dims["N"])
    dtype = getattr(torch, case.dtype)
    weight = torch.randn(columns, generator=generator, device=device).mul_(0.2).add_(1.0)
    weight[torch.rand(columns, generator=generator, device=device) < 1 / 4] *= -1
    if columns >= MANY:
        plant(weight, (0.0, 1 / 64, 8.0, -8.0), 1 / 16, generator)
    x = torch.empty((rows, columns), dtype=dtype, device=device)
    if case.inputs == "normal":  # in one pass: every timed execution has such inputs of its own
        x.normal_(0.0, case.scale, generator=generator)
        return {"x": x, "weight": weight.to(dtype)}
    if case.inputs not in ("mixed", "nonfinite"):
        raise ValueError(f"rms_norm knows no distribution {case.inputs!r}")
    wide = torch.randn((rows, columns), generator=generator, device=device) * case.scale
    kind = draw_kinds(rows, 9, generator, device)
    power = 50 * torch.rand((rows, 1), generator=generator, device=device)
    largest = torch.finfo(dtype).max
    huge = (wide / case.scale * power.exp2()).clamp(-largest, largest)
    at = torch.randint(columns, (rows, 1), generator=generator, device=device)
    spiked = wide.scatter(1, at, 30.0 * case.scale)
    tiny = torch.finfo(dtype).smallest_normal / (8 * case.scale)
    ramp = torch.linspace(-4, 4, columns, device=device).expand(rows, columns)
    few = (wide / case.scale).round() * case.scale
    others = (wide * 0, few, ramp, spiked, wide * tiny, wide / 1000, wide * 30, huge)
    for i, other in enumerate(others):
        wide = torch.where(kind == i, other, wide)
    if case.inputs == "nonfinite":
        plant(weight, (torch.nan,), 1 / 64, generator)
        broken = draw_rows(rows, 2, generator, device)
        infinite = draw_kinds(rows, 2, generator, device) == 0
        value = torch.where(infinite, torch.inf, torch.nan)
        value = torch.where(broken, value, wide.gather(1, at))
        wide = wide.scatter(1, at, value)
    return {"x": x.copy_(wide), "weight": weight.to(dtype)}


def reference(*, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm, x / sqrt(mean(x²) + eps) · weight, the mean over each row, in float64, [M, N]."""
    y = torch.empty(x.shape, dtype=torch.float64, device=x.device)
    rows = max(1, CHUNK_ELEMENTS // x.shape[1])
    for source, result in zip(x.split(rows), y.split(rows), strict=True):
        wide = source.double()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        torch.mul(wide * scale, weight, out=result)
    return y


def reference_rows(
    rows: tuple[torch.Tensor], *, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """What `reference` has in some rows, [R, N] float64; `rows` are their numbers, [R] int64."""
    return reference(x=x[rows[0]], weight=weight, eps=eps)


def eager(*, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Torch's own function, [M, N] in x's dtype."""
    return F.rms_norm(x, (x.shape[1],), weight, eps)


def experts() -> Mapping[str, Callable[..., torch.Tensor]]:
    """Liger and Quack, where they can be imported."""
    found: dict[str, Callable[..., torch.Tensor]] = {}
    try:
        liger = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
        found["liger"] = lambda *, x, weight, eps: liger.apply(x, weight, eps)
    except ImportError:
        pass
    try:
        quack = importlib.import_module("quack.rmsnorm").rmsnorm
        found["quack"] = lambda *, x, weight, eps: quack(x, weight, eps=eps)
    except ImportError:
        pass
    return found
