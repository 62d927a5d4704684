"""Gradient of softmax over the last dimension of a matrix, from its result.

    softmax_backward(grad: Tensor[M, N], y: Tensor[M, N]) -> Tensor[M, N]

Made from the task softmax_backward.
Forward only: to ask for a gradient is an error. Autocast changes nothing here. What kernels were
not checked for is computed by the task's own way with torch.
"""

from __future__ import annotations

import torch
from torch import nn

from .._about import NAMESPACE
from .._library import LibraryOperator, holds, plain, wants_gradient, with_autograd
from . import _softmax_backward_reference as _task

__all__ = ["SoftmaxBackward", "softmax_backward"]


def softmax_backward(
    grad: torch.Tensor,
    y: torch.Tensor,
) -> torch.Tensor:
    """Gradient of softmax over the last dimension of a matrix, from its result.

    No gradient: to ask for one is an error (NotImplementedError). Calls with fewer elements than
    the smallest measured call (CARD.md: least size) use torch.

    Args:
        grad: [M, N].
        y: [M, N].

    Returns:
        dx: [M, N].
    """
    ours = plain(grad, y) and (
        _operator.is_large(grad, y)
        or wants_gradient(grad, y)
    )
    if not ours:
        return _task.eager(
            grad=grad,
            y=y,
        )
    return _operator(grad, y)


class SoftmaxBackward(nn.Module):
    """`softmax_backward` as a module, and as a layer for Hugging Face `kernels`."""

    can_torch_compile = True
    has_backward = False

    def forward(
        self,
        grad: torch.Tensor,
        y: torch.Tensor,
    ) -> torch.Tensor:
        """See `softmax_backward`."""
        return softmax_backward(grad, y)


LAYERS: dict[str, type[nn.Module]] = {"SoftmaxBackward": SoftmaxBackward}


# -- the operator ----------------------------------------------------------------------------------


def _reference(
    grad: torch.Tensor,
    y: torch.Tensor,
) -> object:
    found = with_autograd(
        _task.eager,
        grad=grad,
        y=y,
    )
    (found,) = found if isinstance(found, tuple) else (found,)
    if not _fits(grad, y):
        return found
    dtype = grad.dtype
    return found.to(dtype)


def _fake(
    grad: torch.Tensor,
    y: torch.Tensor,
) -> object:
    if not _fits(grad, y):
        return _operator.by_reference(grad, y)
    dtype = grad.dtype
    M = grad.shape[0]
    N = grad.shape[1]
    return grad.new_empty((M, N), dtype=dtype)


def _fits(
    grad: torch.Tensor,
    y: torch.Tensor,
) -> bool:
    """Whether dtypes, ranks and sizes are the task's, so that results are as it declares them."""
    if (grad.dim(), y.dim()) != (2, 2):
        return False
    dtype = grad.dtype
    M = grad.shape[0]
    N = grad.shape[1]
    return holds(
        grad.dtype in {torch.bfloat16, torch.float16, torch.float32},
        y.shape[0] == M,
        y.shape[1] == N,
        y.dtype == dtype,
    )


def _dims(
    grad: torch.Tensor,
    y: torch.Tensor,
) -> dict[str, int | float | bool] | None:
    if (grad.dim(), y.dim()) != (2, 2):
        return None
    dtype = grad.dtype
    M = grad.shape[0]
    N = grad.shape[1]
    fits = (
        y.shape[0] == M
        and y.shape[1] == N
        and y.dtype == dtype
    )
    if not fits:
        return None
    return {"M": M, "N": N}


_operator = LibraryOperator(
    "softmax_backward",
    "(Tensor grad, Tensor y) -> Tensor",
    namespace=NAMESPACE,
    reference=_reference,
    fake=_fake,
    dims=_dims,
)
