"""Softmax over the last dimension: inputs, float64 reference, and what a user would call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kagent_sandbox.data.task import Case


def inputs(case: Case, generator: torch.Generator, device: torch.device) -> dict[str, torch.Tensor]:
    """Draw x: [M, N] in the case's dtype, times the case's scale.

    Distributions: `normal`; `masked` (a third of the entries, but never a whole row, is -inf).
    """
    shape = (int(case.dims["M"]), int(case.dims["N"]))
    if case.inputs not in ("normal", "masked"):
        raise ValueError(f"rows knows no distribution {case.inputs!r}")
    x = torch.randn(shape, generator=generator, device=device) * case.scale
    if case.inputs == "masked":
        masked = torch.rand(shape, generator=generator, device=device) < 1 / 3
        keep = torch.randint(shape[1], (shape[0], 1), generator=generator, device=device)
        x.masked_fill_(masked.scatter_(1, keep, value=False), -torch.inf)
    return {"x": x.to(getattr(torch, case.dtype))}


def reference(*, x: torch.Tensor) -> torch.Tensor:
    """Softmax in float64, [M, N]."""
    return torch.softmax(x.double(), -1)


def eager(*, x: torch.Tensor) -> torch.Tensor:
    """Torch's own kernel, [M, N] in x's dtype."""
    return torch.softmax(x, -1)


def experts() -> Mapping[str, Callable[..., torch.Tensor]]:
    """None: this task is there to judge candidates, not to be won."""
    return {}
