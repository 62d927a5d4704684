"""Whether indices of 32 bits are enough, for all cases that a trace is made for: Inductor asks the
one whose sizes it is shown, and what is between arguments and results may be larger in another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import sympy
import torch
from kagent_sandbox.data.case import Case
from torch._inductor.codegen.simd import SIMDScheduling

_MOST = torch.iinfo(torch.int32).max // 5 * 4
"""Most elements: hidden cases are drawn anew, and may have more than those that are known."""
_torchs_can_use_32_bits: Any = SIMDScheduling.can_use_32bit_indexing
_known: list[Mapping[str, int]] = []  # sizes by symbol, of each case


def install() -> None:
    """Have Inductor look at all cases of `wide_enough_for`. Never taken back."""
    scheduling: Any = SIMDScheduling
    scheduling.can_use_32bit_indexing = staticmethod(_can_use_32_bits)


@contextlib.contextmanager
def wide_enough_for(symbols: Mapping[str, str], cases: Sequence[Case]) -> Iterator[None]:
    """Have indices that are written meanwhile hold for cases.

    Args:
        symbols: Dimensions by the names that they have in what is traced.
        cases: The cases.
    """
    _known[:] = [{s: int(cast("int", c.dims[n])) for s, n in symbols.items()} for c in cases]
    try:
        yield
    finally:
        _known.clear()


def _can_use_32_bits(numel: sympy.Expr, buffers: Iterable[Any]) -> bool:
    given = list(buffers)
    sizes = [b.get_layout().storage_size() for b in given if b.has_tensor_output()]
    few = all(_most_elements(s) <= _MOST for s in (numel, *sizes))
    return few and bool(_torchs_can_use_32_bits(numel, given))


def _most_elements(number: Any) -> int:
    """The largest value in any case; 0 where a symbol is no dimension."""
    expression = sympy.sympify(number)
    names = {x: str(x) for x in expression.free_symbols}
    found = [
        expression.xreplace({x: sympy.Integer(sizes[name]) for x, name in names.items()})
        for sizes in _known
        if sizes.keys() >= set(names.values())
    ]
    return max((int(v) for v in found if v.is_number), default=0)
