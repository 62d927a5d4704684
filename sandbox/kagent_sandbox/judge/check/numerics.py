"""The numerics contract: a result's errors against the float64 reference, and their limits.

Three relative errors are compared with those of torch's own implementation in the same dtype:

- row: the worst row's ||out - ref|| / ||ref|| (L2). A lost tail, a constant and zeros fail here.
- element: the worst |out - ref| / (|ref| + mean |ref| of its row). One wrong element among millions
  fails here, and small ones beside a few large ones (a gradient's probabilities beside its target)
  count for what they are: their row's rms would hide them.
- bias: |<out - ref, ref>| / <ref, ref> over the whole result. Rounding cancels in it, a wrong
  scale does not: a factor of 1.001 hides below bfloat16's rounding in every single element, but
  not here.

Allowed is k times torch's error, which counts up to a quarter, plus a floor. For row and element
the floor is `floor * eps(dtype)`. For bias it is `floor * eps` times the larger of
1/sqrt(effective number of elements), what independent rounding leaves, and a constant for what
approximate exp and tanh instructions may add (see `_bias_share`), or the result's own `bias`.

Infinities and NaNs must be exactly where the reference has them. Integer results must be equal.

Not caught: an error of one part in a thousand in a result of few elements, and anything below k
times torch's own error.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from kagent_sandbox.data.verdict import CaseError

if TYPE_CHECKING:
    from kagent_sandbox.data.arguments import ResultSpec

CHUNK_ELEMENTS = {"cuda": 1 << 26, "cpu": 1 << 22}
"""Elements converted at once, by torch's name of where they lie: 256 MiB per float32 temporary on
a GPU. Elsewhere as on a CPU."""
_WIDE_EPS = 1e-4  # coarser dtypes than this are compared in float32, finer ones in float64
_TINY = 1e-300
_FEW_DIGITS = 1e-30  # no result of a task is as small but where it vanishes


@dataclass(frozen=True, slots=True)
class Errors:
    """The three relative errors of one result; `effective` elements stand behind `bias`."""

    row: float
    element: float
    bias: float
    effective: float = math.inf

    def __or__(self, other: Errors) -> Errors:
        """The larger error of each kind, the fewer elements."""
        return Errors(
            max(self.row, other.row),
            max(self.element, other.element),
            max(self.bias, other.bias),
            min(self.effective, other.effective),
        )


@dataclass(frozen=True, slots=True)
class Worst:
    """The element that is furthest off."""

    index: tuple[int, ...]
    expected: float
    got: float


def epsilon(dtype: torch.dtype) -> float:
    """Machine epsilon, 0 for integers and booleans."""
    if dtype == torch.float4_e2m1fn_x2:  # one bit of fraction; torch has no finfo of it
        return 0.5
    return float(torch.finfo(dtype).eps) if dtype.is_floating_point else 0.0


def measure_errors(
    out: torch.Tensor, ref: torch.Tensor, row_dims: int, *, effective: bool = True
) -> Errors:
    """Measure the errors of a result against the reference.

    A NaN or infinity in the wrong place gives infinite errors. No temporary is as large as a result
    of wide rows.

    Args:
        out: The result, in its own dtype.
        ref: The reference, float64 or float32, of the same shape. They are compared where it lies.
        row_dims: Number of trailing dimensions that make one row; 0 makes the whole tensor one.
        effective: Whether `Errors.effective` is worked out; only a yardstick needs it.

    Returns:
        The relative errors of docs/measuring.md: row, element and bias.
    """
    if out.numel() == 0:
        return Errors(0.0, 0.0, 0.0)
    out = out.to(ref.device)
    if not out.dtype.is_floating_point:
        wrong = bool((out != ref.to(out.dtype)).any())
        return Errors(*(3 * (math.inf if wrong else 0.0,)))
    sums = _gpu_sums if out.is_cuda and _has_kernels(out.device) else _sums
    eps = epsilon(out.dtype)
    dot, square, row, element, largest = sums(_rows(out, row_dims), _rows(ref, row_dims), eps)
    whole = max(square, out.numel() * _least_normal(out.dtype) ** 2)
    bias = abs(dot) / whole if whole > 0 else (0.0 if dot == 0 else math.inf)
    if not all(math.isfinite(v) for v in (row, element, bias)):
        row = element = bias = math.inf
    return Errors(
        row, element, bias, _effective(ref, square, largest, eps) if effective else math.inf
    )


def _effective(ref: torch.Tensor, square: float, largest: float, eps: float) -> float:
    """Effective number of elements, or a lower bound of it that is large enough: counting costs
    another pass.
    """
    least = square / largest / largest if largest > 0 else math.inf  # no overflow
    return _effective_elements(ref, largest) if least < 1 / _bias_share(eps) ** 2 else least


def _rows(t: torch.Tensor, row_dims: int) -> torch.Tensor:
    """Reshape to a matrix with the result's rows; a view where strides allow it."""
    width = math.prod(t.shape[t.dim() - row_dims :]) if row_dims and t.dim() else t.numel()
    return t.reshape(-1, max(1, width))


def _effective_elements(ref: torch.Tensor, largest: float) -> float:
    """(sum r²)² / sum r⁴ over what is finite: so many equal elements average rounding alike."""
    squares = torch.nan_to_num(ref / largest, nan=0.0, posinf=0.0, neginf=0.0).square_()
    return float(squares.sum().square() / squares.square_().sum())


# -- the sums -------------------------------------------------------------------------------------


@functools.cache
def _has_kernels(device: torch.device) -> bool:
    """Whether the kernels give on this device what torch's operations give: looked at once.

    Triton needs a C compiler and Python's headers there. Without them verdicts are the same, later.
    """
    ref = torch.linspace(-1.0, 1.0, 1000, dtype=torch.float64, device=device).reshape(10, 100)
    out = (ref * 1.001).float()
    try:
        pairs = zip(_gpu_sums(out, ref, 1e-7), _sums(out, ref, 1e-7), strict=True)
        if all(math.isclose(a, b, rel_tol=1e-9) for a, b in pairs):
            return True
        why = "they give other sums than torch's operations"
    except Exception as e:  # noqa: BLE001 - whatever a compiler or its surroundings may raise
        why = f"{type(e).__name__}: {e}"
    sys.stderr.write(f"results are compared without the judge's own kernels: {why}\n")
    return False


def _gpu_sums(out: torch.Tensor, ref: torch.Tensor, eps: float) -> Sequence[float]:
    """Compute the sums of `_sums` in two passes."""
    from kagent_sandbox.judge.check import error_kernels  # compiles for a GPU

    dtype = out.dtype
    if dtype.itemsize == 1:
        out = out.float()  # not every GPU converts float8
    square, mean, largest = error_kernels.reference_sums(ref)
    typical = float(square.mean().sqrt())
    least = least_magnitude(eps, typical, ref, dtype)
    mean.clamp_min_(least)
    dot, off, element = error_kernels.difference_sums(out, ref, mean)
    row = (off.sqrt() / square.sqrt().clamp_min(least * math.sqrt(ref.shape[1]))).amax()
    found = torch.stack([dot.sum(), square.sum(), row, element.amax(), largest.amax()])
    return cast("Sequence[float]", found.tolist())


def _sums(out: torch.Tensor, ref: torch.Tensor, eps: float) -> Sequence[float]:
    """Return sums over matrices, with d = out - ref and r the finite part of ref: <d, r>, <r, r>,
    the worst row's |d| / |r|, the worst element's share, and the largest |r|. Works in chunks of
    rows.
    """
    typical, masked = _scale(ref)
    least = least_magnitude(eps, typical, ref, out.dtype)
    # float32 is exact enough for a coarse dtype, but its squares must neither overflow nor vanish.
    narrow = eps > _WIDE_EPS and 1e-12 < typical < 1e12
    work = torch.float32 if narrow else torch.float64
    step = max(1, CHUNK_ELEMENTS.get(ref.device.type, CHUNK_ELEMENTS["cpu"]) // ref.shape[1])
    table = torch.stack(
        [
            _chunk_sums(out[i : i + step].to(work), ref[i : i + step].to(work), least, masked)
            for i in range(0, out.shape[0], step)
        ]
    )
    return [*table[:, :2].sum(0).tolist(), *table[:, 2:].amax(0).tolist()]


def _scale(ref: torch.Tensor) -> tuple[float, bool]:
    """Root mean square of the rows' norms, of what is finite; and whether anything is not."""
    norm = float(torch.linalg.vector_norm(ref, dtype=torch.float64))
    masked = not math.isfinite(norm)
    if masked:
        finite = torch.nan_to_num(ref.double(), nan=0.0, posinf=0.0, neginf=0.0)
        norm = float(torch.linalg.vector_norm(finite))
    return norm / math.sqrt(ref.shape[0]), masked


def least_magnitude(eps: float, typical: float, ref: torch.Tensor, dtype: torch.dtype) -> float:
    """The least magnitude that an element's error is relative to; a row's: times its width's root.

    Elements of a row of zeros (a masked token's gradient) are compared with their part of a typical
    row's rounding.

    Args:
        eps: Machine epsilon of the result.
        typical: Norm of a typical row.
        ref: The reference, with rows [n, width].
        dtype: Of the result.
    """
    least = max(_least_normal(dtype), torch.finfo(ref.dtype).tiny)
    return max(eps * typical / math.sqrt(ref.shape[1]), least)


def _least_normal(dtype: torch.dtype) -> float:
    """The least normal number: below it there are fewer and fewer digits, and then none.

    0 of what ends where results lie (6e-5 in float16): there torch's own error says what can be
    had.
    """
    if not dtype.is_floating_point or dtype.itemsize == 1:
        return 0.0
    least = float(torch.finfo(dtype).smallest_normal)
    return least if least < _FEW_DIGITS else 0.0


def _chunk_sums(out: torch.Tensor, ref: torch.Tensor, least: float, masked: bool) -> torch.Tensor:
    """`_sums` of rows [n, width], in their dtype. float64 [5]."""
    if masked:
        finite = torch.isfinite(ref)
        same = torch.where(ref.isnan(), out.isnan(), out == ref)
        # A NaN or infinity where it should be is no error; anywhere else it is an infinite one.
        difference = torch.where(finite, out - ref, torch.where(same, 0.0, math.inf).to(out.dtype))
        ref = torch.where(finite, ref, torch.zeros((), dtype=ref.dtype, device=ref.device))
    else:
        difference = out - ref
    norm = torch.linalg.vector_norm(ref, dim=1).double()
    denominator = norm.clamp_min(least * math.sqrt(ref.shape[1]))
    worst_row = (torch.linalg.vector_norm(difference, dim=1).double() / denominator).amax()
    dot = torch.linalg.vecdot(difference, ref).double().sum()
    square = norm.square().sum()
    magnitude = ref.abs()
    largest = magnitude.amax().double()
    magnitude += magnitude.mean(dim=1, keepdim=True).clamp_min_(least)
    worst_element = difference.abs_().div_(magnitude).amax().double()
    return torch.stack([dot, square, worst_row, worst_element, largest])


def typical_norm(result: torch.Tensor, row_dims: int) -> float:
    """Root mean square norm of a result's rows, of what is finite."""
    if result.dtype.itemsize == 1 or not result.dtype.is_floating_point:
        result = result.double()  # torch computes nothing in 8 bits, and no norm of whole numbers
    return _scale(_rows(result, row_dims))[0] if result.numel() else 0.0


def element_errors(
    out: torch.Tensor, expected: torch.Tensor, magnitude: torch.Tensor
) -> torch.Tensor:
    """|out - expected| / magnitude of single elements, float64.

    Infinite where a NaN or an infinity is not where it should be, and where integers differ.

    Args:
        out: Elements in the result's own dtype, [n].
        expected: What the reference has there, [n], float64 or of the result's kind.
        magnitude: What the error is relative to, [n] float64.
    """
    if not out.dtype.is_floating_point:
        return torch.where(out == expected.to(out.dtype), 0.0, math.inf).double()
    wide = out.double()
    same = torch.where(expected.isnan(), wide.isnan(), wide == expected)
    off = torch.where(same, 0.0, math.inf).double()
    both = torch.isfinite(expected) & torch.isfinite(wide)
    return torch.where(both, (wide - expected).abs() / magnitude, off)


# -- the contract ---------------------------------------------------------------------------------


def _bias_share(eps: float) -> float:
    """Part of eps by which a whole result's scale may be off, beside independent rounding.

    bfloat16 1/32: 2.4e-4, so that 1e-3 fails and tanh.approx (2^-11 at worst, far less on average)
    passes; float16 1/8: 1.2e-4, for the same instruction; float32 and finer 4: 4.8e-7, for
    ex2.approx.
    """
    if eps > 2e-3:
        return 1 / 32
    return 1 / 8 if eps > _WIDE_EPS else 4.0


MOST_TORCH_ERROR = 0.25
"""Torch's largest error that counts. A larger one, by an overflow for example, is no measure for
others.
"""


def allowed(torch_errors: Errors, result: ResultSpec, dtype: torch.dtype) -> Errors:
    """Return the errors that a candidate may have: `k` times torch's own plus `floor` epsilons.

    Args:
        torch_errors: Torch's errors on the same inputs.
        result: The task's tolerance.
        dtype: Dtype of the result.
    """
    eps = epsilon(dtype)
    floor = result.floor * eps
    # Rounding errs uniformly within eps/2: 0.2 eps on average over binades, so this is 3.5 sigma.
    independent = 0.7 / math.sqrt(max(1.0, torch_errors.effective))
    row, element, bias = (
        result.k * min(error, MOST_TORCH_ERROR)
        for error in (torch_errors.row, torch_errors.element, torch_errors.bias)
    )
    return Errors(
        row=row + floor,
        element=element + floor,
        bias=bias + floor * max(independent, _bias_share(eps), result.bias),
    )


def most_allowed(result: ResultSpec, dtype: torch.dtype) -> Errors:
    """Return the errors that a candidate may have on any inputs, however much torch errs there."""
    most = Errors(MOST_TORCH_ERROR, MOST_TORCH_ERROR, MOST_TORCH_ERROR, effective=1.0)
    return allowed(most, result, dtype)


def share(errors: Errors, limit: Errors) -> float:
    """Worst of the three errors over what is allowed; the contract holds when it is at most 1."""
    return max(
        _over(errors.row, limit.row),
        _over(errors.element, limit.element),
        _over(errors.bias, limit.bias),
    )


def _over(error: float, limit: float) -> float:
    if error == 0:
        return 0.0
    return error / limit if limit > 0 else math.inf


def case_error(
    case: str, result: ResultSpec, errors: Errors, torch_errors: Errors, dtype: torch.dtype
) -> CaseError:
    """Make the record of one result in one case.

    Args:
        case: Name of the case.
        result: The task's tolerance.
        errors: The candidate's errors.
        torch_errors: Torch's errors on the same inputs.
        dtype: Dtype of the result.
    """
    return CaseError(
        case=case,
        output=result.name,
        row=errors.row,
        element=errors.element,
        bias=errors.bias,
        torch_row=torch_errors.row,
        torch_element=torch_errors.element,
        torch_bias=torch_errors.bias,
        share_of_tolerance=share(errors, allowed(torch_errors, result, dtype)),
    )


def find_worst(out: torch.Tensor, ref: torch.Tensor) -> Worst:
    """The element that is furthest off, by |out - ref| / (|ref| + mean |ref|); misplaced NaN and
    infinity first.
    """
    o, r = out.to(ref.device).reshape(-1).double(), ref.reshape(-1).double()
    finite = torch.isfinite(r)
    same = torch.where(r.isnan(), o.isnan(), o == r)
    zero = torch.zeros((), dtype=r.dtype, device=r.device)
    mean = torch.where(finite, r, zero).abs().mean().clamp_min(_TINY)
    off = (o - r).abs() / (r.abs() + mean)
    off = torch.where(finite & torch.isfinite(o), off, torch.where(same, 0.0, math.inf))
    at = int(off.argmax())
    index: list[int] = []
    rest = at
    for n in reversed(out.shape):
        index.append(rest % n)
        rest //= n
    return Worst(tuple(reversed(index)), float(r[at]), float(o[at]))


def tolerance_text(result: ResultSpec, source: str) -> str:
    """Tolerance of a result, and the file that sets it."""
    return f"k = {result.k:g} times torch's + floor = {result.floor:g} eps, from {source}"


def describe(error: CaseError, limit: Errors, worst: Worst, result: ResultSpec, source: str) -> str:
    """Describe an error in one paragraph for the next attempt.

    Args:
        error: The candidate's errors and torch's.
        limit: The allowed errors.
        worst: The worst element.
        result: The task's tolerance.
        source: The file that it comes from.
    """
    names = {"row": (error.row, error.torch_row, limit.row)}
    names["element"] = (error.element, error.torch_element, limit.element)
    names["bias"] = (error.bias, error.torch_bias, limit.bias)
    name, (value, torch_value, most) = max(names.items(), key=lambda n: _over(n[1][0], n[1][2]))
    what = {
        "row": "worst row's L2 error over its norm",
        "element": "worst element's error over its magnitude plus its row's mean",
        "bias": "scale error of the whole result",
    }[name]
    index = ", ".join(str(i) for i in worst.index)
    own = f"torch's own {torch_value:.3g}"
    if torch_value > MOST_TORCH_ERROR:
        own += f", more than the {MOST_TORCH_ERROR:g} that counts"
    return (
        f"result {error.output}: {what} is {value:.3g}, allowed {most:.3g} "
        f"({own}; {tolerance_text(result, source)}); "
        f"worst element [{index}]: "
        f"expected {worst.expected:.6g}, got {worst.got:.6g}"
    )
