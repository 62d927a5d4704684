"""Operations as loops that Inductor can write, where it would call a library or be less exact."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from kagent_sandbox.builder.policy import allows
from kagent_sandbox.data.kind import Kind
from torch import Tensor

from kagent.authoring.inductor.convolution_numbers import ConvolutionNumbers, for_each
from kagent.authoring.inductor.transposed_convolution import without_transposition
from kagent.authoring.inductor.window_products import window_products

aten = torch.ops.aten
_MOST_OF_A_WINDOW = 25  # that Inductor has a mean for
_LEAST_ROWS = 8  # of a convolution's results, that `tl.dot` is worth it for


def plain_loops(
    kind: Kind, allow: Collection[str], *, finite: bool = True
) -> Mapping[Any, Callable[..., Any]]:
    """Decompositions by overload.

    Args:
        kind: "gpu": products of matrices stay, which become `tl.dot`. "cpu": they become sums.
        allow: The torch operations that the task allows: a library is called for them.
        finite: Whether all inputs are finite: infinity times a 0 that fills a window up is NaN.
    """
    table: dict[Any, Callable[..., Any]] = {
        aten._softmax_backward_data.default: _softmax_backward,  # noqa: SLF001 - torch's own name
        aten.logical_not.default: lambda x: x == 0,
        aten.topk.default: _topk,
        aten.avg_pool2d.default: functools.partial(_average_pool, 2),
        aten.avg_pool3d.default: functools.partial(_average_pool, 3),
        aten.index_select.default: _index_select,
        aten.sort.default: _sort,
        aten.sort.stable: lambda x, dim=-1, descending=False, **_: _sort(x, dim, descending),
    }
    convolution = functools.partial(_convolution, finite=finite)
    library: dict[Any, Callable[..., Any]] = {aten.convolution.default: convolution}
    if kind == "gpu":
        library |= {aten.mm.default: _if_thin(_mm), aten.bmm.default: _if_thin(_bmm)}
    else:
        library |= {aten.mm.default: _mm, aten.bmm.default: _bmm}
        library |= {aten.cumsum.default: _cumsum, aten.cumprod.default: _cumprod}
        table |= {aten.var_mean.correction: _var_mean}
        table |= {aten.var.correction: lambda *a, **k: _var_mean(*a, **k)[0]}
    table |= {op: f for op, f in library.items() if not allows(allow, op.name())}
    if kind == "gpu" and finite:
        table.setdefault(aten.convolution.default, _of_one_group_without_transposition)
    if not all(allows(allow, name) for name in ("aten::addmm", "aten::baddbmm")):
        table |= {aten.addmm.default: _addmm, aten.baddbmm.default: _addmm}
    return table


def _index_select(x: Tensor, dim: int, index: Tensor) -> Any:
    """Torch's own, as that of `roll`, indexes in Python, which asks for a GPU that is not there."""
    if not x.dim():
        return NotImplemented
    return aten.index.Tensor(x, [None] * (dim % x.dim()) + [index.reshape(-1)])


def _average_pool(
    n: int,
    x: Tensor,
    window: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    """A large window's mean, as one of unfolded places: Inductor leaves it to torch."""
    window, padding = for_each(n, window), for_each(n, padding)
    stride = for_each(n, stride or window)
    outside = any(padding) and not (count_include_pad or divisor_override)
    if math.prod(window) <= _MOST_OF_A_WINDOW or ceil_mode or outside:
        return NotImplemented
    if any(padding):
        x = F.pad(x, [p for each in reversed(padding) for p in (each, each)])
    for d in range(n):
        x = x.unfold(x.dim() - n, window[d], stride[d])
    return x.sum(list(range(-n, 0))) / (divisor_override or math.prod(window))


def _var_mean(
    x: Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute variance and mean in two passes: as exact as Welford's way, without its state."""
    dims = list(range(x.dim())) if not dim else list(dim)
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    count: Any = 1
    for d in dims:
        count = count * x.shape[d]
    mean = wide.sum(dims, keepdim=True) / count
    squares = (wide - mean).square().sum(dims, keepdim=True)
    rest = count - (1 if correction is None else correction)
    var = squares / rest
    if not keepdim:
        for d in sorted((d % x.dim() for d in dims), reverse=True):
            var, mean = var.squeeze(d), mean.squeeze(d)
    return var.to(x.dtype), mean.to(x.dtype)


def _softmax_backward(grad: Tensor, y: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Multiply last, as torch's own kernels do: from an infinity, y·grad - y·sum makes a NaN."""
    if grad.dtype in (torch.bfloat16, torch.float16):
        grad, y = grad.float(), y.float()
    return (y * (grad - (grad * y).sum(dim, keepdim=True))).to(dtype)


def _sort(
    x: Tensor, dim: int = -1, descending: bool = False, count: Any = None
) -> tuple[Tensor, Tensor]:
    """Sort by the number of elements that come before each. This is quadratic, but Inductor sorts
    only short rows, and only on a GPU. Equal elements keep their order; NaN counts as the largest.
    """
    if not x.dim():
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    wide = x.movedim(dim, -1)
    one, other = wide.unsqueeze(-1), wide.unsqueeze(-2)
    place = torch.arange(wide.shape[-1], device=x.device)
    earlier = place.unsqueeze(0) < place.unsqueeze(1)
    before, equal = (other > one if descending else other < one), other == one
    if x.is_floating_point():
        nan, nans = one != one, other != other  # `~` would need a device that is there
        before = before | (nans & (one == one) if descending else (other == other) & nan)
        equal = equal | (nan & nans)
    rank = (before | (equal & earlier)).sum(-1)
    wanted = torch.arange(wide.shape[-1] if count is None else count, device=x.device)
    index = torch.where(rank.unsqueeze(-2) == wanted.unsqueeze(-1), place, 0).sum(-1)
    return wide.gather(-1, index).movedim(-1, dim), index.movedim(-1, dim)


def _topk(
    x: Tensor, k: Any, dim: int = -1, largest: bool = True, *_: bool
) -> tuple[Tensor, Tensor]:
    """Return the k largest in order, also where the caller leaves the order open."""
    return _sort(x, dim, largest, k)


def _mm(a: Tensor, b: Tensor) -> Tensor:
    """[M, K] @ [K, N] as a sum over K."""
    return (a.unsqueeze(1) * b.t().unsqueeze(0)).sum(-1)


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    """[B, M, K] @ [B, K, N] as a sum over K."""
    return (a.unsqueeze(2) * b.mT.unsqueeze(1)).sum(-1)


def _if_thin(product: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Any]:
    """The product with a vector alone: `tl.dot` has no use for it."""

    def thin(a: Tensor, b: Tensor) -> Any:
        sizes = (*a.shape[-2:], b.shape[-1])
        if any(type(n) is int and n == 1 for n in sizes):  # comparing a symbol would decide it
            return product(a, b)
        return NotImplemented

    return thin


def _prefixes(x: Tensor, dim: int, fill: float) -> Tensor:
    """X with a further dimension: for each place of `dim`, the values up to it, `fill` behind."""
    wide = x.movedim(dim, -1)
    place = torch.arange(wide.shape[-1], device=x.device)
    behind = place.unsqueeze(0) > place.unsqueeze(1)
    return torch.where(behind, fill, wide.unsqueeze(-2))


def _cumsum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """A sum of its own for each place: quadratic, but Inductor has no scan on the CPU."""
    return _prefixes(x, dim, 0.0).sum(-1, dtype=dtype).movedim(-1, dim)


def _cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    return _prefixes(x, dim, 1.0).prod(-1, dtype=dtype).movedim(-1, dim)


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = a @ b
    if alpha != 1:
        product = product * alpha
    return product + (bias if beta == 1 else bias * beta)


def _of_one_group_without_transposition(
    x: Tensor, weight: Tensor, bias: Tensor | None, *numbers: Any
) -> Any:
    """A library's transposed convolution as another of its own; with groups, nobody timed that."""
    if ConvolutionNumbers.of(x.dim() - 2, *numbers).groups != 1:
        return NotImplemented
    return without_transposition(x, weight, bias, *numbers)


def _convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, *numbers: Any, finite: bool = True
) -> Tensor:
    """A sum over the channels of a group and the places of a window."""
    n = x.dim() - 2
    given = ConvolutionNumbers.of(n, *numbers)
    stride, padding, dilation, transposed, output_padding, groups = given
    window = list(weight.shape[2:])
    depthwise = groups > 1 and weight.shape[1] == 1 and weight.shape[0] == groups
    on_gpu = x.device.type == "cuda"
    if transposed and on_gpu and finite and not depthwise and any(s > 1 for s in stride):
        other = without_transposition(x, weight, bias, *given)
        if other is not NotImplemented:
            return cast("Tensor", other)
    if transposed:
        for d, s in enumerate(stride):
            x = _spread(x, d + 2, s)
        reach = [a * (k - 1) - p for a, k, p in zip(dilation, window, padding, strict=True)]
        ends = [(r, r + m) for r, m in zip(reach, output_padding, strict=True)]
        weight = weight.flip(list(range(2, n + 2)))
        if groups == 1:
            weight = weight.transpose(0, 1)
        elif not depthwise:
            weight = _grouped(weight, 0, groups).transpose(1, 2).flatten(0, 1)
        stride = [1] * n
    else:
        ends = [(p, p) for p in padding]
    if any(end != (0, 0) for end in ends):
        x = F.pad(x, [p for end in reversed(ends) for p in end])
    for d in range(n):
        x = x.unfold(d + 2, dilation[d] * (window[d] - 1) + 1, stride[d])
        if dilation[d] > 1:
            x = aten.slice.Tensor(x, x.dim() - 1, 0, None, dilation[d])
    if on_gpu and type(groups) is int and not depthwise and _is_product(x, weight, groups):
        return window_products(x, weight, bias, groups)
    for _ in range(n):  # [O, C / groups, 1..., window...]
        weight = weight.unsqueeze(2)
    places = list(range(-n, 0))
    if depthwise:  # [N, C, places..., window...]
        y = (x * weight.squeeze(1).unsqueeze(0)).sum(places)
    elif groups == 1:  # [N, 1, C, places..., window...]
        y = (x.unsqueeze(1) * weight.unsqueeze(0)).sum([2, *places])
    else:  # [N, groups, 1, C / groups, places..., window...]
        x = _grouped(x, 1, groups).unsqueeze(2)
        y = (x * _grouped(weight, 0, groups).unsqueeze(0)).sum([3, *places]).flatten(1, 2)
    if bias is None:
        return y
    for _ in range(n):
        bias = bias.unsqueeze(-1)
    return y + bias


def _is_product(windows: Tensor, weight: Tensor, groups: int) -> bool:
    """Whether a convolution is worth a product of matrices: that has no use for one place or one
    number of a window, and would leave most rows empty for few channels. Symbols are many.
    """
    places, window = windows.shape[2 : weight.dim()], weight.shape[1:]
    rows = weight.shape[0] // groups
    few = type(rows) is int and rows < _LEAST_ROWS
    single = any(all(type(s) is int and s == 1 for s in sizes) for sizes in (places, window))
    known = windows.dtype in (torch.float16, torch.bfloat16, torch.float32)
    return known and not few and not single


def _grouped(x: Tensor, dim: int, groups: int) -> Tensor:
    """A dimension as groups and what is in one."""
    return x.reshape(*x.shape[:dim], groups, x.shape[dim] // groups, *x.shape[dim + 1 :])


def _spread(x: Tensor, dim: int, step: int) -> Tensor:
    """Zeros between neighbours of a dimension: L becomes (L - 1) * step + 1."""
    if step == 1:
        return x
    length = x.shape[dim]
    wide = F.pad(x.unsqueeze(dim + 1), [0, 0] * (x.dim() - 1 - dim) + [0, step - 1])
    wide = wide.reshape(*x.shape[:dim], length * step, *x.shape[dim + 1 :])
    return wide.narrow(dim, 0, (length - 1) * step + 1)
