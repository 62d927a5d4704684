"""Linear layer with weights of 8 bits and a scale for each output, for few tokens.

    int8_linear(x: Tensor[M, K], weight: Tensor[N, K] int8, scale: Tensor[N]) -> Tensor[M, N]

Made from the task int8_linear.
Forward only: to ask for a gradient is an error. Autocast changes nothing here. What kernels were
not checked for is computed by the task's own way with torch.
"""

from __future__ import annotations

import torch
from torch import nn

from .._about import NAMESPACE
from .._library import LibraryOperator, holds, plain, wants_gradient, with_autograd
from . import _int8_linear_reference as _task

__all__ = ["Int8Linear", "int8_linear"]


def int8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
) -> torch.Tensor:
    """Linear layer with weights of 8 bits and a scale for each output, for few tokens.

    No gradient: to ask for one is an error (NotImplementedError). Calls with fewer elements than
    the smallest measured call (CARD.md: least size) use torch.

    Args:
        x: [M, K].
        weight: [N, K], int8.
        scale: [N].

    Returns:
        y: [M, N].
    """
    ours = plain(x, weight, scale) and (
        _operator.is_large(x, weight, scale)
        or wants_gradient(x, weight, scale)
    )
    if not ours:
        return _task.eager(
            x=x,
            weight=weight,
            scale=scale,
        )
    return _operator(x, weight, scale)


class Int8Linear(nn.Module):
    """`int8_linear` as a module, and as a layer for Hugging Face `kernels`."""

    can_torch_compile = True
    has_backward = False

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
    ) -> torch.Tensor:
        """See `int8_linear`."""
        return int8_linear(x, weight, scale)


LAYERS: dict[str, type[nn.Module]] = {"Int8Linear": Int8Linear}


# -- the operator ----------------------------------------------------------------------------------


def _reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
) -> object:
    found = with_autograd(
        _task.eager,
        x=x,
        weight=weight,
        scale=scale,
    )
    (found,) = found if isinstance(found, tuple) else (found,)
    if not _fits(x, weight, scale):
        return found
    dtype = x.dtype
    return found.to(dtype)


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
) -> object:
    if not _fits(x, weight, scale):
        return _operator.by_reference(x, weight, scale)
    dtype = x.dtype
    M = x.shape[0]
    N = weight.shape[0]
    K = x.shape[1]
    return x.new_empty((M, N), dtype=dtype)


def _fits(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
) -> bool:
    """Whether dtypes, ranks and sizes are the task's, so that results are as it declares them."""
    if (x.dim(), weight.dim(), scale.dim()) != (2, 2, 1):
        return False
    dtype = x.dtype
    N = weight.shape[0]
    K = x.shape[1]
    return holds(
        x.dtype in {torch.bfloat16, torch.float16, torch.float32},
        weight.shape[1] == K,
        weight.dtype == torch.int8,
        scale.shape[0] == N,
        scale.dtype == dtype,
    )


def _dims(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
) -> dict[str, int | float | bool] | None:
    if (x.dim(), weight.dim(), scale.dim()) != (2, 2, 1):
        return None
    dtype = x.dtype
    M = x.shape[0]
    N = weight.shape[0]
    K = x.shape[1]
    fits = (
        weight.shape[1] == K
        and weight.dtype == torch.int8
        and scale.shape[0] == N
        and scale.dtype == dtype
    )
    if not fits:
        return None
    return {"M": M, "N": N, "K": K}


_operator = LibraryOperator(
    "int8_linear",
    "(Tensor x, Tensor weight, Tensor scale) -> Tensor",
    namespace=NAMESPACE,
    reference=_reference,
    fake=_fake,
    dims=_dims,
)
