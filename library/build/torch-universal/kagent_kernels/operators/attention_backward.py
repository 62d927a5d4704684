"""Gradients of scaled dot product attention from what the forward pass keeps, causal or full, with
grouped-query heads.

    attention_backward(grad: [B, H, S, D], q: [B, H, S, D], k: [B, Hkv, S, D], v: [B, Hkv, S,
    D], o: [B, H, S, D], lse: [B, H, S] float32, causal: bool) -> (dq: [B, H, S, D], dk: [B,
    Hkv, S, D], dv: [B, Hkv, S, D])

Made from the task attention_backward.
Forward only: to ask for a gradient is an error. Autocast changes nothing here. What kernels were
not checked for is computed by the task's own way with torch.
"""

from __future__ import annotations

import torch
from torch import nn

from .._about import NAMESPACE
from .._library import LibraryOperator, holds, plain, wants_gradient, with_autograd
from . import _attention_backward_reference as _task

__all__ = ["AttentionBackward", "attention_backward"]


def attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of scaled dot product attention from what the forward pass keeps, causal or full,
    with grouped-query heads.

    No gradient: to ask for one is an error (NotImplementedError). Calls with fewer elements than
    the smallest measured call (CARD.md: least size) use torch.

    Args:
        grad: [B, H, S, D].
        q: [B, H, S, D].
        k: [B, Hkv, S, D].
        v: [B, Hkv, S, D].
        o: [B, H, S, D].
        lse: [B, H, S], float32.
        causal: whether query i sees keys 0..i only.

    Returns:
        dq: [B, H, S, D].
        dk: [B, Hkv, S, D].
        dv: [B, Hkv, S, D].
    """
    ours = plain(grad, q, k, v, o, lse) and (
        _operator.is_large(grad, q, k, v, o, lse)
        or wants_gradient(grad, q, k, v, o, lse)
    )
    if not ours:
        return _task.eager(
            grad=grad,
            q=q,
            k=k,
            v=v,
            o=o,
            lse=lse,
            causal=causal,
        )
    return _operator(grad, q, k, v, o, lse, causal)


class AttentionBackward(nn.Module):
    """`attention_backward` as a module, and as a layer for Hugging Face `kernels`."""

    can_torch_compile = True
    has_backward = False

    def forward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor,
        causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `attention_backward`."""
        return attention_backward(grad, q, k, v, o, lse, causal)


LAYERS: dict[str, type[nn.Module]] = {"AttentionBackward": AttentionBackward}


# -- the operator ----------------------------------------------------------------------------------


def _reference(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
) -> object:
    found = with_autograd(
        _task.eager,
        grad=grad,
        q=q,
        k=k,
        v=v,
        o=o,
        lse=lse,
        causal=causal,
    )
    if not _fits(grad, q, k, v, o, lse, causal):
        return found
    dtype = grad.dtype
    dtypes = (dtype, dtype, dtype)
    return tuple(r.to(d) for r, d in zip(found, dtypes, strict=True))


def _fake(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
) -> object:
    if not _fits(grad, q, k, v, o, lse, causal):
        return _operator.by_reference(grad, q, k, v, o, lse, causal)
    dtype = grad.dtype
    B = grad.shape[0]
    H = grad.shape[1]
    Hkv = k.shape[1]
    S = grad.shape[2]
    D = grad.shape[3]
    return (
        grad.new_empty((B, H, S, D), dtype=dtype),
        grad.new_empty((B, Hkv, S, D), dtype=dtype),
        grad.new_empty((B, Hkv, S, D), dtype=dtype),
    )


def _fits(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
) -> bool:
    """Whether dtypes, ranks and sizes are the task's, so that results are as it declares them."""
    if (grad.dim(), q.dim(), k.dim(), v.dim(), o.dim(), lse.dim()) != (4, 4, 4, 4, 4, 3):
        return False
    dtype = grad.dtype
    B = grad.shape[0]
    H = grad.shape[1]
    Hkv = k.shape[1]
    S = grad.shape[2]
    D = grad.shape[3]
    return holds(
        grad.dtype in {torch.bfloat16, torch.float16, torch.float32},
        q.shape[0] == B,
        q.shape[1] == H,
        q.shape[2] == S,
        q.shape[3] == D,
        q.dtype == dtype,
        k.shape[0] == B,
        k.shape[2] == S,
        k.shape[3] == D,
        k.dtype == dtype,
        v.shape[0] == B,
        v.shape[1] == Hkv,
        v.shape[2] == S,
        v.shape[3] == D,
        v.dtype == dtype,
        o.shape[0] == B,
        o.shape[1] == H,
        o.shape[2] == S,
        o.shape[3] == D,
        o.dtype == dtype,
        lse.shape[0] == B,
        lse.shape[1] == H,
        lse.shape[2] == S,
        lse.dtype == torch.float32,
    )


def _dims(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
) -> dict[str, int | float | bool] | None:
    if (grad.dim(), q.dim(), k.dim(), v.dim(), o.dim(), lse.dim()) != (4, 4, 4, 4, 4, 3):
        return None
    dtype = grad.dtype
    B = grad.shape[0]
    H = grad.shape[1]
    Hkv = k.shape[1]
    S = grad.shape[2]
    D = grad.shape[3]
    fits = (
        q.shape[0] == B
        and q.shape[1] == H
        and q.shape[2] == S
        and q.shape[3] == D
        and q.dtype == dtype
        and k.shape[0] == B
        and k.shape[2] == S
        and k.shape[3] == D
        and k.dtype == dtype
        and v.shape[0] == B
        and v.shape[1] == Hkv
        and v.shape[2] == S
        and v.shape[3] == D
        and v.dtype == dtype
        and o.shape[0] == B
        and o.shape[1] == H
        and o.shape[2] == S
        and o.shape[3] == D
        and o.dtype == dtype
        and lse.shape[0] == B
        and lse.shape[1] == H
        and lse.shape[2] == S
        and lse.dtype == torch.float32
    )
    if not fits:
        return None
    return {"B": B, "H": H, "Hkv": Hkv, "S": S, "D": D, "causal": causal}


_operator = LibraryOperator(
    "attention_backward",
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, bool causal) -> (Tensor, Tensor, Tensor)",
    namespace=NAMESPACE,
    reference=_reference,
    fake=_fake,
    dims=_dims,
)
