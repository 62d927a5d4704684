"""Softmax over the last dimension: inputs, float64 reference, and what a user would call."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kagent_sandbox.task import Case

CHUNK_ELEMENTS = 1 << 26  # float64 temporaries of the reference stay near 2 GiB


def inputs(case: Case, generator: torch.Generator, device: torch.device) -> dict[str, torch.Tensor]:
    """Draw x: [M, N] in the case's dtype, times the case's scale.

    Distributions: `normal`; `constant` (each row one value); `ramp` (rising along the row, so that
    the maximum comes last); `masked` (a third of the entries, but never a whole row, is -inf);
    `spiked` (in two rows of three, two entries are raised by 100 and one by 200: too much to
    exponentiate unshifted, or relative to a maximum that misses the one, which is often the first
    or the last).
    """
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
        x.scatter_add_(1, at, raised)
    x = (x * case.scale).to(dtype)
    if case.inputs == "masked":
        masked = torch.rand(shape, generator=generator, device=device) < 1 / 3
        keep = torch.randint(columns, (rows, 1), generator=generator, device=device)
        x.masked_fill_(masked.scatter_(1, keep, value=False), -torch.inf)
    return {"x": x.contiguous()}


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
