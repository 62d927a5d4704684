"""A step of AdamW in place: parameters and both moments, element by element.

    adamw(param: Tensor[M, N], grad: Tensor[M, N], exp_avg: Tensor[M, N] float32, exp_avg_sq:
    Tensor[M, N] float32, lr: Tensor[] float32, step: Tensor[] float32, beta1: float, beta2:
    float, eps: float, weight_decay: float) -> None

Made from the task adamw.
Forward only: to ask for a gradient is an error. Autocast changes nothing here. What kernels were
not checked for is computed by the task's own way with torch.
"""

from __future__ import annotations

import torch
from torch import nn

from .._about import NAMESPACE
from .._library import LibraryOperator, plain, wants_gradient, with_autograd
from . import _adamw_reference as _task

__all__ = ["Adamw", "adamw"]


def adamw(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    lr: torch.Tensor,
    step: torch.Tensor,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-08,
    weight_decay: float = 0.1,
) -> None:
    """A step of AdamW in place: parameters and both moments, element by element.

    No gradient: to ask for one is an error (NotImplementedError). Calls with fewer elements than
    the smallest measured call (CARD.md: least size) use torch.

    Args:
        param: [M, N], written to.
        grad: [M, N].
        exp_avg: [M, N], float32, written to.
        exp_avg_sq: [M, N], float32, written to.
        lr: [], float32.
        step: [], float32.
        beta1: kernels were checked with 0.9 alone.
        beta2: kernels were checked with 0.999 alone.
        eps: kernels were checked with 1e-08 alone.
        weight_decay: kernels were checked with 0.1 alone.

    """
    if wants_gradient(param, grad, exp_avg, exp_avg_sq, lr, step):
        raise NotImplementedError("adamw has no gradient: call it under torch.no_grad()")
    ours = plain(param, grad, exp_avg, exp_avg_sq, lr, step) and (
        _operator.is_large(param, grad, exp_avg, exp_avg_sq, lr, step)
        or wants_gradient(param, grad, exp_avg, exp_avg_sq, lr, step)
    )
    if not ours:
        return _task.eager(
            param=param,
            grad=grad,
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq,
            lr=lr,
            step=step,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            weight_decay=weight_decay,
        )
    return _operator(param, grad, exp_avg, exp_avg_sq, lr, step, beta1, beta2, eps, weight_decay)


class Adamw(nn.Module):
    """`adamw` as a module, and as a layer for Hugging Face `kernels`."""

    can_torch_compile = True
    has_backward = False

    def forward(
        self,
        param: torch.Tensor,
        grad: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        lr: torch.Tensor,
        step: torch.Tensor,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-08,
        weight_decay: float = 0.1,
    ) -> None:
        """See `adamw`."""
        return adamw(param, grad, exp_avg, exp_avg_sq, lr, step, beta1, beta2, eps, weight_decay)


LAYERS: dict[str, type[nn.Module]] = {"Adamw": Adamw}


# -- the operator ----------------------------------------------------------------------------------


def _reference(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    lr: torch.Tensor,
    step: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> object:
    found = with_autograd(
        _task.eager,
        param=param,
        grad=grad,
        exp_avg=exp_avg,
        exp_avg_sq=exp_avg_sq,
        lr=lr,
        step=step,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
    )
    return found


def _fake(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    lr: torch.Tensor,
    step: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> object:
    dtype = param.dtype
    M = param.shape[0]
    N = param.shape[1]
    return None


def _dims(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    lr: torch.Tensor,
    step: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> dict[str, int | float | bool] | None:
    if (param.dim(), grad.dim(), exp_avg.dim(), exp_avg_sq.dim(), lr.dim(), step.dim()) != (2, 2, 2, 2, 0, 0):
        return None
    dtype = param.dtype
    M = param.shape[0]
    N = param.shape[1]
    fits = (
        grad.shape[0] == M
        and grad.shape[1] == N
        and grad.dtype == dtype
        and exp_avg.shape[0] == M
        and exp_avg.shape[1] == N
        and exp_avg.dtype == torch.float32
        and exp_avg_sq.shape[0] == M
        and exp_avg_sq.shape[1] == N
        and exp_avg_sq.dtype == torch.float32
        and lr.dtype == torch.float32
        and step.dtype == torch.float32
        and beta1 == 0.9
        and beta2 == 0.999
        and eps == 1e-08
        and weight_decay == 0.1
    )
    if not fits:
        return None
    return {"M": M, "N": N}


_operator = LibraryOperator(
    "adamw",
    "(Tensor(a0!) param, Tensor grad, Tensor(a2!) exp_avg, Tensor(a3!) exp_avg_sq, Tensor lr, Tensor step, float beta1, float beta2, float eps, float weight_decay) -> ()",
    namespace=NAMESPACE,
    reference=_reference,
    fake=_fake,
    dims=_dims,
)
