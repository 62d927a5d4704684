"""Scaled dot product attention, as PyTorch users call it.

    o = attention(query, key, value, is_causal=True)
    layer = Attention(is_causal=True)

What torch.nn.functional.scaled_dot_product_attention computes without mask and dropout, scaled by
1 / sqrt(head dimension); fewer heads of key and value than of query are grouped-query attention.
Under autocast it runs in autocast's dtype, as torch's own does.

Tensors that are not contiguous, as [B, S, H, D] seen as [B, H, S, D] is, go to torch's own, which
reads and writes them as they are: copies of them take about what kernels gain.

Kernels of the task attention compute the forward pass alone. In training, kernels of the tasks
attention_train (with the scores' log-sum-exp) and attention_backward (the gradients from it) are
used where the library has both; else torch's own attention is, whose backward pass needs what its
forward pass keeps.
"""

# ruff: noqa: ARG001 - what torch calls has the parameters that torch passes

from __future__ import annotations

import math
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

_HAS_BACKWARD = available("attention_backward")
_TRAINS = available("attention_train") and _HAS_BACKWARD
_SCORES = 1 << 26  # held at once where torch computes the log-sum-exp


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
    whole = query.is_contiguous() and key.is_contiguous() and value.is_contiguous()
    if not whole:  # to copy three tensors takes about what kernels gain
        return _sdpa(query, key, value, is_causal)
    if not trains:
        o = _attention.at_once(query, key, value, is_causal)
        if o is not None:
            return o
    dtype = autocast_dtype(query)
    if dtype is not None:
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    ours = plain(query, key, value) and _fits(query, key, value)
    if not ours or (trains and not _TRAINS):
        return _sdpa(query, key, value, is_causal)
    if query.dim() != 4:
        q, k, v = _batched(query), _batched(key), _batched(value)
        return attention(q, k, v, is_causal=is_causal).reshape(query.shape)
    operator = _with_lse if trains else _attention
    given = query, key, value, is_causal
    if operator.is_torchs(*given) or (trains and _gradient_is_torchs(*given)):
        return _sdpa(query, key, value, is_causal)  # transposed in memory: no copy of it
    if trains:
        return _with_lse(query, key, value, is_causal)[0]
    return _attention.op(query, key, value, is_causal)


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
    dense = not (query.is_nested or key.is_nested)
    grouped = dense and min(query.dim(), key.dim()) > 2 and query.shape[-3] != key.shape[-3]
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
    ctx.save_for_backward(q, k, v)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    q, k, v = ctx.saved_tensors
    if torch.is_grad_enabled():  # for a second derivative
        return _differentiable_gradients(ctx, grad, q, k, v)
    if _HAS_BACKWARD:
        o, lse = _with_lse(q, k, v, ctx.causal)  # `attention` itself keeps them in training
    else:  # torch's own gradient needs neither
        o, lse = grad, _empty_lse(q)
    return (*_gradient(grad, q, k, v, o, lse, ctx.causal), None)


def _differentiable_gradients(
    ctx: Any, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    again = _sdpa(q, k, v, ctx.causal)
    wanted = [t for t, w in zip((q, k, v), ctx.needs_input_grad, strict=False) if w]
    found = iter(torch.autograd.grad(again, wanted, grad, create_graph=True))
    return (*(next(found) if w else None for w in ctx.needs_input_grad[:3]), None)


# -- in training -----------------------------------------------------------------------------------


def _with_lse_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, length, size = q.shape
    lse = torch.empty(q.shape[:3], dtype=_wide(q), device=q.device)
    keys = k.repeat_interleave(heads // k.shape[1], 1).to(lse.dtype)
    step = max(1, _SCORES // max(1, batch * heads * length))
    for start in range(0, length, step):
        scores = q[:, :, start : start + step].to(lse.dtype) @ keys.mT / math.sqrt(size)
        if causal:
            later = torch.ones_like(scores, dtype=torch.bool).triu(start + 1)
            scores = scores.masked_fill(later, -math.inf)
        lse[:, :, start : start + step] = torch.logsumexp(scores, -1)
    return _sdpa(q, k, v, causal), lse


def _gradient_is_torchs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> bool:
    """Whether no kernel would compute the gradients of such a call."""
    return _gradient.is_torchs(q, q, k, v, q, _empty_lse(q), causal)


def _empty_lse(q: torch.Tensor) -> torch.Tensor:
    return q.new_empty(q.shape[:3], dtype=_wide(q))


def _wide(q: torch.Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def _with_lse_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return _fake(q, k, v, causal), _empty_lse(q)


def _with_lse_setup_context(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]
) -> None:
    q, k, v, ctx.causal = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output)


def _with_lse_backward(
    ctx: Any, grad: torch.Tensor | None, _: object
) -> tuple[torch.Tensor | None, ...]:
    q, k, v, o, lse = ctx.saved_tensors
    if grad is None:
        return None, None, None, None
    if torch.is_grad_enabled():
        return _differentiable_gradients(ctx, grad, q, k, v)
    return (*_gradient(grad, q, k, v, o, lse, ctx.causal), None)


def _gradient_reference(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
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
    lse: torch.Tensor,
    causal: bool,
) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))


def _gradient_dims(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
) -> dict[str, int | bool] | None:
    alike = all((t.shape, t.dtype) == (q.shape, q.dtype) for t in (grad, o))
    fits = alike and (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
    return _dims(q, k, v, causal) if fits else None


def _vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[torch.Tensor, int]:
    o = _attention.op(*_one_batch(info, in_dims, args))
    return o.unflatten(0, (info.batch_size, -1)), 0


def _with_lse_vmap(
    info: Any, in_dims: tuple[int | None, ...], *args: Any
) -> tuple[tuple[torch.Tensor, ...], tuple[int, int]]:
    results = _with_lse.op(*_one_batch(info, in_dims, args))
    return tuple(t.unflatten(0, (info.batch_size, -1)) for t in results), (0, 0)


def _one_batch(info: Any, in_dims: tuple[int | None, ...], args: tuple[Any, ...]) -> list[Any]:
    """The arguments with the mapped dimension in the batch."""
    *tensors, causal = args
    batched = [
        t.movedim(d, 0) if d is not None else t.expand(info.batch_size, *t.shape)
        for t, d in zip(tensors, in_dims, strict=False)
    ]
    return [*(t.flatten(0, 1) for t in batched), causal]


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

_with_lse = LibraryOperator(
    "attention_with_lse",
    "(Tensor q, Tensor k, Tensor v, bool causal) -> (Tensor, Tensor)",
    namespace=NAMESPACE,
    task="attention_train",
    reference=_with_lse_reference,
    fake=_with_lse_fake,
    dims=_dims,
    setup_context=_with_lse_setup_context,
    backward=_with_lse_backward,
    vmap=_with_lse_vmap,
)

_gradient = LibraryOperator(
    "attention_gradient",
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, bool causal)"
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
