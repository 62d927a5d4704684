"""Matrix product: inputs, float64 reference, and what a user would call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kagent_sandbox.data.task import Case


def inputs(case: Case, generator: torch.Generator, device: torch.device) -> dict[str, torch.Tensor]:
    """Draw x: [M, K] and w: [K, N], normal, in the case's dtype."""
    m, k, n = (int(case.dims[d]) for d in ("M", "K", "N"))
    dtype = getattr(torch, case.dtype)
    x = torch.randn((m, k), generator=generator, device=device) * case.scale
    w = torch.randn((k, n), generator=generator, device=device)
    return {"x": x.to(dtype), "w": w.to(dtype)}


def reference(*, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The product in float64, [M, N]."""
    return x.double() @ w.double()


def eager(*, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Torch's own product, [M, N] in the case's dtype."""
    return x @ w


def experts() -> Mapping[str, Callable[..., torch.Tensor]]:
    """None: this task is there to judge candidates, not to be won."""
    return {}
