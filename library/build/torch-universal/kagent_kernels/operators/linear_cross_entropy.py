"""Linear layer and cross entropy in one, as PyTorch users call it.

    loss = linear_cross_entropy(hidden, lm_head.weight, target)
    criterion = FusedLinearCrossEntropyLoss(ignore_index=-100)
    loss = criterion(lm_head.weight, hidden, target)      # the order of Liger's module

Many logits are never in memory as a whole: where no kernel was checked, torch computes 2^27 of them
at a time, and adds up gradients of the weight in float32. Loss and both gradients come out of the
forward pass, and the backward pass has nothing left to do but to multiply them by the gradient that
comes in: in place, and not at all where that is 1. With retain_graph=True, create_graph=True and
under torch.compile the products are new tensors.

- The loss is the mean over the targets that count, in float32 also of 16-bit tensors (float64 of
  float64); NaN where none counts.
- Under autocast hidden states and weight are cast to autocast's dtype, as a linear layer does.
- Without a gradient to take (evaluation, torch.no_grad) torch computes the loss alone, a few
  thousand tokens at a time: one matrix product instead of three.
- float16 tensors that need a gradient go to torch: what the forward pass would have to keep is less
  than float16 can hold before a loss scaler multiplies it. bfloat16 has the range of float32.
- There is no second derivative: it is refused, never wrong.
- On the CPU a target out of range is an IndexError. On a GPU nobody looks: such a target is
  undefined behaviour.
"""

# ruff: noqa: ARG001 - what torch calls has the parameters that torch passes

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .._about import NAMESPACE
from .._library import LibraryOperator, autocast_dtype, check_classes, plain, scaled, wants_gradient

__all__ = ["FusedLinearCrossEntropyLoss", "linear_cross_entropy"]

_IGNORED = -100  # what every kernel knows; other values of ignore_index are replaced by it
_LOGITS = 1 << 25  # held at once where the loss alone is computed
_LOGITS_LEARNED = 1 << 27  # where torch computes gradients, too: fewer sums of weight gradients


def linear_cross_entropy(
    input: torch.Tensor,  # noqa: A002 - torch's name
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """cross_entropy(input @ linear_weight.T, target), the mean over the targets that count.

    Args:
        input: Hidden states, [..., D].
        linear_weight: [V, D].
        target: Classes, int64, of input's shape without the last dimension.
        ignore_index: The class of targets that do not count.
        reduction: "mean"; there is no other.

    Returns:
        A scalar: float32, float64 of float64.

    Raises:
        ValueError: Another reduction, or a target whose shape is not that of the hidden states.
        IndexError: A target is out of range; on the CPU only.
    """
    _require_mean(reduction)
    learns = wants_gradient(input, linear_weight)
    if learns and input.dtype is not torch.float16:
        found = _linear_cross_entropy.at_once(input, linear_weight, target, ignore_index)
        if found is not None:
            return found[0]
    dtype = autocast_dtype(input)
    if dtype is not None:
        input, linear_weight = input.to(dtype), linear_weight.to(dtype)  # noqa: A001
    if target.shape != input.shape[:-1]:
        raise ValueError(
            f"target is {tuple(target.shape)}: it must be {tuple(input.shape[:-1])}, one class for "
            "each hidden state"
        )
    if input.dim() != 2:
        input, target = input.reshape(-1, input.shape[-1]), target.reshape(-1)  # noqa: A001
    ours = (
        plain(input, linear_weight, target)
        and target.dtype is torch.int64
        and input.dtype == linear_weight.dtype
        and not (input.dtype is torch.float16 and learns)
    )
    if not ours:
        return _torch(input, linear_weight, target, ignore_index)
    if not learns:
        return _loss_alone(input, linear_weight, target, ignore_index)
    if ignore_index != _IGNORED:
        # One that has kernels' own number is out of range, and stays so.
        target = target.masked_fill(target == _IGNORED, linear_weight.shape[0])
        target = target.masked_fill(target == ignore_index, _IGNORED)
    few = input.shape[0] * linear_weight.shape[0] <= _LOGITS_LEARNED
    if few and _linear_cross_entropy.is_torchs(input, linear_weight, target, _IGNORED):
        return _torch(input, linear_weight, target, _IGNORED)  # one kernel less, and derivatives
    return _linear_cross_entropy.op(input, linear_weight, target, _IGNORED)[0]


class FusedLinearCrossEntropyLoss(nn.Module):
    """`linear_cross_entropy` as a module, called like Liger's LigerFusedLinearCrossEntropyLoss.

    Args:
        ignore_index: The class of targets that do not count.
        reduction: "mean"; there is no other.
    """

    def __init__(self, ignore_index: int = -100, reduction: str = "mean") -> None:
        super().__init__()
        _require_mean(reduction)
        self.ignore_index, self.reduction = ignore_index, reduction

    def forward(
        self,
        lin_weight: torch.Tensor,
        _input: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `linear_cross_entropy`. A bias is not supported, and refused."""
        _require_no_bias(bias)
        return linear_cross_entropy(_input, lin_weight, target, self.ignore_index)

    def extra_repr(self) -> str:
        """What is ignored."""
        return f"ignore_index={self.ignore_index}"


def _require_mean(reduction: str) -> None:
    if reduction != "mean":
        raise ValueError(
            f'reduction = {reduction!r}: only "mean" is supported; '
            "torch.nn.functional.cross_entropy has the others"
        )


def _require_no_bias(bias: torch.Tensor | None) -> None:
    if bias is not None:
        raise ValueError(
            "a bias is not supported: use torch.nn.functional.linear and cross_entropy"
        )


def _torch(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, ignore_index: int
) -> torch.Tensor:
    loss = F.cross_entropy(F.linear(x, weight), target, ignore_index=ignore_index)
    return loss if loss.dtype is torch.float64 else loss.float()


def _loss_alone(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, ignore_index: int
) -> torch.Tensor:
    """Without gradients, over chunks of tokens; torch.compile is given it in one piece."""
    if torch.compiler.is_compiling() or x.shape[0] * weight.shape[0] <= _LOGITS:
        return _torch(x, weight, target, ignore_index)
    tokens = max(1, _LOGITS // weight.shape[0])
    losses = [
        F.cross_entropy(_wide(F.linear(h, weight)), t, ignore_index=ignore_index, reduction="sum")
        for h, t in zip(x.split(tokens), target.split(tokens), strict=True)
    ]
    return torch.stack(losses).sum() / (target != ignore_index).sum()


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype is torch.float64 else x.float()


# -- the operator ----------------------------------------------------------------------------------


def _reference(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    count = (target != ignore_index).sum()
    tokens = max(1, _LOGITS_LEARNED // max(1, weight.shape[0]))
    if x.shape[0] <= tokens:
        return _part(x, weight, target, ignore_index, count)
    loss, dx, dw = _wide(x.new_zeros(())), [], _wide(torch.zeros_like(weight))
    for h, t in zip(x.split(tokens), target.split(tokens), strict=True):
        of_loss, of_x, of_weight = _part(h, weight, t, ignore_index, count)
        loss += of_loss
        dx.append(of_x)
        dw += of_weight
    return loss, torch.cat(dx), dw.to(weight.dtype)


def _part(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    count: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Share of some tokens in a mean over `count` targets, and both gradients of that."""
    kept = target != ignore_index
    column = target.where(kept, 0)[:, None]
    log_p = torch.log_softmax(_wide(F.linear(x, weight)), -1)
    loss = -log_p.gather(1, column)[:, 0].where(kept, 0).sum() / count
    p = log_p.exp_()
    p.scatter_add_(1, column, p.new_full((1, 1), -1).expand_as(column))
    p.mul_(1 / count).masked_fill_(~kept[:, None], 0)
    dz = p.to(x.dtype)
    return loss, dz @ weight, dz.T @ x


def _fake(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dw = torch.empty_like(weight, memory_format=torch.contiguous_format)
    return x.new_empty((), dtype=wide), dx, dw


def _dims(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, ignore_index: int
) -> dict[str, int] | None:
    fits = (
        x.dim() == weight.dim() == 2
        and x.shape[1] == weight.shape[1]
        and target.shape == x.shape[:1]
        and x.dtype == weight.dtype
        and target.dtype is torch.int64
    )
    if not fits:
        return None
    tokens, hidden = x.shape
    return {"T": tokens, "D": hidden, "V": weight.shape[0], "ignore_index": ignore_index}


def _check(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, ignore_index: int) -> None:
    """Kernels write where targets say."""
    check_classes(target, weight.shape[0], ignore_index)


def _setup_context(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> None:
    _, dx, dw = output
    ctx.mark_non_differentiable(dx, dw)
    ctx.set_materialize_grads(False)
    to_x, to_weight, *_ = ctx.needs_input_grad
    ctx.save_for_backward(dx if to_x else None, dw if to_weight else None)


def _backward(
    ctx: Any, factor: torch.Tensor | None, *_: object
) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
    dx, dw = (
        None if saved is None or factor is None else scaled(saved, factor)
        for saved in ctx.saved_tensors
    )
    return dx, dw, None, None


_linear_cross_entropy = LibraryOperator(
    "linear_cross_entropy",
    "(Tensor x, Tensor weight, Tensor target, int ignore_index) -> (Tensor, Tensor, Tensor)",
    namespace=NAMESPACE,
    reference=_reference,
    fake=_fake,
    dims=_dims,
    check=_check,
    setup_context=_setup_context,
    backward=_backward,
)


# -- layers for Hugging Face `kernels` -------------------------------------------------------------


class _FusedLinearCrossEntropyLoss(nn.Module):
    """For Liger's module, where it is used without bias and options; a mean is all there is."""

    can_torch_compile = True

    def forward(
        self,
        lin_weight: torch.Tensor,
        _input: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        _require_no_bias(bias)
        ignored = getattr(self, "ignore_index", -100)
        reduction = getattr(self, "reduction", "mean")
        return linear_cross_entropy(_input, lin_weight, target, ignored, reduction)


LAYERS: dict[str, type[nn.Module]] = {"FusedLinearCrossEntropyLoss": _FusedLinearCrossEntropyLoss}
