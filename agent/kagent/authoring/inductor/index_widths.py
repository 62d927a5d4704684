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
from torch._inductor import ir
from torch._inductor.codegen.simd import SIMDScheduling

_MOST = int(0.8 * torch.iinfo(torch.int32).max)
"""Most elements: hidden cases are drawn anew, and may have more than those that are known."""
_torchs_can_use_32_bits: Any = SIMDScheduling.can_use_32bit_indexing
_known: list[Mapping[str, int]] = []  # sizes by symbol, of each case


def install() -> None:
    """Have Inductor look at all cases of `wide_enough_for`. Never taken back."""
    scheduling: Any = SIMDScheduling
    scheduling.can_use_32bit_indexing = staticmethod(_can_use_32_bits)


@contextlib.contextmanager
def wide_enough_for(symbols: Mapping[str, str], cases: Sequence[Case]) -> Iterator[None]:
    """Have indices that are written meanwhile hold for cases; not to be nested.

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
    written = [
        w for b in given if isinstance(b, ir.MutationOutput) for w in b.get_mutation_buffers()
    ]
    tensors = [b for b in (*given, *written) if b.has_tensor_output()]
    sizes = [b.get_layout().storage_size() for b in tensors]
    few = all(_most_elements(s) <= _MOST for s in (numel, *sizes))
    return few and bool(_torchs_can_use_32_bits(numel, given))


def _most_elements(number: Any) -> int:
    """The largest value in any case; 0 where a symbol is no dimension."""
    expression = sympy.sympify(number)
    names = {x: str(x) for x in expression.free_symbols}
    most = 0
    for sizes in _known:
        if sizes.keys() >= set(names.values()):
            values = {x: sympy.Integer(sizes[name]) for x, name in names.items()}
            with contextlib.suppress(ZeroDivisionError):  # a case of another way
                most = max(most, int(expression.xreplace(values)))
    return most
