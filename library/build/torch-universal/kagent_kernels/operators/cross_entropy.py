"""Cross entropy of logits, as PyTorch users call it.

    loss = cross_entropy(logits, target)         # torch.nn.functional.cross_entropy
    criterion = CrossEntropyLoss(ignore_index=-100)

The kernel computes loss and gradient in one pass, and the backward pass has nothing left to do but
to multiply by the gradient that comes in: in place, and not at all where that is 1. With
retain_graph=True, create_graph=True and under torch.compile the product is a new tensor.

- The loss is the mean over the targets that count, in float32 also of 16-bit logits (float64 of
  float64); NaN where none counts.
- Under autocast logits are cast to float32, as torch's own loss does.
- float16 logits that need a gradient go to torch's own loss. The gradient of a mean over thousands
  of rows is less than float16 can hold, and multiplying by a loss scaler's 65536 afterwards does
  not bring it back; torch's own backward pass multiplies before it rounds. bfloat16 has the range
  of float32: there the factor comes afterwards without harm.
- There is no second derivative: it is refused, never wrong.
- On the CPU a target out of range is an IndexError. On a GPU nobody looks, as that would take
  longer than the rest of the call: such a target is undefined behaviour.
"""

# ruff: noqa: ARG001 - what torch calls has the parameters that torch passes

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .._about import NAMESPACE
from .._library import LibraryOperator, autocast_dtype, check_classes, plain, scaled, wants_gradient

__all__ = ["CrossEntropyLoss", "cross_entropy"]

_IGNORED = -100  # what kernels know; other values of ignore_index are replaced by it


def cross_entropy(
    input: torch.Tensor,  # noqa: A002 - torch's name
    target: torch.Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """Mean of -log softmax(input)[target] over the targets that count.

    Args:
        input: Logits: [M, N], [N], or [M, N, ...] with classes in the second dimension. Where the
            elements of a class dimension that is not the last do not lie side by side, torch's own
            loss is used, and so it is for tensors of a subclass.
        target: Classes, int64, of input's shape without the class dimension; or probabilities of
            input's shape, which go to torch's own loss.
        ignore_index: The class of targets that do not count.
        reduction: "mean"; there is no other.

    Returns:
        A scalar: float32, float64 of float64.

    Raises:
        ValueError: Another reduction.
        IndexError: A target is out of range; on the CPU only.
    """
    _require_mean(reduction)
    if input.dtype is not torch.float16:
        found = _cross_entropy.at_once(input, target, ignore_index)
        if found is not None:
            return found[0]
    if not plain(input, target) or not _is_class(input, target):
        return _torch(input, target, ignore_index)
    if autocast_dtype(input) is not None:
        input = input.float()  # noqa: A001
    if input.dtype is torch.float16 and wants_gradient(input):
        return _torch(input, target, ignore_index)
    if input.dim() != 2:
        moved = input.movedim(1, -1) if input.dim() > 2 else input
        if not moved.is_contiguous():
            return _torch(input, target, ignore_index)
        input, target = moved.view(-1, moved.shape[-1]), target.reshape(-1)  # noqa: A001
    if ignore_index != _IGNORED:
        target = _with_ignored(target, input.shape[1], ignore_index)
    if _cross_entropy.is_torchs(input, target, _IGNORED):
        return _torch(input, target, _IGNORED)
    return _cross_entropy.op(input, target, _IGNORED)[0]


class CrossEntropyLoss(nn.Module):
    """`cross_entropy` as a module.

    Args:
        ignore_index: The class of targets that do not count.
        reduction: "mean"; there is no other.
    """

    def __init__(self, ignore_index: int = -100, reduction: str = "mean") -> None:
        super().__init__()
        _require_mean(reduction)
        self.ignore_index, self.reduction = ignore_index, reduction

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """See `cross_entropy`."""
        return cross_entropy(input, target, self.ignore_index)

    def extra_repr(self) -> str:
        """What is ignored."""
        return f"ignore_index={self.ignore_index}"


def _require_mean(reduction: str) -> None:
    if reduction != "mean":
        raise ValueError(
            f'reduction = {reduction!r}: only "mean" is supported; '
            "torch.nn.functional.cross_entropy has the others"
        )


def _torch(input: torch.Tensor, target: torch.Tensor, ignore_index: int) -> torch.Tensor:  # noqa: A002
    loss = F.cross_entropy(input, target, ignore_index=ignore_index)
    return loss if loss.dtype is torch.float64 else loss.float()


def _is_class(input: torch.Tensor, target: torch.Tensor) -> bool:  # noqa: A002
    """Whether targets are classes, one for each row, of logits that have some."""
    shape = input.shape
    rows = shape[:1] + shape[2:] if input.dim() > 1 else shape[:0]
    return (
        input.dim() > 0
        and input.numel() > 0
        and input.dtype.is_floating_point
        and target.dtype is torch.int64
        and target.shape == rows
        and target.device == input.device
    )


def _with_ignored(target: torch.Tensor, classes: int, ignore_index: int) -> torch.Tensor:
    """Targets with the number for ignored ones that kernels know. One that has it already is out of
    range, and stays so.
    """
    target = target.masked_fill(target == _IGNORED, classes)
    return target.masked_fill(target == ignore_index, _IGNORED)


# -- the operator ----------------------------------------------------------------------------------


def _reference(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    kept = target != ignore_index
    count = kept.sum()
    column = target.where(kept, 0)[:, None]
    wide = torch.promote_types(logits.dtype, torch.float32)
    log_p = torch.log_softmax(logits, -1, dtype=wide)
    loss = -log_p.gather(1, column)[:, 0].where(kept, 0).sum() / count
    p = log_p.exp_()
    p.scatter_add_(1, column, p.new_full((1, 1), -1).expand_as(column))
    p.mul_(1 / count).masked_fill_(~kept[:, None], 0)
    return loss, p.to(logits.dtype)


def _fake(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(logits.dtype, torch.float32)
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    return logits.new_empty((), dtype=wide), grad


def _dims(logits: torch.Tensor, target: torch.Tensor, ignore_index: int) -> dict[str, int] | None:
    fits = logits.dim() == 2 and target.shape == logits.shape[:1] and target.dtype is torch.int64
    if not fits or ignore_index != _IGNORED:
        return None
    return {"M": logits.shape[0], "N": logits.shape[1]}


def _check(logits: torch.Tensor, target: torch.Tensor, ignore_index: int) -> None:
    """Kernels write where targets say."""
    check_classes(target, logits.shape[-1], ignore_index)


def _setup_context(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]
) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # or the second result's would be as large as the logits
    ctx.save_for_backward(output[1])


def _backward(
    ctx: Any, factor: torch.Tensor | None, _: object
) -> tuple[torch.Tensor | None, None, None]:
    (grad,) = ctx.saved_tensors
    return (None if factor is None else scaled(grad, factor)), None, None


_cross_entropy = LibraryOperator(
    "cross_entropy",
    "(Tensor logits, Tensor target, int ignore_index) -> (Tensor, Tensor)",
    namespace=NAMESPACE,
    reference=_reference,
    fake=_fake,
    dims=_dims,
    check=_check,
    setup_context=_setup_context,
    backward=_backward,
)


# -- layers for Hugging Face `kernels` -------------------------------------------------------------


class _CrossEntropyLoss(nn.Module):
    """For torch.nn.CrossEntropyLoss and Liger's; what is not ours stays torch's."""

    can_torch_compile = True

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:  # noqa: A002
        weight, smoothing = getattr(self, "weight", None), getattr(self, "label_smoothing", 0.0)
        reduction = getattr(self, "reduction", "mean")
        ignored = getattr(self, "ignore_index", -100)
        if weight is None and smoothing == 0.0 and reduction == "mean":
            return cross_entropy(input, target, ignored)
        return F.cross_entropy(
            input,
            target,
            weight=weight,
            ignore_index=ignored,
            reduction=reduction,
            label_smoothing=smoothing,
        )


LAYERS: dict[str, type[nn.Module]] = {"CrossEntropyLoss": _CrossEntropyLoss}
