"""Linear layer of 8-bit floating-point numbers (e4m3) with a scale for each operand.

    fp8_linear(x: Tensor[M, K] float8_e4m3fn, weight: Tensor[N, K] float8_e4m3fn, scale_x:
    Tensor[] float32, scale_weight: Tensor[] float32) -> Tensor[M, N] bfloat16

Made from the task fp8_linear.
Forward only: to ask for a gradient is an error. Autocast changes nothing here. What kernels were
not checked for is computed by the task's own way with torch.
"""

from __future__ import annotations

import torch
from torch import nn

from .._about import NAMESPACE
from .._library import LibraryOperator, holds, plain, wants_gradient, with_autograd
from . import _fp8_linear_reference as _task

__all__ = ["Fp8Linear", "fp8_linear"]


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale_x: torch.Tensor,
    scale_weight: torch.Tensor,
) -> torch.Tensor:
    """Linear layer of 8-bit floating-point numbers (e4m3) with a scale for each operand.

    No gradient: to ask for one is an error (NotImplementedError). Calls with fewer elements than
    the smallest measured call (CARD.md: least size) use torch.

    Args:
        x: [M, K], float8_e4m3fn.
        weight: [N, K], float8_e4m3fn.
        scale_x: [], float32.
        scale_weight: [], float32.

    Returns:
        y: [M, N].
    """
    ours = plain(x, weight, scale_x, scale_weight) and (
        _operator.is_large(x, weight, scale_x, scale_weight)
        or wants_gradient(x, weight, scale_x, scale_weight)
    )
    if not ours:
        return _task.eager(
            x=x,
            weight=weight,
            scale_x=scale_x,
            scale_weight=scale_weight,
        )
    return _operator(x, weight, scale_x, scale_weight)


class Fp8Linear(nn.Module):
    """`fp8_linear` as a module, and as a layer for Hugging Face `kernels`."""

    can_torch_compile = True
    has_backward = False

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        scale_x: torch.Tensor,
        scale_weight: torch.Tensor,
    ) -> torch.Tensor:
        """See `fp8_linear`."""
        return fp8_linear(x, weight, scale_x, scale_weight)


LAYERS: dict[str, type[nn.Module]] = {"Fp8Linear": Fp8Linear}


# -- the operator ----------------------------------------------------------------------------------


def _reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale_x: torch.Tensor,
    scale_weight: torch.Tensor,
) -> object:
    found = with_autograd(
        _task.eager,
        x=x,
        weight=weight,
        scale_x=scale_x,
        scale_weight=scale_weight,
    )
    (found,) = found if isinstance(found, tuple) else (found,)
    if not _fits(x, weight, scale_x, scale_weight):
        return found
    dtype = torch.bfloat16
    return found.to(torch.bfloat16)


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale_x: torch.Tensor,
    scale_weight: torch.Tensor,
) -> object:
    if not _fits(x, weight, scale_x, scale_weight):
        return _operator.by_reference(x, weight, scale_x, scale_weight)
    dtype = torch.bfloat16
    M = x.shape[0]
    N = weight.shape[0]
    K = x.shape[1]
    return x.new_empty((M, N), dtype=torch.bfloat16)


def _fits(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale_x: torch.Tensor,
    scale_weight: torch.Tensor,
) -> bool:
    """Whether dtypes, ranks and sizes are the task's, so that results are as it declares them."""
    if (x.dim(), weight.dim(), scale_x.dim(), scale_weight.dim()) != (2, 2, 0, 0):
        return False
    K = x.shape[1]
    return holds(
        x.dtype == torch.float8_e4m3fn,
        weight.shape[1] == K,
        weight.dtype == torch.float8_e4m3fn,
        scale_x.dtype == torch.float32,
        scale_weight.dtype == torch.float32,
    )


def _dims(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale_x: torch.Tensor,
    scale_weight: torch.Tensor,
) -> dict[str, int | float | bool] | None:
    if (x.dim(), weight.dim(), scale_x.dim(), scale_weight.dim()) != (2, 2, 0, 0):
        return None
    dtype = torch.bfloat16
    M = x.shape[0]
    N = weight.shape[0]
    K = x.shape[1]
    fits = (
        x.dtype == torch.float8_e4m3fn
        and weight.shape[1] == K
        and weight.dtype == torch.float8_e4m3fn
        and scale_x.dtype == torch.float32
        and scale_weight.dtype == torch.float32
        and (K % 16 == 0)
    )
    if not fits:
        return None
    return {"M": M, "N": N, "K": K}


_operator = LibraryOperator(
    "fp8_linear",
    "(Tensor x, Tensor weight, Tensor scale_x, Tensor scale_weight) -> Tensor",
    namespace=NAMESPACE,
    reference=_reference,
    fake=_fake,
    dims=_dims,
)
