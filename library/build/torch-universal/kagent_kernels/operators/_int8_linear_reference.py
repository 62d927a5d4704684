"""Linear layer with weights of 8 bits: inputs, float64 reference, and what a user would call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


CHUNK_ELEMENTS = 1 << 26  # float64 copies of the weight stay near 512 MiB


def inputs(case: Case, generator: torch.Generator, device: torch.device) -> dict[str, torch.Tensor]:
    """Draw x: [M, K], times the case's scale; weight: [N, K] int8; and scale: [N], about 1/500.

    Distributions: `normal` (weights are normal, rounded, from -127 to 127); `extreme` (weights are
    -128, 127 or any other, evenly; some rows of x are 0); `nonfinite` (`normal` without
    zeros among the weights; a third of the rows of x has NaN, +inf or -inf once: such a row of y is
    NaN or infinite).
    """
    m, n, k = (int(case.dims[d]) for d in "MNK")
    dtype = getattr(torch, case.dtype)
    x = torch.empty((m, k), dtype=dtype, device=device).normal_(
        0.0, case.scale, generator=generator
    )
    scale = torch.rand(n, generator=generator, device=device).add_(0.5).div_(500.0).to(dtype)
    if case.inputs in ("normal", "nonfinite"):
        weight = torch.empty((n, k), device=device).normal_(0.0, 40.0, generator=generator)
        weight = weight.round_().clamp_(-127, 127).to(torch.int8)
    elif case.inputs == "extreme":
        weight = torch.randint(
            -128, 128, (n, k), generator=generator, device=device, dtype=torch.int8
        )
        kind = torch.randint(3, (n, k), generator=generator, device=device, dtype=torch.int8)
        weight.masked_fill_(kind == 0, -128).masked_fill_(kind == 1, 127)
        x.masked_fill_(draw_kinds(m, 8, generator, device) == 0, 0.0)
    else:
        raise ValueError(f"int8_linear knows no distribution {case.inputs!r}")
    if case.inputs == "nonfinite":
        weight.masked_fill_(weight == 0, 1)
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
