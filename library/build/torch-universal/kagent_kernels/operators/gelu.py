"""GELU in its tanh form, as PyTorch users call it.

    y = gelu(x)                  # torch.nn.functional.gelu(x, approximate="tanh")
    layer = GELU()               # torch.nn.GELU(approximate="tanh")

Any shape; autocast leaves the dtype as it is, as it does with torch's own. The gradient is taken by
kernels of the task gelu_backward where the library has some (`gelu_backward(grad: [M, N], x: [M,
N]) -> dx: [M, N]`), else by torch.
"""

# ruff: noqa: ARG001 - what torch calls has the parameters that torch passes

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .._about import NAMESPACE
from .._library import LibraryOperator, available, plain, rows, vmap_rows

__all__ = ["GELU", "gelu"]


def gelu(input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
    """Multiply x by (1 + tanh(sqrt(2/pi) (x + 0.044715 x³))) / 2, element by element.

    Args:
        input: Any shape. Tensors of a subclass and sparse ones go to torch's own function.

    Returns:
        The same shape and dtype, contiguous.
    """
    if not plain(input) or not _gelu.is_large(input):
        return F.gelu(input, approximate="tanh")
    if input.dim() == 2:
        return _gelu(input)
    return _gelu(rows(input)).view(input.shape)


class GELU(nn.Module):
    """`gelu` as a module."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """See `gelu`."""
        return gelu(input)


# -- the operator ----------------------------------------------------------------------------------


def _reference(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _fake(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _dims(x: torch.Tensor) -> dict[str, int] | None:
    return {"M": x.shape[0], "N": x.shape[1]} if x.dim() == 2 else None


def _setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    (x,) = ctx.saved_tensors
    if _gradient is None or torch.is_grad_enabled():  # torch's has a second derivative
        return torch.ops.aten.gelu_backward(grad, x, approximate="tanh")
    return _gradient(grad, x)


def _gradient_reference(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.gelu_backward(grad, x, approximate="tanh")


def _gradient_fake(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _gradient_dims(grad: torch.Tensor, x: torch.Tensor) -> dict[str, int] | None:
    return _dims(x) if (grad.shape, grad.dtype) == (x.shape, x.dtype) else None


_gelu = LibraryOperator(
    "gelu",
    "(Tensor x) -> Tensor",
    namespace=NAMESPACE,
    reference=_reference,
    fake=_fake,
    dims=_dims,
    setup_context=_setup_context,
    backward=_backward,
    vmap=vmap_rows(lambda x: _gelu.op(x)),
)

_gradient = (
    LibraryOperator(
        "gelu_gradient",
        "(Tensor grad, Tensor x) -> Tensor",
        namespace=NAMESPACE,
        task="gelu_backward",
        reference=_gradient_reference,
        fake=_gradient_fake,
        dims=_gradient_dims,
    )
    if available("gelu_backward")
    else None
)


# -- layers for Hugging Face `kernels` -------------------------------------------------------------


class _GELU(nn.Module):
    """For torch.nn.GELU: an exact one stays exact."""

    can_torch_compile = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        approximate = getattr(self, "approximate", "tanh")
        return gelu(input) if approximate == "tanh" else F.gelu(input, approximate=approximate)


class _TanhGELU(nn.Module):
    """For the activations of transformers that are this function under another name."""

    can_torch_compile = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return gelu(input)


LAYERS: dict[str, type[nn.Module]] = {"GELU": _GELU, "GeluTanh": _TanhGELU, "NewGELU": _TanhGELU}
