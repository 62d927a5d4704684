"""A step of AdamW over a layer's tensors: inputs, float64 reference, what a user would call.

Every function takes the same arguments by name: of each of TENSORS the parameter, its gradient and
both moments, then the step's numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from kagent_sandbox.draws import draw_kinds, draw_moments, plant

if TYPE_CHECKING:
    from kagent_sandbox.data.case import Case

TENSORS = ("wide", "square", "gain", "bias")  # [M, N], [N, N], [N], [M]
MATRICES = ("wide", "square")  # these decay
CHUNK_ELEMENTS = 1 << 24  # float64 temporaries of the reference stay near 1 GiB


def inputs(case: Case, generator: torch.Generator, device: torch.device) -> dict[str, torch.Tensor]:
    """Draw wide: [M, N], square: [N, N], gain: [N], bias: [M], and of each grad_, exp_avg_ and
    exp_avg_sq_; lr and step.

    Parameters are normal, in half of the rows, or a vector as often as not, times 10 lr: there
    wrong updates show however small lr is, in 16 bits too. Gradients are normal times the case's
    scale; exp_avg is a tenth of that, exp_avg_sq is of the size of its square. In single elements,
    runs and rows all three are 0, as of embeddings that no token has used; elsewhere the gradient
    alone is, or both moments are. lr is from 0.02 to 0.2, or as often from 1e-6 to 0.02; step is a
    whole number from 2 to 2^24; both evenly in the logarithm. Distributions: `normal`; `first`
    (step is 1, all moments are 0); `still` (the gradients of two tensors are 0, as of layers that
    took no part in this step); `nonfinite` (NaN, +inf and -inf here and there in the gradients, as
    an overflow leaves them, and NaN elsewhere in parameters and moments, as an earlier one has left
    it: in all results NaN or infinite there, and nowhere else).
    """
    m, n = int(case.dims["M"]), int(case.dims["N"])
    dtype = getattr(torch, case.dtype)
    chance = torch.rand(3, generator=generator, device=device)
    lr = torch.where(chance[0] < 0.5, 0.02 * 10 ** chance[1], 1e-6 * 2e4 ** chance[1])
    step = (2 ** (1 + 23 * chance[2])).floor()
    drawn = {"lr": lr, "step": torch.ones_like(step) if case.inputs == "first" else step}
    still = draw_kinds(len(TENSORS), 2, generator, device).flatten().tolist()
    shapes = ((m, n), (n, n), (n,), (m,))
    for name, shape, alone in zip(TENSORS, shapes, still, strict=True):
        rows = shape[0] if len(shape) > 1 else 1
        few = draw_kinds(rows, 2, generator, device).view(-1, *(1,) * (len(shape) - 1)) == 0
        param = torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)
        drawn[name] = param.mul_(torch.where(few, 10 * lr, 1.0).to(dtype))
        if case.inputs == "nonfinite":
            plant(param, (torch.nan,), 0.02, generator)
        kind = "normal" if case.inputs == "still" and alone else case.inputs
        given = draw_moments(kind, shape, case.scale, dtype, generator, device)
        grad, exp_avg, exp_avg_sq = given
        drawn |= {
            f"grad_{name}": grad,
            f"exp_avg_{name}": exp_avg,
            f"exp_avg_sq_{name}": exp_avg_sq,
        }
    return drawn


def _stepped(
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """New values, in the precision of the tensors; the step's own numbers in float64."""
    first, second = 1 - beta1 ** step.double(), 1 - beta2 ** step.double()
    m = beta1 * exp_avg + (1 - beta1) * grad
    v = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
    size = (lr.double() / first).to(v.dtype)
    root = v.sqrt() * second.rsqrt().to(v.dtype) + eps
    kept = (1 - lr.double() * weight_decay).to(v.dtype)
    return param * kept - size * (m / root), m, v


def _of(name: str, given: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    return tuple(given[f"{kind}{name}"] for kind in ("", "grad_", "exp_avg_", "exp_avg_sq_"))


def _step_of(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    names = ("lr", "step", "beta1", "beta2", "eps")
    decay = given["weight_decay"] if name in MATRICES else 0.0
    return {**{n: given[n] for n in names}, "weight_decay": decay}


def reference(**given: Any) -> tuple[torch.Tensor, ...]:
    """New values of the parameters, then of their first and of their second moments, in float64.

    With both moments' averages m and v, divided by 1 - beta1^step and 1 - beta2^step: a parameter
    loses lr · m / (sqrt(v) + eps), and one of a matrix its share lr · weight_decay.
    """
    new = [_whole(_of(name, given), _step_of(name, given)) for name in TENSORS]
    return tuple(values[i] for i in range(3) for values in new)


def _whole(tensors: tuple[torch.Tensor, ...], step: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    new = tuple(torch.empty_like(tensors[0], dtype=torch.float64) for _ in "pmv")
    rows = max(1, CHUNK_ELEMENTS // tensors[0][0].numel())
    for start in range(0, tensors[0].shape[0], rows):
        part = slice(start, start + rows)
        found = _stepped(*(t[part].double() for t in tensors), **step)
        for whole, one in zip(new, found, strict=True):
            whole[part] = one
    return new


def reference_rows(rows: tuple[torch.Tensor, ...], **given: Any) -> tuple[torch.Tensor, ...]:
    """What `reference` has in some rows, float64; `rows` are each result's, [R] int64. Of gain and
    bias the only row is all.
    """
    found = []
    for i, at in enumerate(rows):
        name = TENSORS[i % len(TENSORS)]
        tensors = _of(name, given)
        wide = (torch.atleast_2d(t)[at].double() for t in tensors)
        found.append(_stepped(*wide, **_step_of(name, given))[i // len(TENSORS)])
    return tuple(found)


def eager(**given: Any) -> None:
    """The same in float32, operation by operation: torch.compile makes a few kernels of it."""
    for name in TENSORS:
        param, grad, exp_avg, exp_avg_sq = _of(name, given)
        wide = (t.float() for t in (param, grad, exp_avg, exp_avg_sq))
        p, m, v = _stepped(*wide, **_step_of(name, given))
        param.copy_(p)
        exp_avg.copy_(m)
        exp_avg_sq.copy_(v)


def experts() -> Mapping[str, Callable[..., None]]:
    """Torch's fused optimiser over lists; it wants parameters in the moments' dtype."""

    def fused(**given: Any) -> None:
        for names in (MATRICES, tuple(n for n in TENSORS if n not in MATRICES)):
            params, grads, exp_avgs, exp_avg_sqs = zip(*(_of(n, given) for n in names), strict=True)
            torch._fused_adamw_(
                list(params),
                list(grads),
                list(exp_avgs),
                list(exp_avg_sqs),
                [],
                [given["step"]] * len(names),
                amsgrad=False,
                maximize=False,
                **{n: v for n, v in _step_of(names[0], given).items() if n != "step"},
            )

    return {"fused": fused}
