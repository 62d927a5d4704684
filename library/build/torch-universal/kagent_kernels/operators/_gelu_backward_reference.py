"""Gradient of GELU in its tanh form: inputs, float64 reference, and what a user would call."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kagent_sandbox.data.case import Case


def draw_kinds(
    rows: int, count: int, generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    """Draw a kind for each row, all kinds as often, but for one row more or less.

    Args:
        rows: Number of rows, M.
        count: Number of kinds. Of fewer rows each has another kind, any of them.
        generator: The source of chance.
        device: Where the result is.

    Returns:
        [M, 1] int64, from 0 to `count - 1`.

    Example:
        Draw one of 4 kinds for each of 10 rows:

            import torch

            cpu = torch.device("cpu")
            generator = torch.Generator(cpu).manual_seed(0)
            kinds = draw_kinds(10, 4, generator, cpu)
            assert kinds.shape == (10, 1)
            assert sorted(kinds.flatten().bincount().tolist()) == [2, 2, 3, 3]
    """
    order = torch.randperm(rows, generator=generator, device=device)
    first = torch.randint(count, (), generator=generator, device=device)
    return ((order + first) % count).unsqueeze(1)


def draw_rows(
    rows: int, one_of: int, generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    """Choose one row of `one_of`, at least one of all.

    Args:
        rows: Number of rows, M.
        one_of: Rows for each one that is chosen.
        generator: The source of chance.
        device: Where the result is.

    Returns:
        [M, 1] bool, true for M / `one_of` rows, rounded up.

    Example:
        Choose rows that get a NaN:

            import torch

            cpu = torch.device("cpu")
            generator = torch.Generator(cpu).manual_seed(0)
            assert draw_rows(12, 8, generator, cpu).sum() == 2
            assert draw_rows(1, 8, generator, cpu).all()
    """
    order = torch.randperm(rows, generator=generator, device=device)
    return (order % one_of == 0).unsqueeze(1)


def plant(
    tensor: torch.Tensor,
    values: Sequence[float],
    share: float,
    generator: torch.Generator,
    *,
    where: torch.Tensor | None = None,
) -> None:
    """Overwrite some elements of a tensor in place, at least one of them.

    Args:
        tensor: Any shape, of numbers of 16 bits or more; with no elements it stays as it is.
        values: They are written, each as likely as the others.
        share: Of the elements, from 0 to 1.
        generator: The source of chance, on the tensor's device.
        where: Places that may be overwritten, bool of the tensor's shape; all of them by default,
            and one anywhere where it allows none.

    Example:
        Plant infinities and NaN among gradients:

            import math

            import torch

            generator = torch.Generator().manual_seed(0)
            grad = torch.zeros(8, 3)
            plant(grad, (math.inf, math.nan), 0.05, generator)
            assert not grad.isfinite().all()
    """
    if not tensor.numel():
        return
    shape, device = tensor.shape, tensor.device
    position = torch.rand(shape, generator=generator, device=device)
    if where is not None:
        position.masked_fill_(~where, 1.0)
    position.view(-1)[position.argmin()] = -1.0
    which = torch.randint(len(values), shape, generator=generator, device=device)
    for i, value in enumerate(values):
        tensor.masked_fill_((position < share) & (which == i), value)


def draw_huge(
    shape: Sequence[int],
    most: float,
    dtype: torch.dtype,
    generator: torch.Generator,
    device: torch.device,
) -> torch.Tensor:
    """Draw large finite numbers of both signs, up to a largest one.

    Each row has a power of two of its own, evenly from 2^10 to the largest number's; of a quarter
    of the rows, some elements are the largest number, or its negative.

    Args:
        shape: M rows and N columns.
        most: The largest number, 2^11 or more.
        dtype: Of the result.
        generator: The source of chance.
        device: Where the result is.

    Returns:
        [M, N] in `dtype`.

    Example:
        Draw up to the largest number of bfloat16:

            import torch

            cpu = torch.device("cpu")
            generator = torch.Generator(cpu).manual_seed(0)
            largest = torch.finfo(torch.bfloat16).max
            x = draw_huge((8, 64), largest, torch.bfloat16, generator, cpu)
            assert x.isfinite().all()
            assert x.abs().min() >= 2.0**10
            assert x.max() == largest or x.min() == -largest
    """
    rows, columns = shape
    order = torch.randperm(rows, generator=generator, device=device, dtype=torch.float64)
    share = (order / max(1, rows - 1)).unsqueeze(1)
    power = 10 + (math.log2(most) - 11) * (share if rows > 1 else share + 1)
    size = torch.rand((2, rows, columns), generator=generator, device=device, dtype=torch.float64)
    wide = power.exp2() * (1 + size[0]) * torch.where(size[1] < 0.5, -1.0, 1.0)
    huge = wide.clamp(-most, most).to(dtype)  # rounded up, none may be an infinity
    huge.clamp_(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    where = draw_rows(rows, 4, generator, device).expand(rows, columns)
    plant(huge, (most, -most), 1 / 64, generator, where=where)
    return huge


CHUNK_ELEMENTS = 1 << 25  # float64 temporaries of the reference stay near 2 GiB
FEW = 64  # columns
HUGE = 2.0**62  # where a square overflows, torch has NaN


def inputs(case: Case, generator: torch.Generator, device: torch.device) -> dict[str, torch.Tensor]:
    """Draw x: [M, N], the input of GELU, times the case's scale; and grad: [M, N], of its result.

    grad is normal, in rows of less than FEW columns from 1 to 2 or -2 to -1, times a power of two
    from 2^-27 to 2^13 (from 1 to 2^6 in float16, which has few small numbers). Distributions of x:
    `normal`; `ramp` (from -8 to 8 along each row: where the derivative is 0, is negative, exceeds
    1, is 1); `subnormal` (numbers too small to be normal); `huge` (each row has a power of its own,
    from 2^10 to that of HUGE, or of float16's largest number: the derivative is 1 or 0); `mixed`
    (each row has a power of its own, and is normal, rising or falling from -8 to 8, zeros, or a few
    values again and again; in some rows grad is 0). `nonfinite` is `mixed` with +inf, -inf and NaN
    here and there in grad, where x is positive, and NaN in x.
    """
    shape = (int(case.dims["M"]), int(case.dims["N"]))
    dtype = getattr(torch, case.dtype)
    grad = torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)
    few = shape[1] < FEW
    if few:
        # Where the derivative vanishes an element's error is relative to its row's mean. Were all
        # others of a few small by chance, it would be all that torch and a kernel err by.
        grad.clamp_(-1, 1).add_(torch.ones_like(grad).copysign_(grad))
    least, most = (0, 6) if dtype == torch.float16 else (-27, 13)
    sizes = shape[0] if case.inputs in ("mixed", "nonfinite") else 1
    power = torch.randint(least, most + 1, (sizes, 1), generator=generator, device=device)
    grad.mul_(torch.exp2(power.float()).to(dtype))

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=torch.float32)

    if case.inputs == "normal":  # in one pass: every timed execution has such inputs of its own
        x = torch.empty(shape, dtype=dtype, device=device)
        x.normal_(0.0, case.scale, generator=generator)
        if few:
            x[:, 0].abs_()
        return {"grad": grad, "x": x}
    if case.inputs == "huge":
        most = min(HUGE * case.scale, torch.finfo(dtype).max)
        return {"grad": grad, "x": draw_huge(shape, most, dtype, generator, device)}
    ramp = torch.linspace(8, -8, shape[1], device=device)
    if case.inputs == "ramp":
        x = ramp.flip(0) + 0.1 * normal(shape[0], 1)
    elif case.inputs == "subnormal":
        x = normal(*shape) * (torch.finfo(dtype).smallest_normal / 8)
    elif case.inputs in ("mixed", "nonfinite"):
        x = normal(*shape)
        kind = draw_kinds(shape[0], 6, generator, device)
        for i, other in enumerate((ramp, ramp.flip(0), x * 0, x.round() + 0.5)):
            x = torch.where(kind == i, other, x)
        # Where the derivative vanishes torch itself errs by percents, and rows of nothing else
        # would allow as much: one value of each row is positive.
        column = torch.randint(shape[1], (shape[0], 1), generator=generator, device=device)
        x.scatter_(1, column, x.gather(1, column).abs() + 0.5)
        grad.masked_fill_(kind == 5, 0.0)
    else:
        raise ValueError(f"gelu_backward knows no distribution {case.inputs!r}")
    x = (x * case.scale).to(dtype).contiguous()
    if case.inputs == "nonfinite":
        plant(grad, (torch.inf, -torch.inf, torch.nan), 0.06, generator, where=x > 0)
        plant(x, (torch.nan,), 0.03, generator)  # at an infinity torch gives NaN, its limit is 1
    return {"grad": grad, "x": x}


def reference(*, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The product of grad and the derivative of x · s, in float64, [M, N].

    s = sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x³). The derivative is s + x · s (1 - s) · 2u'.
    1 - s is sigmoid(-2u): no digits cancel.
    """
    dx = torch.empty(x.shape, dtype=torch.float64, device=x.device)
    rows = max(1, CHUNK_ELEMENTS // x.shape[1])
    for g, source, result in zip(grad.split(rows), x.split(rows), dx.split(rows), strict=True):
        wide = source.double()
        twice_u = (8 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3)
        s, rest = torch.sigmoid(twice_u), torch.sigmoid(-twice_u)
        slope = (8 / torch.pi) ** 0.5 * (1 + 3 * 0.044715 * wide**2)
        torch.mul(g, s + wide * slope * s * rest, out=result)
    return dx


def reference_rows(
    rows: tuple[torch.Tensor], *, grad: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    """What `reference` has in some rows, [R, N] float64; `rows` are their numbers, [R] int64."""
    return reference(grad=grad[rows[0]], x=x[rows[0]])


def eager(*, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Torch's own kernel, [M, N] in x's dtype."""
    return torch.ops.aten.gelu_backward(grad, x, approximate="tanh")


def experts() -> Mapping[str, Callable[..., torch.Tensor]]:
    """None: no expert library offers it alone."""
    return {}
