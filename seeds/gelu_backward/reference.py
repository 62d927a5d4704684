"""Gradient of GELU in its tanh form: inputs, float64 reference, and what a user would call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from kagent_sandbox.draws import draw_huge, draw_kinds, plant

if TYPE_CHECKING:
    from kagent_sandbox.data.case import Case

CHUNK_ELEMENTS = 1 << 25  # float64 temporaries of the reference stay near 2 GiB
FEW = 64  # columns
HUGE = 2.0**62  # where a square overflows, torch has NaN


def inputs(case: Case, generator: torch.Generator, device: torch.device) -> dict[str, torch.Tensor]:
    """Draw x: [M, N], the input of GELU, times the case's scale; and grad: [M, N], of its result.

    grad is normal, in rows of less than FEW columns from 1 to 2 or -2 to -1, times a power of two
    from 2^-27 to 2^13 (from 1 to 2^6 in float16, which has few small numbers). Distributions of x:
    `normal`; `ramp` (from -8 to 8 along each row: where the derivative is 0, is negative, exceeds
    1, is 1); `subnormal` (numbers too small to be normal); `huge` (each row has a power of its own,
    from 2^10 to that of HUGE, or of float16's largest number: the derivative is 1 or 0); `mixed`
    (each row has a power of its own, and is normal, rising or falling from -8 to 8, zeros, or a few
    values again and again; in some rows grad is 0). `nonfinite` is `mixed` with +inf, -inf and NaN
    here and there in grad, where x is positive, and NaN in x.
    """
    shape = (int(case.dims["M"]), int(case.dims["N"]))
    dtype = getattr(torch, case.dtype)
    grad = torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)
    few = shape[1] < FEW
    if few:
        # Where the derivative vanishes an element's error is relative to its row's mean. Were all
        # others of a few small by chance, it would be all that torch and a kernel err by.
        grad.clamp_(-1, 1).add_(torch.ones_like(grad).copysign_(grad))
    least, most = (0, 6) if dtype == torch.float16 else (-27, 13)
    sizes = shape[0] if case.inputs in ("mixed", "nonfinite") else 1
    power = torch.randint(least, most + 1, (sizes, 1), generator=generator, device=device)
    grad.mul_(torch.exp2(power.float()).to(dtype))

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=torch.float32)

    if case.inputs == "normal":  # in one pass: every timed execution has such inputs of its own
        x = torch.empty(shape, dtype=dtype, device=device)
        x.normal_(0.0, case.scale, generator=generator)
        if few:
            x[:, 0].abs_()
        return {"grad": grad, "x": x}
    if case.inputs == "huge":
        most = min(HUGE * case.scale, torch.finfo(dtype).max)
        return {"grad": grad, "x": draw_huge(shape, most, dtype, generator, device)}
    ramp = torch.linspace(8, -8, shape[1], device=device)
    if case.inputs == "ramp":
        x = ramp.flip(0) + 0.1 * normal(shape[0], 1)
    elif case.inputs == "subnormal":
        x = normal(*shape) * (torch.finfo(dtype).smallest_normal / 8)
    elif case.inputs in ("mixed", "nonfinite"):
        x = normal(*shape)
        kind = draw_kinds(shape[0], 6, generator, device)
        for i, other in enumerate((ramp, ramp.flip(0), x * 0, x.round() + 0.5)):
            x = torch.where(kind == i, other, x)
        # Where the derivative vanishes torch itself errs by percents, and rows of nothing else
        # would allow as much: one value of each row is positive.
        column = torch.randint(shape[1], (shape[0], 1), generator=generator, device=device)
        x.scatter_(1, column, x.gather(1, column).abs() + 0.5)
        grad.masked_fill_(kind == 5, 0.0)
    else:
        raise ValueError(f"gelu_backward knows no distribution {case.inputs!r}")
    x = (x * case.scale).to(dtype).contiguous()
    if case.inputs == "nonfinite":
        plant(grad, (torch.inf, -torch.inf, torch.nan), 0.06, generator, where=x > 0)
        plant(x, (torch.nan,), 0.03, generator)  # at an infinity torch gives NaN, its limit is 1
    return {"grad": grad, "x": x}


def reference(*, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The product of grad and the derivative of x · s, in float64, [M, N].

    s = sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x³). The derivative is s + x · s (1 - s) · 2u'.
    1 - s is sigmoid(-2u): no digits cancel.
    """
    dx = torch.empty(x.shape, dtype=torch.float64, device=x.device)
    rows = max(1, CHUNK_ELEMENTS // x.shape[1])
    for g, source, result in zip(grad.split(rows), x.split(rows), dx.split(rows), strict=True):
        wide = source.double()
        twice_u = (8 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3)
        s, rest = torch.sigmoid(twice_u), torch.sigmoid(-twice_u)
        slope = (8 / torch.pi) ** 0.5 * (1 + 3 * 0.044715 * wide**2)
        torch.mul(g, s + wide * slope * s * rest, out=result)
    return dx


def reference_rows(
    rows: tuple[torch.Tensor], *, grad: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    """What `reference` has in some rows, [R, N] float64; `rows` are their numbers, [R] int64."""
    return reference(grad=grad[rows[0]], x=x[rows[0]])


def eager(*, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Torch's own kernel, [M, N] in x's dtype."""
    return torch.ops.aten.gelu_backward(grad, x, approximate="tanh")


def experts() -> Mapping[str, Callable[..., torch.Tensor]]:
    """None: no expert library offers it alone."""
    return {}
