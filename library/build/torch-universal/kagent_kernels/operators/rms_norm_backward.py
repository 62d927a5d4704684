"""Gradients of RMS norm: of its input and of its weight.

    rms_norm_backward(grad: Tensor[M, N], x: Tensor[M, N], weight: Tensor[N], eps: float) ->
    (dx: Tensor[M, N], dweight: Tensor[N])

Made from the task rms_norm_backward.
Forward only: to ask for a gradient is an error. Autocast changes nothing here. What kernels were
not checked for is computed by the task's own way with torch.
"""

from __future__ import annotations

import torch
from torch import nn

from .._about import NAMESPACE
from .._library import LibraryOperator, holds, plain, wants_gradient, with_autograd
from . import _rms_norm_backward_reference as _task

__all__ = ["RmsNormBackward", "rms_norm_backward"]


def rms_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-06,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of RMS norm: of its input and of its weight.

    No gradient: to ask for one is an error (NotImplementedError). Calls with fewer elements than
    the smallest measured call (CARD.md: least size) use torch.

    Args:
        grad: [M, N].
        x: [M, N].
        weight: [N].
        eps: kernels were checked with 1e-06 alone.

    Returns:
        dx: [M, N].
        dweight: [N].
    """
    ours = plain(grad, x, weight) and (
        _operator.is_large(grad, x, weight)
        or wants_gradient(grad, x, weight)
    )
    if not ours:
        return _task.eager(
            grad=grad,
            x=x,
            weight=weight,
            eps=eps,
        )
    return _operator(grad, x, weight, eps)


class RmsNormBackward(nn.Module):
    """`rms_norm_backward` as a module, and as a layer for Hugging Face `kernels`."""

    can_torch_compile = True
    has_backward = False

    def forward(
        self,
        grad: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float = 1e-06,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `rms_norm_backward`."""
        return rms_norm_backward(grad, x, weight, eps)


LAYERS: dict[str, type[nn.Module]] = {"RmsNormBackward": RmsNormBackward}


# -- the operator ----------------------------------------------------------------------------------


def _reference(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
) -> object:
    found = with_autograd(
        _task.eager,
        grad=grad,
        x=x,
        weight=weight,
        eps=eps,
    )
    if not _fits(grad, x, weight, eps):
        return found
    dtype = grad.dtype
    dtypes = (dtype, dtype)
    return tuple(r.to(d) for r, d in zip(found, dtypes, strict=True))


def _fake(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
) -> object:
    if not _fits(grad, x, weight, eps):
        return _operator.by_reference(grad, x, weight, eps)
    dtype = grad.dtype
    M = grad.shape[0]
    N = grad.shape[1]
    return (
        grad.new_empty((M, N), dtype=dtype),
        grad.new_empty((N,), dtype=dtype),
    )


def _fits(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
) -> bool:
    """Whether dtypes, ranks and sizes are the task's, so that results are as it declares them."""
    if (grad.dim(), x.dim(), weight.dim()) != (2, 2, 1):
        return False
    dtype = grad.dtype
    M = grad.shape[0]
    N = grad.shape[1]
    return holds(
        grad.dtype in {torch.bfloat16, torch.float16, torch.float32},
        x.shape[0] == M,
        x.shape[1] == N,
        x.dtype == dtype,
        weight.shape[0] == N,
        weight.dtype == dtype,
    )


def _dims(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
) -> dict[str, int | float | bool] | None:
    if (grad.dim(), x.dim(), weight.dim()) != (2, 2, 1):
        return None
    dtype = grad.dtype
    M = grad.shape[0]
    N = grad.shape[1]
    fits = (
        x.shape[0] == M
        and x.shape[1] == N
        and x.dtype == dtype
        and weight.shape[0] == N
        and weight.dtype == dtype
        and eps == 1e-06
    )
    if not fits:
        return None
    return {"M": M, "N": N}


_operator = LibraryOperator(
    "rms_norm_backward",
    "(Tensor grad, Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    namespace=NAMESPACE,
    reference=_reference,
    fake=_fake,
    dims=_dims,
)
