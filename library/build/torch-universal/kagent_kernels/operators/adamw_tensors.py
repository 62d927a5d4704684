"""AdamW in place over many tensors.

    fused_adamw(params, grads, exp_avgs, exp_avg_sqs, lr=lr, step=step)    # any number of tensors
    adamw_tensors(wide, square, gain, bias, grad_wide, ...)                # one layer

Parameters are of any floating-point dtype, gradients of theirs, both moments of float32. Matrices
decay, vectors do not. Kernels know a layer of four tensors: `fused_adamw` puts tensors together to
such layers, and steps the others with torch. Neither has a gradient: call them under
torch.no_grad(), as optimisers do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .._about import NAMESPACE
from .._library import LibraryOperator, plain, wants_gradient

__all__ = ["adamw_tensors", "fused_adamw"]

_TENSORS = ("wide", "square", "gain", "bias")  # [M, N], [N, N], [N], [M]
_KINDS = ("", "grad_", "exp_avg_", "exp_avg_sq_")
_NUMBERS = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}  # the task's
_COUNT = len(_KINDS) * len(_TENSORS)


def fused_adamw(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    *,
    lr: torch.Tensor,
    step: torch.Tensor,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
) -> None:
    """Step parameters and both of their moments, in place.

    A kernel takes a matrix [M, N], another one [N, N], and vectors [N] and [M], all of one dtype;
    as many such layers as there are among the parameters are stepped by it.

    No gradient: call it under torch.no_grad(), as optimisers do.

    Args:
        params: Tensors of any shapes.
        grads: Their gradients, of the same shapes and dtypes.
        exp_avgs: First moments, float32.
        exp_avg_sqs: Second moments, float32.
        lr: Learning rate: a float32 scalar on the parameters' device.
        step: Number of the step, 1 in the first one: a float32 scalar there.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Is added to the root of the second moment.
        weight_decay: Of parameters with two dimensions or more; others do not decay.

    Raises:
        ValueError: The sequences are of different lengths.
    """
    lists = params, grads, exp_avgs, exp_avg_sqs
    if len({*map(len, lists)}) > 1:
        counts = ", ".join(str(len(each)) for each in lists)
        raise ValueError(
            "fused_adamw expects as many gradients and moments as parameters, and was given "
            f"{counts}"
        )
    left = set(range(len(params)))
    for layer in _layers(params):
        left -= {*layer}
        tensors = (each[i] for each in lists for i in layer)
        adamw_tensors(*tensors, lr, step, beta1, beta2, eps, weight_decay)
    _refuse_gradients(each[i] for each in lists for i in left)
    for i in sorted(left):
        decay = weight_decay if params[i].dim() > 1 else 0.0
        _step(*(each[i] for each in lists), lr, step, beta1, beta2, eps, decay)


def adamw_tensors(
    wide: torch.Tensor,
    square: torch.Tensor,
    gain: torch.Tensor,
    bias: torch.Tensor,
    grad_wide: torch.Tensor,
    grad_square: torch.Tensor,
    grad_gain: torch.Tensor,
    grad_bias: torch.Tensor,
    exp_avg_wide: torch.Tensor,
    exp_avg_square: torch.Tensor,
    exp_avg_gain: torch.Tensor,
    exp_avg_bias: torch.Tensor,
    exp_avg_sq_wide: torch.Tensor,
    exp_avg_sq_square: torch.Tensor,
    exp_avg_sq_gain: torch.Tensor,
    exp_avg_sq_bias: torch.Tensor,
    lr: torch.Tensor,
    step: torch.Tensor,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
) -> None:
    """Step a layer's parameters and moments, in place; the matrices decay.

    No gradient: call it under torch.no_grad(), as optimisers do.

    Args:
        wide: [M, N].
        square: [N, N], of the dtype of `wide`, as the next two.
        gain: [N].
        bias: [M].
        grad_wide: Of the shape and dtype of `wide`; the next three likewise.
        grad_square: See above.
        grad_gain: See above.
        grad_bias: See above.
        exp_avg_wide: First moment of `wide`, float32; the next three likewise.
        exp_avg_square: See above.
        exp_avg_gain: See above.
        exp_avg_bias: See above.
        exp_avg_sq_wide: Second moment of `wide`, float32; the next three likewise.
        exp_avg_sq_square: See above.
        exp_avg_sq_gain: See above.
        exp_avg_sq_bias: See above.
        lr: Learning rate: a float32 scalar on the same device.
        step: Number of the step, 1 in the first one: a float32 scalar there.
        beta1: Kernels have the defaults of all four numbers; others go to torch.
        beta2: See above.
        eps: See above.
        weight_decay: Of both matrices.
    """
    # fmt: off
    tensors = (
        wide, square, gain, bias, grad_wide, grad_square, grad_gain, grad_bias,
        exp_avg_wide, exp_avg_square, exp_avg_gain, exp_avg_bias,
        exp_avg_sq_wide, exp_avg_sq_square, exp_avg_sq_gain, exp_avg_sq_bias, lr, step,
    )
    # fmt: on
    _refuse_gradients(tensors)
    ours = plain(*tensors) and _adamw_tensors.is_large(*tensors)
    (_adamw_tensors if ours else _reference)(*tensors, beta1, beta2, eps, weight_decay)


def _layers(params: Sequence[torch.Tensor]) -> Iterator[tuple[int, int, int, int]]:
    """Positions of tensors that make a layer: wide, square, gain, bias. None is in two."""
    alike: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for i, p in enumerate(params):
        alike[(p.dtype, p.device, *p.shape)].append(i)
    matrices = [i for i, p in enumerate(params) if p.dim() == 2]
    # Square ones last: others need them.
    for i in sorted(matrices, key=lambda i: params[i].shape[0] == params[i].shape[1]):
        kind, (m, n) = (params[i].dtype, params[i].device), params[i].shape
        wanted = [(*kind, m, n), (*kind, n, n), (*kind, n), (*kind, m)]
        if i in alike[wanted[0]] and all(len(alike[w]) >= wanted.count(w) for w in wanted):
            alike[wanted[0]].remove(i)
            square, gain, bias = (alike[w].pop(0) for w in wanted[1:])
            yield i, square, gain, bias


def _refuse_gradients(tensors: Any) -> None:
    if wants_gradient(*tensors):
        raise NotImplementedError("AdamW has no gradient here: call it under torch.no_grad()")


def _step(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    lr: torch.Tensor,
    step: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Step one tensor in float32, or its wider dtype, with torch; the step's own numbers are of
    float64.
    """
    wide = torch.promote_types(param.dtype, torch.float32)
    first, second = 1 - beta1 ** step.double(), 1 - beta2 ** step.double()
    g = grad.to(wide)
    m = beta1 * exp_avg.to(wide) + (1 - beta1) * g
    v = beta2 * exp_avg_sq.to(wide) + (1 - beta2) * g * g
    root = v.sqrt() * second.rsqrt().to(wide) + eps
    kept = (1 - lr.double() * weight_decay).to(wide)
    param.copy_(param.to(wide) * kept - (lr.double() / first).to(wide) * (m / root))
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)


# -- the operator ----------------------------------------------------------------------------------


def _reference(*args: Any) -> None:
    tensors, (lr, step, beta1, beta2, eps, weight_decay) = args[:_COUNT], args[_COUNT:]
    for i, name in enumerate(_TENSORS):
        decay = weight_decay if name in ("wide", "square") else 0.0
        _step(*tensors[i :: len(_TENSORS)], lr, step, beta1, beta2, eps, decay)


def _fake(*_: Any) -> None:
    return None


def _dims(*args: Any) -> dict[str, int] | None:
    tensors, scalars, numbers = args[:_COUNT], args[_COUNT : _COUNT + 2], args[_COUNT + 2 :]
    if tensors[0].dim() != 2 or numbers != tuple(_NUMBERS.values()):
        return None
    (m, n), dtype = tensors[0].shape, tensors[0].dtype
    shapes = ((m, n), (n, n), (n,), (m,)) * len(_KINDS)
    dtypes = (dtype,) * (_COUNT // 2) + (torch.float32,) * (_COUNT // 2)
    fits = all(
        t.shape == shape and t.dtype is kind
        for t, shape, kind in zip(tensors, shapes, dtypes, strict=True)
    ) and all(t.dim() == 0 and t.dtype is torch.float32 for t in scalars)
    return {"M": m, "N": n} if fits else None


def _schema() -> str:
    names = [f"{kind}{name}" for kind in _KINDS for name in _TENSORS]
    written = (f"Tensor(a{i}!)" if "grad_" not in n else "Tensor" for i, n in enumerate(names))
    tensors = [f"{kind} {name}" for kind, name in zip(written, names, strict=True)]
    scalars = ["Tensor lr", "Tensor step", *(f"float {n}" for n in _NUMBERS)]
    return f"({', '.join([*tensors, *scalars])}) -> ()"


_adamw_tensors = LibraryOperator(
    "adamw_tensors",
    _schema(),
    namespace=NAMESPACE,
    reference=_reference,
    fake=_fake,
    dims=_dims,
)

# -- layers for Hugging Face `kernels`: a step of an optimiser is none -----------------------------

LAYERS: dict[str, type[torch.nn.Module]] = {}
