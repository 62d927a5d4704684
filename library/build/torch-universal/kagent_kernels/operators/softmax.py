"""Softmax, as PyTorch users call it.

    y = softmax(x)               # torch.softmax(x, -1)
    layer = Softmax(dim=-1)      # torch.nn.Softmax(-1)

Any shape and any `dim`. Kernels work on rows; where the elements along `dim` do not lie side by
side, torch's own softmax is used, which needs no copy. Under autocast the result is float32 where
torch's own is (on GPUs; on the CPU it keeps its dtype).

The gradient is taken by kernels of the task softmax_backward where the library has some
(`softmax_backward(grad: [M, N], y: [M, N]) -> dx: [M, N]`, y the softmax), else by torch.
"""

# ruff: noqa: ARG001 - what torch calls has the parameters that torch passes

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .._about import NAMESPACE
from .._library import LibraryOperator, autocast_dtype, available, plain, rows, vmap_rows

__all__ = ["Softmax", "softmax"]


def softmax(input: torch.Tensor, dim: int = -1) -> torch.Tensor:  # noqa: A002 - torch's name
    """exp(x) / sum(exp(x)) along a dimension.

    Args:
        input: Any shape. Tensors of a subclass and sparse ones go to torch's own function.
        dim: The dimension that sums to 1.

    Returns:
        The same shape; the same dtype, or float32 under a GPU's autocast.
    """
    if not plain(input) or not _softmax.is_large(input):
        return torch.softmax(input, dim)
    if input.device.type != "cpu" and autocast_dtype(input) is not None:
        input = input.float()  # noqa: A001
    dims = input.dim()
    if dim in (-1, dims - 1) and dims > 0:
        return _softmax(input) if dims == 2 else _softmax(rows(input)).view(input.shape)
    if dims == 0 or not -dims <= dim < dims:
        return torch.softmax(input, dim)  # its error, or a one
    moved = input.movedim(dim, -1)
    if not moved.is_contiguous():
        return torch.softmax(input, dim)
    return _softmax(rows(moved)).view(moved.shape).movedim(-1, dim)


class Softmax(nn.Module):
    """`softmax` as a module.

    Args:
        dim: The dimension that sums to 1.
    """

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """See `softmax`."""
        return softmax(input, self.dim)

    def extra_repr(self) -> str:
        """As torch.nn.Softmax."""
        return f"dim={self.dim}"


# -- the operator ----------------------------------------------------------------------------------


def _reference(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def _fake(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _dims(x: torch.Tensor) -> dict[str, int] | None:
    return {"M": x.shape[0], "N": x.shape[1]} if x.dim() == 2 else None


def _setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(output)


def _backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    (y,) = ctx.saved_tensors
    if _gradient is None or torch.is_grad_enabled():  # torch's has a second derivative
        return torch.ops.aten._softmax_backward_data(grad, y, -1, y.dtype)  # noqa: SLF001
    return _gradient(grad, y)


def _gradient_reference(grad: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten._softmax_backward_data(grad, y, -1, y.dtype)  # noqa: SLF001


def _gradient_fake(grad: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(y, memory_format=torch.contiguous_format)


def _gradient_dims(grad: torch.Tensor, y: torch.Tensor) -> dict[str, int] | None:
    return _dims(y) if (grad.shape, grad.dtype) == (y.shape, y.dtype) else None


_softmax = LibraryOperator(
    "softmax",
    "(Tensor x) -> Tensor",
    namespace=NAMESPACE,
    reference=_reference,
    fake=_fake,
    dims=_dims,
    setup_context=_setup_context,
    backward=_backward,
    vmap=vmap_rows(lambda x: _softmax.op(x)),
)

_gradient = (
    LibraryOperator(
        "softmax_gradient",
        "(Tensor grad, Tensor y) -> Tensor",
        namespace=NAMESPACE,
        task="softmax_backward",
        reference=_gradient_reference,
        fake=_gradient_fake,
        dims=_gradient_dims,
    )
    if available("softmax_backward")
    else None
)


# -- layers for Hugging Face `kernels` -------------------------------------------------------------


class _Softmax(nn.Module):
    """For torch.nn.Softmax; without a dim it is torch's to choose one."""

    can_torch_compile = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        dim = getattr(self, "dim", -1)
        return nn.functional.softmax(input, dim) if dim is None else softmax(input, dim)


LAYERS: dict[str, type[nn.Module]] = {"Softmax": _Softmax}
