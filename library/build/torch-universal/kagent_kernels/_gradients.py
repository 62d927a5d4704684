"""Gradients that the forward pass has computed, scaled by the gradient that comes in.

A loss is mostly the end of a graph, and what comes in is 1: then the saved gradient is the result,
and another pass over it would cost as much as the forward pass. It is scaled in place, since a
backward pass that frees its graph is its last reader, and nothing is done where the factor is 1.
With retain_graph=True, create_graph=True or below torch.compile and torch.func, the product is a
new tensor, so that any number of backward passes is right.
"""

from __future__ import annotations

from typing import Any

import torch

from ._dispatch import warn


def scaled(saved: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """The product, in saved's dtype; `saved` is used up where nobody can need it again.

    Args:
        saved: A contiguous gradient that the forward pass has made for this alone.
        factor: Scalar; the product is taken in its precision or the gradient's, the higher one.
    """
    ours = _ordinary(saved) and _ordinary(factor)
    if not ours or _graph_is_kept():
        product = (saved.to(torch.promote_types(saved.dtype, factor.dtype)) * factor).to(
            saved.dtype
        )
        if ours and torch.is_grad_enabled():
            product = _OnlyOnce.apply(product.detach().requires_grad_())  # type: ignore[no-untyped-call]
        return product
    if saved.device.type == "cpu":
        value = factor.item()  # nobody waits: this is memory that was written already
        return saved if value == 1.0 else saved.mul_(value)
    fits = saved.is_contiguous() and saved.element_size() <= 4 and saved.numel() > 0
    if not (fits and saved.device.type == "cuda" and _scaled_by_kernel(saved, factor)):
        saved.mul_(factor)
    return saved


def _ordinary(tensor: torch.Tensor) -> bool:
    """Whether it has memory: not traced, not a subclass, not wrapped by torch.func or vmap."""
    func = torch._C._functorch  # noqa: SLF001
    return (
        type(tensor) is torch.Tensor
        and not func.is_functorch_wrapped_tensor(tensor)
        and not func.is_legacy_batchedtensor(tensor)
    )


def _graph_is_kept() -> bool:
    """Whether the backward pass at work may be followed by another one over the same graph."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)  # noqa: SLF001
    return True if ask is None else bool(ask())


def _scaled_by_kernel(saved: torch.Tensor, factor: torch.Tensor) -> bool:
    """Whether there was a Triton that could do it: it needs a C compiler, too."""
    if _without_triton:
        return False
    try:
        from ._triton_scale import scale_

        scale_(saved, factor)
    except torch.OutOfMemoryError:
        raise
    except Exception as e:  # noqa: BLE001 - a toolchain that does not work here
        _without_triton.append(f"{type(e).__name__}: {e}")
        warn(
            "gradients of losses are scaled by torch, in another pass over them: Triton does not "
            f"run here ({_without_triton[0][:500]})."
        )
        return False
    return True


_without_triton: list[str] = []  # why it is not tried again


class _OnlyOnce(torch.autograd.Function):
    """A gradient that is not constant, but cannot be differentiated again: it says so."""

    @staticmethod
    def forward(ctx: Any, product: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return product

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:  # noqa: ARG004
        raise RuntimeError(
            "this loss computes its gradient in the forward pass and has no second derivative: "
            "use torch.nn.functional.cross_entropy where create_graph=True is needed"
        )
