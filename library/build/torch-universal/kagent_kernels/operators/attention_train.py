"""Scaled dot product attention as training needs it: the result and the scores' log-sum-exp, causal
or full, with grouped-query heads.

    attention_train(q: [B, H, S, D], k: [B, Hkv, S, D], v: [B, Hkv, S, D], causal: bool) -> (o:
    [B, H, S, D], lse: [B, H, S] float32)

Made from the task attention_train.
Forward only: to ask for a gradient is an error. Autocast changes nothing here. What kernels were
not checked for is computed by the task's own way with torch.
"""

from __future__ import annotations

import torch
from torch import nn

from .._about import NAMESPACE
from .._library import LibraryOperator, holds, plain, wants_gradient, with_autograd
from . import _attention_train_reference as _task

__all__ = ["AttentionTrain", "attention_train"]


def attention_train(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scaled dot product attention as training needs it: the result and the scores' log-sum-exp,
    causal or full, with grouped-query heads.

    No gradient: to ask for one is an error (NotImplementedError). Calls with fewer elements than
    the smallest measured call (CARD.md: least size) use torch.

    Args:
        q: [B, H, S, D].
        k: [B, Hkv, S, D].
        v: [B, Hkv, S, D].
        causal: whether query i sees keys 0..i only.

    Returns:
        o: [B, H, S, D].
        lse: [B, H, S].
    """
    ours = plain(q, k, v) and (
        _operator.is_large(q, k, v)
        or wants_gradient(q, k, v)
    )
    if not ours:
        return _task.eager(
            q=q,
            k=k,
            v=v,
            causal=causal,
        )
    return _operator(q, k, v, causal)


class AttentionTrain(nn.Module):
    """`attention_train` as a module, and as a layer for Hugging Face `kernels`."""

    can_torch_compile = True
    has_backward = False

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `attention_train`."""
        return attention_train(q, k, v, causal)


LAYERS: dict[str, type[nn.Module]] = {"AttentionTrain": AttentionTrain}


# -- the operator ----------------------------------------------------------------------------------


def _reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
) -> object:
    found = with_autograd(
        _task.eager,
        q=q,
        k=k,
        v=v,
        causal=causal,
    )
    if not _fits(q, k, v, causal):
        return found
    dtype = q.dtype
    dtypes = (dtype, torch.float32)
    return tuple(r.to(d) for r, d in zip(found, dtypes, strict=True))


def _fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
) -> object:
    if not _fits(q, k, v, causal):
        return _operator.by_reference(q, k, v, causal)
    dtype = q.dtype
    B = q.shape[0]
    H = q.shape[1]
    Hkv = k.shape[1]
    S = q.shape[2]
    D = q.shape[3]
    return (
        q.new_empty((B, H, S, D), dtype=dtype),
        q.new_empty((B, H, S), dtype=torch.float32),
    )


def _fits(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
) -> bool:
    """Whether dtypes, ranks and sizes are the task's, so that results are as it declares them."""
    if (q.dim(), k.dim(), v.dim()) != (4, 4, 4):
        return False
    dtype = q.dtype
    B = q.shape[0]
    Hkv = k.shape[1]
    S = q.shape[2]
    D = q.shape[3]
    return holds(
        q.dtype in {torch.bfloat16, torch.float16, torch.float32},
        k.shape[0] == B,
        k.shape[2] == S,
        k.shape[3] == D,
        k.dtype == dtype,
        v.shape[0] == B,
        v.shape[1] == Hkv,
        v.shape[2] == S,
        v.shape[3] == D,
        v.dtype == dtype,
    )


def _dims(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
) -> dict[str, int | float | bool] | None:
    if (q.dim(), k.dim(), v.dim()) != (4, 4, 4):
        return None
    dtype = q.dtype
    B = q.shape[0]
    H = q.shape[1]
    Hkv = k.shape[1]
    S = q.shape[2]
    D = q.shape[3]
    fits = (
        k.shape[0] == B
        and k.shape[2] == S
        and k.shape[3] == D
        and k.dtype == dtype
        and v.shape[0] == B
        and v.shape[1] == Hkv
        and v.shape[2] == S
        and v.shape[3] == D
        and v.dtype == dtype
    )
    if not fits:
        return None
    return {"B": B, "H": H, "Hkv": Hkv, "S": S, "D": D, "causal": causal}


_operator = LibraryOperator(
    "attention_train",
    "(Tensor q, Tensor k, Tensor v, bool causal) -> (Tensor, Tensor)",
    namespace=NAMESPACE,
    reference=_reference,
    fake=_fake,
    dims=_dims,
)
