"""Softmax over the last dimension: inputs, float64 reference, and what a user would call."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from kagent_sandbox.draws import draw_huge

if TYPE_CHECKING:
    from kagent_sandbox.data.task import Case

CHUNK_ELEMENTS = 1 << 26  # float64 temporaries of the reference stay near 2 GiB


def inputs(case: Case, generator: torch.Generator, device: torch.device) -> dict[str, torch.Tensor]:
    """Draw x: [M, N] in the case's dtype, times the case's scale.

    Distributions: `normal`; `constant` (each row one value); `ramp` (rising along the row, so that
    the maximum comes last); `masked` (a third of the entries, but never a whole row, is -inf);
    `spiked` (in two rows of three, two entries are raised by 100 and one by 200: too much to
    exponentiate unshifted, or relative to a maximum that misses the one, which is often the first
    or the last). `mixed` gives each row a kind of its own, in equal numbers: normal, masked,
    spiked, constant, rising or falling; -inf before and after a window, or in every other block;
    the same with -1e4, -1e9 or the least finite value for -inf; every value such a one; few values,
    many of them the maximum; subnormal numbers; 200 more or less than normal; numbers up to the
    largest. `nonfinite` also has rows with +inf or NaN somewhere, and rows of -inf: the result is
    NaN in all of such a row.
    """
    if case.inputs in ("mixed", "nonfinite"):
        return {"x": _mixed(case, generator, device)}
    rows, columns = int(case.dims["M"]), int(case.dims["N"])
    shape = (rows, columns)
    dtype = getattr(torch, case.dtype)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=torch.float32)

    if case.inputs == "normal":  # in one pass: every timed execution has such inputs of its own
        x = torch.empty(shape, dtype=dtype, device=device)
        return {"x": x.normal_(0.0, case.scale, generator=generator)}
    if case.inputs == "constant":
        x = normal(rows, 1).expand(shape)
    elif case.inputs == "ramp":
        x = torch.linspace(-4, 4, columns, device=device) + 0.1 * normal(*shape)
    elif case.inputs in ("masked", "spiked"):
        x = normal(*shape)
    else:
        raise ValueError(f"softmax knows no distribution {case.inputs!r}")
    if case.inputs == "spiked":
        at = torch.randint(columns, (rows, 3), generator=generator, device=device)
        at[::4, 0] = 0
        at[1::4, 0] = columns - 1
        raised = torch.tensor([200.0, 100.0, 100.0], device=device).repeat(rows, 1)
        raised[2::3] = 0.0  # rows that a neighbour's maximum would sink
        x += torch.zeros_like(x).scatter_add_(
            1, at, raised
        )  # whole numbers: any order of additions gives the same
    x = (x * case.scale).to(dtype)
    if case.inputs == "masked":
        masked = torch.rand(shape, generator=generator, device=device) < 1 / 3
        keep = torch.randint(columns, (rows, 1), generator=generator, device=device)
        x.masked_fill_(masked.scatter_(1, keep, value=False), -torch.inf)
    return {"x": x.contiguous()}


KINDS = (
    *("normal", "masked", "spiked", "constant", "rising", "falling", "window", "blocks"),
    *("finite window", "finite blocks", "sunk", "ties", "subnormal", "high", "low"),
    "huge",
)
NONFINITE = ("inf", "nan", "all -inf")


def _mixed(case: Case, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    """Rows of all kinds, in random order."""
    rows, columns = int(case.dims["M"]), int(case.dims["N"])
    dtype = getattr(torch, case.dtype)
    limits = torch.finfo(dtype)
    first = int(torch.randint(len(KINDS), (), generator=generator, device=device))
    kinds = KINDS[first:] + KINDS[:first]
    if case.inputs == "nonfinite":  # one of them at least, in however few rows
        odd = first % len(NONFINITE)
        kinds = (NONFINITE[odd], *kinds, *NONFINITE[:odd], *NONFINITE[odd + 1 :])
    order = torch.randperm(rows, generator=generator, device=device)
    x = torch.randn((rows, columns), generator=generator, device=device).mul_(case.scale)
    column = torch.arange(columns, device=device)

    def whole(most: int, *size: int) -> torch.Tensor:
        return torch.randint(most, size, generator=generator, device=device)

    for i, kind in enumerate(kinds[:rows]):
        at = order[i :: len(kinds)]
        n = len(at)
        some = x[at]
        hidden = torch.zeros_like(some, dtype=torch.bool)
        if kind == "masked":
            hidden = torch.rand(some.shape, generator=generator, device=device) < 1 / 3
        elif kind == "spiked":
            raised = torch.tensor([200.0, 100.0, 100.0], device=device).repeat(n, 1)
            at_random = whole(columns, n, 3)  # whole numbers: any order of additions gives the same
            some += torch.zeros_like(some).scatter_add_(1, at_random, raised)
        elif kind == "constant":
            some = some[:, :1].expand(-1, columns)
        elif kind in ("rising", "falling"):
            ramp = torch.linspace(-20, 20, columns, device=device)
            some = some / max(1.0, case.scale) + (ramp if kind == "rising" else -ramp)
        elif kind.endswith("window"):
            ends = whole(columns, n, 2).sort(1).values
            hidden = (column < ends[:, :1]) | (column > ends[:, 1:])
        elif kind.endswith("blocks"):
            hidden = (column // (16 << whole(9, n, 1)) + whole(2, n, 1)) % 2 == 0
        elif kind in ("high", "low"):
            some += 200.0 if kind == "high" else -200.0
        elif kind == "ties":
            some = whole(3, n, columns).float()
        elif kind == "subnormal":
            some = whole(1000, n, columns) * limits.smallest_normal / 1024
        elif kind == "huge":
            some = draw_huge((n, columns), limits.max, dtype, generator, device).float()
        hidden.scatter_(1, whole(columns, n, 1), value=False)
        if kind in NONFINITE:
            some.scatter_(1, whole(columns, n, 1), torch.nan if kind == "nan" else torch.inf)
        if kind == "all -inf":
            some.fill_(-torch.inf)
        lows = torch.tensor([-1e4, -1e9, limits.min], device=device).clamp_min_(limits.min)
        low = lows[whole(3, n, 1)] if kind in ("finite window", "finite blocks", "sunk") else None
        if kind == "sunk":
            some = lows[whole(3, n, 1)].expand(-1, columns)
        x[at] = some.where(~hidden, -torch.inf if low is None else low)
    return x.to(dtype)


def reference(*, x: torch.Tensor) -> torch.Tensor:
    """Softmax in float64, [M, N], a chunk of rows at a time."""
    y = torch.empty(x.shape, dtype=torch.float64, device=x.device)
    rows = max(1, CHUNK_ELEMENTS // x.shape[1])
    for source, result in zip(x.split(rows), y.split(rows), strict=True):
        torch.softmax(source.double(), -1, out=result)
    return y


def reference_rows(rows: tuple[torch.Tensor], *, x: torch.Tensor) -> torch.Tensor:
    """What `reference` has in some rows, [R, N] float64; `rows` are their numbers, [R] int64."""
    return reference(x=x[rows[0]])


def eager(*, x: torch.Tensor) -> torch.Tensor:
    """Torch's own kernel, [M, N] in x's dtype."""
    return torch.softmax(x, -1)


def experts() -> Mapping[str, Callable[..., torch.Tensor]]:
    """Liger and Quack, where they can be imported. Liger refuses rows of 131072."""
    found: dict[str, Callable[..., torch.Tensor]] = {}
    try:
        liger = importlib.import_module("liger_kernel.ops.softmax").LigerSoftmaxFunction
        found["liger"] = lambda *, x: liger.apply(x)
    except ImportError:
        pass
    try:
        quack = importlib.import_module("quack.softmax").softmax
        found["quack"] = lambda *, x: quack(x)
    except ImportError:
        pass
    return found
