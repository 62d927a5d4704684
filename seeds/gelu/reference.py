"""GELU in its tanh form: inputs, float64 reference, and what a user would call instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from kagent_sandbox.draws import draw_huge, draw_kinds, plant
from torch.nn import functional as F

if TYPE_CHECKING:
    from kagent_sandbox.data.task import Case

CHUNK_ELEMENTS = 1 << 26  # float64 temporaries of the reference stay near 2 GiB


def inputs(case: Case, generator: torch.Generator, device: torch.device) -> dict[str, torch.Tensor]:
    """Draw x: [M, N] in the case's dtype, times the case's scale.

    Distributions: `normal`; `constant` (each row one positive value); `ramp` (from -8 to 8 along
    each row: the tails, where the result vanishes or equals x); `zeros` (of both signs);
    `subnormal` (numbers too small to be normal); `mixed` (each row is normal, rising or falling
    from -8 to 8, a constant, zeros, or a few values again and again); `nonfinite` (the same, with
    +inf and NaN here and there, for which the result is the same, and the least finite number and
    -200, for which it is 0); `huge` (each row has a power of its own, from 2^10 to that of the
    largest finite number times the scale: in cases of their own, as smaller ones hide beside such).
    -inf is left out: torch says NaN, and the limit is 0.
    """
    shape = (int(case.dims["M"]), int(case.dims["N"]))

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=torch.float32)

    if case.inputs == "normal":  # in one pass: every timed execution has such inputs of its own
        x = torch.empty(shape, dtype=getattr(torch, case.dtype), device=device)
        return {"x": x.normal_(0.0, case.scale, generator=generator)}
    if case.inputs == "huge":
        dtype = getattr(torch, case.dtype)
        most = torch.finfo(dtype).max * case.scale
        return {"x": draw_huge(shape, most, dtype, generator, device)}
    if case.inputs == "constant":
        x = normal(shape[0], 1).abs().expand(shape)
    elif case.inputs == "ramp":
        ramp = torch.linspace(8, -8, shape[1], device=device).flip(0)  # 8 alone is no tail
        x = ramp + 0.1 * normal(shape[0], 1)
    elif case.inputs == "zeros":
        x = torch.copysign(torch.zeros(shape, device=device), normal(*shape))
    elif case.inputs == "subnormal":
        x = normal(*shape) * (torch.finfo(getattr(torch, case.dtype)).smallest_normal / 8)
    elif case.inputs in ("mixed", "nonfinite"):
        ramp = torch.linspace(8, -8, shape[1], device=device)
        x = normal(*shape)
        # Rows of nothing but tails, which torch itself gets wrong by percents, would allow as much
        # everywhere: one value of each row is positive.
        column = torch.randint(shape[1], (shape[0], 1), generator=generator, device=device)
        x.scatter_(1, column, x.gather(1, column).abs() + 0.1)
        kind = draw_kinds(shape[0], 6, generator, device)
        others = (ramp, ramp.flip(0), x[:, :1].abs(), x * 0, x.round() + 0.5)
        for i, other in enumerate(others):
            x = torch.where(kind == i, other, x)
    else:
        raise ValueError(f"gelu knows no distribution {case.inputs!r}")
    x = (x * case.scale).to(getattr(torch, case.dtype)).contiguous()
    if case.inputs == "nonfinite":
        others = torch.ones(shape, dtype=torch.bool, device=device).scatter_(1, column, value=False)
        plant(x, (-200.0, torch.finfo(x.dtype).min), 0.02, generator, where=others)
        plant(x, (torch.inf, torch.nan), 0.02, generator, where=others)
    return {"x": x}


def reference(*, x: torch.Tensor) -> torch.Tensor:
    """GELU in float64, [M, N], a chunk of rows at a time.

    As x · sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x³): x (1 + tanh u) / 2 is the same, but loses
    its digits to cancellation where u is negative.
    """
    y = torch.empty(x.shape, dtype=torch.float64, device=x.device)
    rows = max(1, CHUNK_ELEMENTS // x.shape[1])
    for source, result in zip(x.split(rows), y.split(rows), strict=True):
        wide = source.double()
        u = (2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3)
        torch.mul(wide, torch.sigmoid(2 * u), out=result)
    return y


def reference_rows(rows: tuple[torch.Tensor], *, x: torch.Tensor) -> torch.Tensor:
    """What `reference` has in some rows, [R, N] float64; `rows` are their numbers, [R] int64."""
    return reference(x=x[rows[0]])


def eager(*, x: torch.Tensor) -> torch.Tensor:
    """Torch's own kernel, [M, N] in x's dtype."""
    return F.gelu(x, approximate="tanh")


def experts() -> Mapping[str, Callable[..., torch.Tensor]]:
    """None: no expert library offers it alone."""
    return {}
