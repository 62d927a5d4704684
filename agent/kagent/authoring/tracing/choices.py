"""Results that are indices of chosen elements: torch fixes no order of equal ones."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from kagent.authoring.tracing.graph import results_of

_aten = torch.ops.aten
_CHOOSING: dict[Any, int] = {
    _aten.topk.default: 2,
    _aten.sort.default: 1,
    _aten.sort.stable: 1,
    _aten.argsort.default: 1,
    _aten.argsort.stable: 1,
    _aten.argmax.default: 1,
    _aten.argmin.default: 1,
    _aten.max.dim: 1,
    _aten.min.dim: 1,
    _aten.kthvalue.default: 2,
    _aten.median.dim: 1,
}
"""Operations that choose elements, and which of their arguments is the dimension."""
_FLAT = frozenset({_aten.argmax.default, _aten.argmin.default})  # over everything by default
_INDICES = frozenset({_aten.argsort.default, _aten.argsort.stable, *_FLAT})  # their only result
_SAME = frozenset({_aten.to.dtype, _aten._to_copy.default, _aten.clone.default})  # noqa: SLF001 - torch's own name
_TO_THE_END = (1 << 63) - 1

_RULE = '''
def _as_right(
    index: torch.Tensor,
    expected: torch.Tensor,
    exact: torch.Tensor,
    rounded: torch.Tensor,
    dim: int | None,
) -> torch.Tensor:
    """Mask of indices that point at the values of the expected ones, and of which none is twice.

    `exact` and `rounded` are what they point into, in float64 and as torch computes it. Two values
    are equal if errors within the tolerance can have exchanged them.
    """
    shape, wide = index.shape, exact.double()
    error = (rounded.double() - wide).abs().nan_to_num(0.0, 0.0, 0.0)
    eps = torch.finfo(rounded.dtype).eps if rounded.is_floating_point() and error.any() else 0.0
    index, expected = index.long(), expected.long()
    if dim is None:
        wide, error, dim = wide.reshape(-1), error.reshape(-1), 0
        index, expected = index.reshape(-1), expected.reshape(-1)
    if index.dim() < wide.dim():
        index, expected = index.unsqueeze(dim), expected.unsqueeze(dim)
    last = wide.shape[dim] - 1
    mine, right = wide.gather(dim, index.clamp(0, last)), wide.gather(dim, expected)
    limit = K * error.amax(dim, keepdim=True) + FLOOR * eps * torch.maximum(mine.abs(), right.abs())
    near = (mine - right).abs() <= 2 * limit.nan_to_num(0.0, 0.0, 0.0)
    near = near | (mine == right) | (mine.isnan() & right.isnan())
    once = (index.sort(dim).values.diff(dim=dim) != 0).all(dim, keepdim=True)
    return (near & once & (index >= 0) & (index <= last)).reshape(shape)
'''
"""The rule in a reference.py, after K and FLOOR."""


@dataclass(frozen=True, slots=True)
class IndexResult:
    """A result that holds indices.

    Attributes:
        result: Its number.
        values: What the indices point into.
        dim: The dimension along which they do; None: into all elements, one after the other.
    """

    RULE: ClassVar[str] = _RULE

    result: int
    values: Node
    dim: int | None

    def mask(self, values: int) -> str:
        """Python code of the mask of right elements; `values` is the result's number of values."""
        i, v = self.result, values
        return f"_as_right(results[{i}], expected[{i}], exact[{v}], rounded[{v}], {self.dim})"


def find_choices(graph: GraphModule) -> list[IndexResult]:
    """The results of a graph that are indices of chosen elements."""
    results = enumerate(results_of(graph))
    found = (_choice(i, node) for i, node in results if isinstance(node, Node))
    return [c for c in found if c is not None]


def _choice(number: int, result: Node) -> IndexResult | None:
    node, sliced = result, []
    while node.target in _SAME or node.target is _aten.slice.Tensor:
        if node.target is _aten.slice.Tensor and not _whole(node):
            sliced.append(_argument(node, 1, "dim", 0))
        node = node.args[0]  # type: ignore[assignment]
    indices = node.target in _INDICES
    if node.target is operator.getitem and node.args[1] == 1:
        node = node.args[0]  # type: ignore[assignment]
        indices = True
    if not indices or node.target not in _CHOOSING:
        return None
    values = node.args[0]
    assert isinstance(values, Node)
    rank = max(1, values.meta["val"].dim())
    single = node.target in (*_FLAT, _aten.max.dim, _aten.min.dim, _aten.median.dim)
    dim = _argument(node, _CHOOSING[node.target], "dim", None if node.target in _FLAT else -1)
    stable = node.target in (_aten.sort.stable, _aten.argsort.stable) and node.kwargs.get("stable")
    if stable and (values.op == "placeholder" or not values.meta["val"].dtype.is_floating_point):
        return None  # torch fixes the order
    if dim is not None:
        dim %= rank
    # A part of the indices along their own dimension still points into all values.
    if any(single or d % rank != dim for d in sliced):
        return None
    return IndexResult(number, values, dim)


def _whole(node: Node) -> bool:
    """Whether a slice is all of a dimension."""
    start, end, step = (
        _argument(node, 2, "start", None),
        _argument(node, 3, "end", None),
        _argument(node, 4, "step", 1),
    )
    return start in (None, 0) and end in (None, _TO_THE_END) and step == 1


def _argument(node: Node, place: int, name: str, default: int | None) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)
