"""`eager` with its sums and matrix products in other orders, which are as right as torch's own."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from kagent_sandbox.data.build_case import build_case
from kagent_sandbox.data.case import Case
from kagent_sandbox.data.task import Task
from torch._decomp import core_aten_decompositions, get_decompositions
from torch.utils._python_dispatch import TorchDispatchMode

ROOM = 2.0
"""Factor on the largest error that was seen. The ways are a sample: a kernel may unite several of
them (blocks, then a tree, with an approximate exp), and the worst element of another draw errs
more. A scale that is off by a thousandth is found by its bias, which this does not hide.
"""
DRAWS, MOST_DRAWS = 3, 48
"""Draws of each case that every way computes. Of a small case they are many: where a result cancels
by chance, in one draw of some dozens, orders differ by far more than in the others."""
DRAWN_ELEMENTS = 1 << 21
"""Most elements of all draws of a case together, unless they are DRAWS."""
PARTS = 16
"""Parts of a sum whose results are added one after the other."""
_aten = torch.ops.aten

Split = Callable[[torch.Tensor], list[torch.Tensor]]
"""Parts of a tensor's last dimension, in the order in which they are added."""


def _reversed(x: torch.Tensor) -> list[torch.Tensor]:
    return [x.flip(-1)]


def _permuted(x: torch.Tensor) -> list[torch.Tensor]:
    order = torch.randperm(x.shape[-1], generator=torch.Generator().manual_seed(x.shape[-1]))
    return [x.index_select(-1, order.to(x.device))]


def _in_parts(x: torch.Tensor) -> list[torch.Tensor]:
    return list(x.chunk(PARTS, -1))


def _interleaved(x: torch.Tensor) -> list[torch.Tensor]:
    return [x[..., i::PARTS] for i in range(min(PARTS, x.shape[-1]))]


ORDERS: Mapping[str, tuple[Split, bool]] = {
    "reversed sums": (_reversed, False),
    "permuted sums": (_permuted, False),
    f"sums in {PARTS} parts, one after the other": (_in_parts, False),
    f"sums in {PARTS} interleaved parts, in pairs": (_interleaved, True),
}
"""Each order: the parts, and whether their results are added in pairs."""


def _added(parts: Sequence[torch.Tensor], *, pairs: bool) -> torch.Tensor:
    if not pairs:
        return functools.reduce(torch.add, parts)
    while len(parts) > 1:
        added = [a + b for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = added + list(parts[2 * len(added) :])
    return parts[0]


class Reordered(TorchDispatchMode):
    """Adds up sums, means, variances and matrix products in another order, and accumulates (cumsum)
    in a tree, in float32 at least.
    """

    def __init__(self, split: Split, *, pairs: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._split = split
        self._pairs = pairs

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation, or what it consists of."""
        kwargs = kwargs or {}
        if func in (_aten.sum.default, _aten.sum.dim_IntList):
            return self._sum(*args, **kwargs)
        if func in (_aten.mean.default, _aten.mean.dim):
            return self._mean(*args, **{"dtype": args[0].dtype, **kwargs})
        if func in (_aten.var.correction, _aten.var_mean.correction) and _is_summed(args[0]):
            variance, mean = self._variance(*args, **kwargs)
            return variance if func is _aten.var.correction else (variance, mean)
        if func in (_aten.mm.default, _aten.bmm.default):
            return self._product(*args)
        if func in _SCANS:
            return _scanned(_SCANS[func], *args, **kwargs)
        known = _decompositions().get(func)
        if known is None:
            return func(*args, **kwargs)
        with self:
            out = known(*args, **kwargs)
        return func(*args, **kwargs) if out is NotImplemented else out

    def _sum(
        self,
        x: torch.Tensor,
        dim: list[int] | None = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        if not _is_summed(x):
            return torch.sum(x, dim=dim, keepdim=keepdim, dtype=dtype)
        dims = [d % x.dim() for d in (dim or range(x.dim()))]
        rest = [d for d in range(x.dim()) if d not in dims]
        flat = _wide(x.permute(*rest, *dims)).reshape([*(x.shape[d] for d in rest), -1])
        out = _added([p.sum(-1) for p in self._split(flat)], pairs=self._pairs)
        if keepdim:
            out = out.reshape([1 if d in dims else n for d, n in enumerate(x.shape)])
        return out.to(dtype or x.dtype)

    def _mean(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = self._sum(x, *args, **kwargs)
        return out / (x.numel() / max(1, out.numel()))

    def _variance(
        self,
        x: torch.Tensor,
        dim: list[int] | None = None,
        *,
        correction: float | None = None,
        keepdim: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The variance and the mean, in two passes."""
        wide = _wide(x)
        mean = self._mean(wide, dim, keepdim=True)
        squares = self._sum((wide - mean).square(), dim, keepdim)
        count = x.numel() / mean.numel()
        variance = squares / max(0.0, count - (1.0 if correction is None else correction))
        return variance.to(x.dtype), mean.reshape(variance.shape).to(x.dtype)

    def _product(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if not a.is_floating_point() or not a.shape[-1]:
            return a @ b
        left, right = self._split(_wide(a)), self._split(_wide(b).transpose(-1, -2))
        parts = [p @ q.transpose(-1, -2) for p, q in zip(left, right, strict=True)]
        return _added(parts, pairs=self._pairs).to(a.dtype)


_SCANS: Mapping[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    _aten.cumsum.default: torch.add,
    _aten.cumprod.default: torch.mul,
    _aten.logcumsumexp.default: torch.logaddexp,
}


def _scanned(
    unite: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    dim: int,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Accumulate as GPUs do, in a tree: after each step, the last 2, 4, 8... elements up to each
    place are united. torch on the CPU goes from one element to the next in float64.
    """
    kind = dtype or (x.dtype if x.is_floating_point() else torch.int64)
    out = _wide(x.to(kind))
    if x.dim():
        step, size = 1, x.shape[dim]
        while step < size:
            later = unite(out.narrow(dim, 0, size - step), out.narrow(dim, step, size - step))
            out = torch.cat([out.narrow(dim, 0, step), later], dim)
            step *= 2
    return out.to(kind)


def _is_summed(x: torch.Tensor) -> bool:
    return bool(x.is_floating_point() and x.numel() and x.dim())


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.is_floating_point() and x.dtype.itemsize < 4 else x


@functools.cache
def _decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Parts of operations that have sums inside."""
    more = [_aten.addmm, _aten.baddbmm, _aten._softmax, _aten._log_softmax]  # noqa: SLF001
    more += [_aten.native_layer_norm, _aten.logsumexp]
    found = {**core_aten_decompositions(), **get_decompositions(more)}
    names = ("sum", "mean", "mm", "bmm")
    return {f: d for f, d in found.items() if f.overloadpacket.__name__ not in names}


def draws_of(task: Task, case: Case) -> int:
    """Number of draws of a case that are looked at."""
    spec = build_case(task, case)
    elements = sum(math.prod(t.shape) for t in (*spec.tensors, *spec.results))
    return max(DRAWS, min(MOST_DRAWS, DRAWN_ELEMENTS // max(1, elements)))
