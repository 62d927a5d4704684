"""Scaled dot product attention, as PyTorch users call it.

    o = attention(query, key, value, is_causal=True)
    layer = Attention(is_causal=True)

What torch.nn.functional.scaled_dot_product_attention computes without mask and dropout, scaled by
1 / sqrt(head dimension); fewer heads of key and value than of query are grouped-query attention.
Under autocast it runs in autocast's dtype, as torch's own does.

Kernels compute the forward pass alone. In training they are used where the library has kernels of
the task attention_backward (`attention_backward(grad: [B, H, S, D], q: [B, H, S, D], k: [B, Hkv, S,
D], v: [B, Hkv, S, D], o: [B, H, S, D], causal: bool) -> (dq, dk, dv)`); without them torch's own
attention is, whose backward pass needs what its forward pass keeps.
"""

# ruff: noqa: ARG001 - what torch calls has the parameters that torch passes

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .._about import NAMESPACE
from .._library import (
    LibraryOperator,
    autocast_dtype,
    available,
    plain,
    wants_gradient,
    with_autograd,
)

__all__ = ["Attention", "attention"]

_TRAINS = available("attention_backward")


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool = False
) -> torch.Tensor:
    """softmax(query @ key.T / sqrt(D)) @ value for every head.

    Args:
        query: [..., H, S, D].
        key: [..., Hkv, S, D]; H is a multiple of Hkv. Other lengths than S, and other heads of
            value than D, go to torch's own function, and so do tensors of a subclass.
        value: [..., Hkv, S, D].
        is_causal: Whether query i sees keys 0..i only.

    Returns:
        [..., H, S, D].
    """
    trains = wants_gradient(query, key, value)
    if _TRAINS or not trains:
        o = _attention.at_once(query, key, value, is_causal)
        if o is not None:
            return o
    dtype = autocast_dtype(query)
    if dtype is not None:
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    ours = plain(query, key, value) and _fits(query, key, value)
    if not ours or (trains and not _TRAINS):
        return _sdpa(query, key, value, is_causal)
    if query.dim() == 4:
        if _attention.is_torchs(query, key, value, is_causal):
            return _sdpa(query, key, value, is_causal)  # transposed in memory: no copy of it
        return _attention.op(query, key, value, is_causal)
    o = _attention(_batched(query), _batched(key), _batched(value), is_causal)
    return o.view(query.shape)


class Attention(nn.Module):
    """`attention` as a module.

    Args:
        is_causal: Whether query i sees keys 0..i only.
    """

    def __init__(self, is_causal: bool = False) -> None:
        super().__init__()
        self.is_causal = is_causal

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """See `attention`."""
        return attention(query, key, value, is_causal=self.is_causal)

    def extra_repr(self) -> str:
        """The flag."""
        return f"is_causal={self.is_causal}"


def _sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool
) -> torch.Tensor:
    grouped = query.dim() > 2 and key.dim() > 2 and query.shape[-3] != key.shape[-3]
    return F.scaled_dot_product_attention(
        query, key, value, is_causal=is_causal, enable_gqa=grouped
    )


def _fits(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether it is the task's: self-attention over heads of one size."""
    dims = query.dim()
    return (
        dims >= 3
        and key.shape == value.shape
        and key.dim() == dims
        and query.shape[:-3] == key.shape[:-3]
        and query.shape[-2:] == key.shape[-2:]
        and key.shape[-3] > 0
        and query.shape[-3] % key.shape[-3] == 0
        and query.dtype == key.dtype == value.dtype
    )


def _batched(x: torch.Tensor) -> torch.Tensor:
    return x.unsqueeze(0) if x.dim() == 3 else x.flatten(0, -4)


# -- the operator ----------------------------------------------------------------------------------


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def _dims(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> dict[str, int | bool] | None:
    if q.dim() != 4 or not _fits(q, k, v):
        return None
    batch, heads, length, size = q.shape
    return {"B": batch, "H": heads, "Hkv": k.shape[1], "S": length, "D": size, "causal": causal}


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    q, k, v, ctx.causal = inputs
    ctx.save_for_backward(q, k, v, output)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    q, k, v, o = ctx.saved_tensors
    if torch.is_grad_enabled():  # for a second derivative
        again = _sdpa(q, k, v, ctx.causal)
        wanted = [t for t, w in zip((q, k, v), ctx.needs_input_grad, strict=False) if w]
        found = iter(torch.autograd.grad(again, wanted, grad, create_graph=True))
        return (*(next(found) if w else None for w in ctx.needs_input_grad[:3]), None)
    return (*_gradient(grad, q, k, v, o, ctx.causal), None)


def _gradient_reference(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    causal: bool,
) -> tuple[torch.Tensor, ...]:
    return with_autograd(_gradients_of_sdpa, grad, q, k, v, causal)


def _gradients_of_sdpa(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, ...]:
    leaves = [t.requires_grad_() for t in (q, k, v)]
    return torch.autograd.grad(_sdpa(*leaves, causal), leaves, grad)


def _gradient_fake(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    causal: bool,
) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))


def _gradient_dims(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    causal: bool,
) -> dict[str, int | bool] | None:
    alike = all((t.shape, t.dtype) == (q.shape, q.dtype) for t in (grad, o))
    return _dims(q, k, v, causal) if alike else None


def _vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[torch.Tensor, int]:
    *tensors, causal = args
    batched = [
        t.movedim(d, 0) if d is not None else t.expand(info.batch_size, *t.shape)
        for t, d in zip(tensors, in_dims, strict=False)
    ]
    o = _attention.op(*(t.flatten(0, 1) for t in batched), causal)
    return o.view(batched[0].shape), 0


_attention = LibraryOperator(
    "attention",
    "(Tensor q, Tensor k, Tensor v, bool causal) -> Tensor",
    namespace=NAMESPACE,
    reference=_sdpa,
    fake=_fake,
    dims=_dims,
    setup_context=_setup_context,
    backward=_backward,
    vmap=_vmap,
)

_gradient = LibraryOperator(
    "attention_gradient",
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor o, bool causal)"
    " -> (Tensor, Tensor, Tensor)",
    namespace=NAMESPACE,
    task="attention_backward",
    reference=_gradient_reference,
    fake=_gradient_fake,
    dims=_gradient_dims,
)


# -- layers for Hugging Face `kernels` -------------------------------------------------------------


class _Attention(nn.Module):
    """For a module with the forward of `Attention`."""

    can_torch_compile = True

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attention(query, key, value, is_causal=getattr(self, "is_causal", False))


class _ScaledDotProductAttention(nn.Module):
    """For a module whose forward takes what torch's function takes."""

    can_torch_compile = True

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        heads = query.dim() < 3 or enable_gqa or query.shape[-3] == key.shape[-3]
        if attn_mask is None and dropout_p == 0.0 and scale is None and heads:
            return attention(query, key, value, is_causal=is_causal)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )


LAYERS: dict[str, type[nn.Module]] = {
    "Attention": _Attention,
    "ScaledDotProductAttention": _ScaledDotProductAttention,
}
