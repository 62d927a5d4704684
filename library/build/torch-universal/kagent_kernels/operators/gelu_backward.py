"""Gradient of GELU in its tanh form, element by element.

    gelu_backward(grad: Tensor[M, N], x: Tensor[M, N]) -> Tensor[M, N]

Made from the task gelu_backward.
Forward only: to ask for a gradient is an error. Autocast changes nothing here. What kernels were
not checked for is computed by the task's own way with torch.
"""

from __future__ import annotations

import torch
from torch import nn

from .._about import NAMESPACE
from .._library import LibraryOperator, holds, plain, wants_gradient, with_autograd
from . import _gelu_backward_reference as _task

__all__ = ["GeluBackward", "gelu_backward"]


def gelu_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
) -> torch.Tensor:
    """Gradient of GELU in its tanh form, element by element.

    No gradient: to ask for one is an error (NotImplementedError). Calls with fewer elements than
    the smallest measured call (CARD.md: least size) use torch.

    Args:
        grad: [M, N].
        x: [M, N].

    Returns:
        dx: [M, N].
    """
    ours = plain(grad, x) and (
        _operator.is_large(grad, x)
        or wants_gradient(grad, x)
    )
    if not ours:
        return _task.eager(
            grad=grad,
            x=x,
        )
    return _operator(grad, x)


class GeluBackward(nn.Module):
    """`gelu_backward` as a module, and as a layer for Hugging Face `kernels`."""

    can_torch_compile = True
    has_backward = False

    def forward(
        self,
        grad: torch.Tensor,
        x: torch.Tensor,
    ) -> torch.Tensor:
        """See `gelu_backward`."""
        return gelu_backward(grad, x)


LAYERS: dict[str, type[nn.Module]] = {"GeluBackward": GeluBackward}


# -- the operator ----------------------------------------------------------------------------------


def _reference(
    grad: torch.Tensor,
    x: torch.Tensor,
) -> object:
    found = with_autograd(
        _task.eager,
        grad=grad,
        x=x,
    )
    (found,) = found if isinstance(found, tuple) else (found,)
    if not _fits(grad, x):
        return found
    dtype = grad.dtype
    return found.to(dtype)


def _fake(
    grad: torch.Tensor,
    x: torch.Tensor,
) -> object:
    if not _fits(grad, x):
        return _operator.by_reference(grad, x)
    dtype = grad.dtype
    M = grad.shape[0]
    N = grad.shape[1]
    return grad.new_empty((M, N), dtype=dtype)


def _fits(
    grad: torch.Tensor,
    x: torch.Tensor,
) -> bool:
    """Whether dtypes, ranks and sizes are the task's, so that results are as it declares them."""
    if (grad.dim(), x.dim()) != (2, 2):
        return False
    dtype = grad.dtype
    M = grad.shape[0]
    N = grad.shape[1]
    return holds(
        grad.dtype in {torch.bfloat16, torch.float16, torch.float32},
        x.shape[0] == M,
        x.shape[1] == N,
        x.dtype == dtype,
    )


def _dims(
    grad: torch.Tensor,
    x: torch.Tensor,
) -> dict[str, int | float | bool] | None:
    if (grad.dim(), x.dim()) != (2, 2):
        return None
    dtype = grad.dtype
    M = grad.shape[0]
    N = grad.shape[1]
    fits = (
        x.shape[0] == M
        and x.shape[1] == N
        and x.dtype == dtype
    )
    if not fits:
        return None
    return {"M": M, "N": N}


_operator = LibraryOperator(
    "gelu_backward",
    "(Tensor grad, Tensor x) -> Tensor",
    namespace=NAMESPACE,
    reference=_reference,
    fake=_fake,
    dims=_dims,
)
