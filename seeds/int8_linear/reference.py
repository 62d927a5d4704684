"""Linear layer with weights of 8 bits: inputs, float64 reference, and what a user would call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from kagent_sandbox.draws import draw_kinds, draw_rows
from torch.nn import functional as F

if TYPE_CHECKING:
    from kagent_sandbox.data.case import Case

CHUNK_ELEMENTS = 1 << 26  # float64 copies of the weight stay near 512 MiB


def inputs(case: Case, generator: torch.Generator, device: torch.device) -> dict[str, torch.Tensor]:
    """Draw x: [M, K], times the case's scale; weight: [N, K] int8; and scale: [N], about 1/500
    or -1/500.

    Distributions: `normal` (weights are normal, rounded, from -127 to 127); `ranged` (`normal`,
    each row of x and all scales times a power of two from 2^-12 to 1, of float16 from 2^-4, and in
    every other row of x one number of 256, at least one, is 100 times as large); `extreme` (weights
    are -128, 127 or any other, evenly; some rows of x and of the weight are 0, and so are some
    scales); `nonfinite` (`normal` without zeros among the weights; a third of the rows of x has
    NaN, +inf or -inf once: such a row of y is NaN or infinite; a scale of 16 is NaN, and its column
    of y).
    """
    m, n, k = (int(case.dims[d]) for d in "MNK")
    dtype = getattr(torch, case.dtype)
    x = torch.empty((m, k), dtype=dtype, device=device).normal_(
        0.0, case.scale, generator=generator
    )
    scale = torch.rand(n, generator=generator, device=device).add_(0.5).div_(500.0).to(dtype)
    scale[torch.rand(n, generator=generator, device=device) < 1 / 2] *= -1
    if case.inputs in ("normal", "ranged", "nonfinite"):
        weight = torch.empty((n, k), device=device).normal_(0.0, 40.0, generator=generator)
        weight = weight.round_().clamp_(-127, 127).to(torch.int8)
    elif case.inputs == "extreme":
        weight = torch.randint(
            -128, 128, (n, k), generator=generator, device=device, dtype=torch.int8
        )
        kind = torch.randint(3, (n, k), generator=generator, device=device, dtype=torch.int8)
        weight.masked_fill_(kind == 0, -128).masked_fill_(kind == 1, 127)
        x.masked_fill_(draw_kinds(m, 8, generator, device) == 0, 0.0)
        weight.masked_fill_(draw_kinds(n, 16, generator, device) == 0, 0)
        scale.masked_fill_(draw_kinds(n, 16, generator, device)[:, 0] == 0, 0.0)
    else:
        raise ValueError(f"int8_linear knows no distribution {case.inputs!r}")
    if case.inputs == "ranged":
        powers = 5 if dtype == torch.float16 else 13
        scale.mul_(torch.exp2(-draw_kinds(1, powers, generator, device)[0].to(dtype)))
        few = torch.rand((m, k), generator=generator, device=device) < 1 / 256
        few |= torch.arange(k, device=device) == k // 2
        few &= draw_kinds(m, 2, generator, device) == 0
        x.mul_(torch.where(few, 100.0, 1.0).to(dtype))
        x.mul_(torch.exp2(-draw_kinds(m, powers, generator, device).to(dtype)))
    elif case.inputs == "nonfinite":
        weight.masked_fill_(weight == 0, 1)
        # No infinite scale: of a sum near 0 rounding decides the sign.
        scale.masked_fill_(draw_rows(n, 16, generator, device)[:, 0], torch.nan)
        at = torch.randint(k, (m, 1), generator=generator, device=device)
        broken, kind = draw_rows(m, 3, generator, device), draw_kinds(m, 3, generator, device)
        value = x.gather(1, at)
        for i, other in enumerate((torch.nan, torch.inf, -torch.inf)):
            value.masked_fill_(broken & (kind == i), other)
        x.scatter_(1, at, value)
    return {"x": x, "weight": weight, "scale": scale}


def reference(*, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The product of x and the transposed weight, times the scales, in float64, [M, N]."""
    y = torch.empty((x.shape[0], weight.shape[0]), dtype=torch.float64, device=x.device)
    wide = x.double()
    rows = max(1, CHUNK_ELEMENTS // weight.shape[1])
    for start in range(0, weight.shape[0], rows):
        part = weight[start : start + rows].double()
        y[:, start : start + rows] = wide @ part.T
    return y * scale


def eager(*, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The weight in x's dtype, which has it exactly; a product of torch; the scales: [M, N]."""
    return F.linear(x, weight.to(x.dtype)) * scale


def experts() -> Mapping[str, Callable[..., torch.Tensor]]:
    """Torch's own product with weights of 8 bits, which is there for 16-bit inputs."""

    def by_torch(*, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._weight_int8pack_mm(x, weight, scale)  # noqa: SLF001

    return {"weight_int8pack_mm": by_torch}
