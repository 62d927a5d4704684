"""A step of AdamW in place: inputs, float64 reference, and what a user would call instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from kagent_sandbox.draws import draw_kinds, draw_moments, plant

if TYPE_CHECKING:
    from kagent_sandbox.data.case import Case

CHUNK_ELEMENTS = 1 << 24  # float64 temporaries of the reference stay near 1 GiB


def inputs(case: Case, generator: torch.Generator, device: torch.device) -> dict[str, torch.Tensor]:
    """Draw param and grad: [M, N] in the case's dtype; exp_avg and exp_avg_sq: [M, N]; lr and step.

    param is normal, in half of the rows times 10 lr: there wrong updates show however small lr is,
    in 16 bits too. grad is normal times the case's scale; exp_avg is a tenth of that, exp_avg_sq is
    of the size of its square. In single elements, runs and rows all three are 0, as of embeddings
    that no token has used; elsewhere grad alone is, or both moments are. lr is from 0.02 to 0.2, or
    as often from 1e-6 to 0.02; step is a whole number from 2 to 2^24; both evenly in the logarithm.
    Distributions: `normal`; `first` (step is 1, both moments are 0); `still` (grad is 0, as of a
    layer that took no part in this step); `nonfinite` (NaN, +inf and -inf here and there in grad,
    as an overflow leaves them, and NaN elsewhere in param and in both moments, as an earlier one
    has left it: in all results NaN or infinite there, and nowhere else).
    """
    shape = (int(case.dims["M"]), int(case.dims["N"]))
    dtype = getattr(torch, case.dtype)
    chance = torch.rand(3, generator=generator, device=device)
    lr = torch.where(chance[0] < 0.5, 0.02 * 10 ** chance[1], 1e-6 * 2e4 ** chance[1])
    step = (2 ** (1 + 23 * chance[2])).floor()
    if case.inputs == "first":
        step.fill_(1.0)
    param = torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)
    few = draw_kinds(shape[0], 2, generator, device) == 0
    param.mul_(torch.where(few, 10 * lr, 1.0).to(dtype))
    given = draw_moments(case.inputs, shape, case.scale, dtype, generator, device)
    grad, exp_avg, exp_avg_sq = given
    if case.inputs == "nonfinite":
        plant(param, (torch.nan,), 0.02, generator)
    return {
        "param": param,
        "grad": grad,
        "exp_avg": exp_avg,
        "exp_avg_sq": exp_avg_sq,
        "lr": lr,
        "step": step,
    }


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


def reference(
    *,
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
    """New values of param, exp_avg and exp_avg_sq, [M, N] each, in float64.

    With both moments' averages m and v, divided by 1 - beta1^step and 1 - beta2^step: param loses
    its share lr · weight_decay, and lr · m / (sqrt(v) + eps).
    """
    tensors = (param, grad, exp_avg, exp_avg_sq)
    new = tuple(torch.empty(param.shape, dtype=torch.float64, device=param.device) for _ in "pmv")
    rows = max(1, CHUNK_ELEMENTS // param.shape[1])
    for start in range(0, param.shape[0], rows):
        part = slice(start, start + rows)
        wide = (t[part].double() for t in tensors)
        found = _stepped(*wide, lr, step, beta1, beta2, eps, weight_decay)
        for whole, one in zip(new, found, strict=True):
            whole[part] = one
    return new


def reference_rows(
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
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
) -> tuple[torch.Tensor, ...]:
    """What `reference` has in some rows, [R, N] float64; `rows` are each result's, [R] int64."""
    tensors = (param, grad, exp_avg, exp_avg_sq)
    found = []
    for i, at in enumerate(rows):
        wide = (t[at].double() for t in tensors)
        found.append(_stepped(*wide, lr, step, beta1, beta2, eps, weight_decay)[i])
    return tuple(found)


def eager(
    *,
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
    """The same in float32, operation by operation: torch.compile makes one kernel of it."""
    wide = (t.float() for t in (param, grad, exp_avg, exp_avg_sq))
    p, m, v = _stepped(*wide, lr, step, beta1, beta2, eps, weight_decay)
    param.copy_(p)
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)


def experts() -> Mapping[str, Callable[..., None]]:
    """Torch's fused optimiser; it wants parameters in the moments' dtype."""

    def fused(
        *,
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
        torch._fused_adamw_(
            [param],
            [grad],
            [exp_avg],
            [exp_avg_sq],
            [],
            [step],
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=weight_decay,
            eps=eps,
            amsgrad=False,
            maximize=False,
        )

    return {"fused": fused}
