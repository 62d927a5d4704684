"""Results that are rounded to whole numbers: near a tie, rounding errors decide between two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from kagent.authoring.tracing.graph import ancestors, results_of

_aten = torch.ops.aten
_ROUNDING: Mapping[Any, str] = {
    _aten.round.default: "torch.round",
    _aten.floor.default: "torch.floor",
    _aten.ceil.default: "torch.ceil",
    _aten.trunc.default: "torch.trunc",
}
_CONVERSIONS = frozenset({_aten.to.dtype, _aten._to_copy.default, _aten.clone.default})  # noqa: SLF001 - torch's own name
_CLAMPS = frozenset({_aten.clamp.default, _aten.clamp_min.default, _aten.clamp_max.default})


@dataclass(frozen=True, slots=True)
class RoundedResult:
    """A result of whole numbers that were rounded.

    Attributes:
        result: Its number.
        values: What was rounded.
        function: What rounded it, as Python code.
    """

    RULE: ClassVar[str] = '''
def _rounds_as_right(
    found: torch.Tensor,
    expected: torch.Tensor,
    exact: torch.Tensor,
    rounded: torch.Tensor,
    function: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Mask of whole numbers that are the expected ones or, near a tie, those on its other side.

    `exact` and `rounded` are what `function` makes whole, in float64 and as torch computes it. Near
    is what errors within the tolerance can have moved across.
    """
    wide = exact.double()
    error = (rounded.double() - wide).abs().nan_to_num(0.0, 0.0, 0.0)
    eps = torch.finfo(rounded.dtype).eps if error.any() else 0.0
    largest = error.amax(-1, keepdim=True) if error.dim() else error
    limit = (K * largest + FLOOR * eps * wide.abs()).nan_to_num(0.0, 0.0, 0.0)
    between = (found >= function(wide - limit)) & (found <= function(wide + limit))
    apart = (found.long() - expected.long()).abs()
    return (apart == 0) | (between & (apart == 1))
'''
    """The rule in a reference.py, after K and FLOOR."""

    result: int
    values: Node
    function: str

    def mask(self, values: int) -> str:
        """Python code of the mask of right elements; `values` is the number of values that were
        rounded.
        """
        i = self.result
        return (
            f"_rounds_as_right(results[{i}], expected[{i}], exact[{values}], rounded[{values}], "
            f"{self.function})"
        )


def find_rounded(graph: GraphModule) -> list[RoundedResult]:
    """The results of a graph that are rounded to whole numbers."""
    found = (
        _rounded(i, node) for i, node in enumerate(results_of(graph)) if isinstance(node, Node)
    )
    return [r for r in found if r is not None]


def _rounded(number: int, result: Node) -> RoundedResult | None:
    if _floating(result) or result.meta["val"].dtype == torch.bool:
        return None
    node, values = result, None
    while node.target in _CONVERSIONS or node.target in _CLAMPS:
        source = node.args[0]
        assert isinstance(source, Node)
        if _floating(source) and not _floating(node):
            values = source  # the conversion cuts off what is behind the point
        node = source
    function = _ROUNDING.get(node.target, "torch.trunc")
    if values is not None and node.target in _ROUNDING:
        values = node.args[0]  # type: ignore[assignment]
    elif values is not None and any(n.target in _ROUNDING for n in ancestors(values)):
        return None  # what is cut off are whole numbers: their ties lie further up
    return None if values is None else RoundedResult(number, values, function)


def _floating(node: Node) -> bool:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype.is_floating_point
