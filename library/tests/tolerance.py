"""How far a result is from the float64 reference, and how far it may be: kagent's contract.

Three relative errors, each against what torch's own implementation errs on the same inputs:

- row: the worst row's ||out - ref|| / ||ref||;
- element: the worst |out - ref| / (|ref| + mean |ref| of its row);
- bias: |<out - ref, ref>| / <ref, ref> over the whole result.

Allowed is k times torch's error plus a floor in machine epsilons. Infinities and NaNs must be
exactly where the reference has them; integers must be equal.
"""

import math
from dataclasses import dataclass

import torch

CHUNK = 1 << 24  # elements converted at once
TINY = 1e-300


@dataclass(frozen=True)
class Errors:
    """Of one result; `effective` elements stand behind `bias`."""

    row: float
    element: float
    bias: float
    effective: float = math.inf


def measure(out: torch.Tensor, ref: torch.Tensor, row_dims: int) -> Errors:
    """Errors of `out` against `ref`; `row_dims` trailing dimensions make a row, 0: all of them."""
    assert out.shape == ref.shape, f"shape {list(out.shape)}, expected {list(ref.shape)}"
    if out.numel() == 0:
        return Errors(0.0, 0.0, 0.0)
    if not out.dtype.is_floating_point:
        wrong = math.inf if bool((out != ref.to(out.dtype)).any()) else 0.0
        return Errors(wrong, wrong, wrong)
    width = math.prod(ref.shape[ref.dim() - row_dims :]) if row_dims and ref.dim() else ref.numel()
    o, r = out.reshape(-1, max(1, width)), ref.reshape(-1, max(1, width))
    step = max(1, CHUNK // r.shape[1])
    pairs = [(o[i : i + step], r[i : i + step]) for i in range(0, r.shape[0], step)]
    norms = [float(torch.linalg.vector_norm(_finite(ref.double()))) for _, ref in pairs]
    typical = math.hypot(*norms) / math.sqrt(r.shape[0])
    eps = torch.finfo(out.dtype).eps
    table = torch.stack([_chunk(out.double(), ref.double(), typical, eps) for out, ref in pairs])
    dot, square, fourth = table[:, :3].sum(0).tolist()
    row, element = table[:, 3:].amax(0).tolist()
    bias = abs(dot) / square if square > 0 else (0.0 if dot == 0 else math.inf)
    if not all(math.isfinite(v) for v in (row, element, bias)):
        return Errors(math.inf, math.inf, math.inf)
    return Errors(row, element, bias, square**2 / fourth if fourth > 0 else math.inf)


def _finite(values: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)


def _chunk(out: torch.Tensor, ref: torch.Tensor, typical: float, eps: float) -> torch.Tensor:
    """Of rows [n, width]: <d, r>, <r, r>, sum r^4, worst row, worst element. float64 [5]."""
    finite = torch.isfinite(ref)
    same = torch.where(ref.isnan(), out.isnan(), out == ref)
    off = torch.where(finite, out - ref, torch.where(same, 0.0, math.inf).double())
    ref = _finite(ref)
    norm = torch.linalg.vector_norm(ref, dim=1)
    # A row of zeros is measured against the rounding of a typical row.
    row = (torch.linalg.vector_norm(off, dim=1) / norm.clamp_min(max(eps * typical, TINY))).amax()
    least = max(eps * typical / math.sqrt(ref.shape[1]), TINY)
    magnitude = ref.abs() + ref.abs().mean(dim=1, keepdim=True).clamp_min(least)
    element = (off.abs() / magnitude).amax()
    fourth = ref.square().square_().sum()
    return torch.stack([(off * ref).sum(), norm.square().sum(), fourth, row, element])


def allowed(
    torch_errors: Errors, dtype: torch.dtype, *, k: float, floor: float, bias: float
) -> Errors:
    """What a result may err, given what torch errs on the same inputs."""
    eps = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    # Approximate exp and tanh instructions shift a whole result: by so much of an epsilon.
    instructions = 1 / 32 if eps > 2e-3 else 1 / 8 if eps > 1e-4 else 4.0
    rounding = 0.7 / math.sqrt(max(1.0, torch_errors.effective))
    return Errors(
        row=k * torch_errors.row + floor * eps,
        element=k * torch_errors.element + floor * eps,
        bias=k * torch_errors.bias + floor * eps * max(rounding, instructions, bias),
    )


def share(errors: Errors, limit: Errors) -> float:
    """Worst of the three errors over what is allowed: it holds when this is at most 1."""
    pairs = ((errors.row, limit.row), (errors.element, limit.element), (errors.bias, limit.bias))
    return max(0.0 if e == 0 else e / most if most > 0 else math.inf for e, most in pairs)
