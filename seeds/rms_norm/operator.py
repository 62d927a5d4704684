"""RMS norm, as PyTorch users call it.

    y = rms_norm(x, weight)      # torch.nn.functional.rms_norm(x, x.shape[-1:], weight, 1e-6)
    layer = RMSNorm(4096)        # torch.nn.RMSNorm(4096, eps=1e-6)

Any shape; the last dimension is normalised. Kernels have eps = 1e-6: another one goes to torch, and
so do a weight of another dtype and calls under autocast. The gradients are taken by kernels of the
task rms_norm_backward where the library has some (`rms_norm_backward(grad: [M, N], x: [M, N],
weight: [N], eps) -> (dx: [M, N], dweight: [N])`), else by torch.
"""

# ruff: noqa: ARG001 - what torch calls has the parameters that torch passes

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .._about import NAMESPACE
from .._library import LibraryOperator, autocast_dtype, available, plain, rows

__all__ = ["RMSNorm", "rms_norm"]

_EPS = 1e-6  # the task's


def rms_norm(
    input: torch.Tensor,  # noqa: A002 - torch's name
    weight: torch.Tensor,
    eps: float = _EPS,
) -> torch.Tensor:
    """Divide rows by their root mean square, and multiply them by a weight.

    Args:
        input: Any shape. Tensors of a subclass and sparse ones go to torch's own function.
        weight: Of the last dimension's size.
        eps: Is added to the mean square.

    Returns:
        The same shape and dtype, contiguous.
    """
    ours = (
        plain(input, weight)
        and _rms_norm.is_large(input, weight)
        and input.numel() > 0
        and input.dtype is weight.dtype
        and input.shape[-1:] == weight.shape
        and autocast_dtype(input) is None
    )
    if not ours:
        return F.rms_norm(input, input.shape[-1:], weight, eps)
    if input.dim() == 2:
        return _rms_norm(input, weight, eps)
    return _rms_norm(rows(input), weight, eps).view(input.shape)


class RMSNorm(nn.Module):
    """`rms_norm` as a module.

    Args:
        dim: The last dimension's size.
        eps: Is added to the mean square.
        device: Of the weight.
        dtype: Of the weight.
    """

    def __init__(
        self,
        dim: int,
        eps: float = _EPS,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype))

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """See `rms_norm`."""
        return rms_norm(input, self.weight, self.eps)

    def extra_repr(self) -> str:
        """As torch.nn.RMSNorm."""
        return f"{self.weight.shape[0]}, eps={self.eps}"


# -- the operator ----------------------------------------------------------------------------------


def _reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def _fake(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _dims(x: torch.Tensor, weight: torch.Tensor, eps: float) -> dict[str, int] | None:
    fits = x.dim() == 2 and weight.shape == x.shape[1:] and weight.dtype is x.dtype
    return {"M": x.shape[0], "N": x.shape[1]} if fits and eps == _EPS else None


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.eps = inputs[2]


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    x, weight = ctx.saved_tensors
    # What torch computes has a second derivative.
    torchs = _gradient is None or torch.is_grad_enabled()
    dx, dweight = (_gradient_reference if torchs else _gradient)(grad, x, weight, ctx.eps)
    return dx, dweight, None


def _gradient_reference(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed, weighted = wide * scale, grad * weight.to(wide.dtype)
    dx = scale * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
    return dx.to(x.dtype), (grad * normed).sum(0).to(weight.dtype)


def _gradient_fake(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(weight)


def _gradient_dims(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> dict[str, int] | None:
    return _dims(x, weight, eps) if (grad.shape, grad.dtype) == (x.shape, x.dtype) else None


_rms_norm = LibraryOperator(
    "rms_norm",
    "(Tensor x, Tensor weight, float eps) -> Tensor",
    namespace=NAMESPACE,
    reference=_reference,
    fake=_fake,
    dims=_dims,
    setup_context=_setup_context,
    backward=_backward,
)

_gradient = (
    LibraryOperator(
        "rms_norm_gradient",
        "(Tensor grad, Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
        namespace=NAMESPACE,
        task="rms_norm_backward",
        reference=_gradient_reference,
        fake=_gradient_fake,
        dims=_gradient_dims,
    )
    if available("rms_norm_backward")
    else None
)


# -- layers for Hugging Face `kernels` -------------------------------------------------------------


class _RMSNorm(nn.Module):
    """For the RMS norms of transformers, which have a weight and `variance_epsilon`."""

    can_torch_compile = True

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)


LAYERS: dict[str, type[nn.Module]] = {"RMSNorm": _RMSNorm}
