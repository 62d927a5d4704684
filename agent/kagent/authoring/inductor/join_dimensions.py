"""Sums of an index's parts joined as Inductor joins them, without sympy's search for patterns.

`ModularIndexing(i, 1, 32) + 32 * ModularIndexing(i, 32, 4)` is `ModularIndexing(i, 1, 128)`. Torch
tries every pair of terms with wildcards, which took most of the time of a problem's import.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import sympy
from torch.utils._sympy.functions import FloorDiv, ModularIndexing


def join_dimensions(expr: Any) -> Any:
    """An index with its parts joined.

    Args:
        expr: A sympy expression.
    """
    if not isinstance(expr, sympy.Add) or not expr.has(ModularIndexing):
        return expr
    return _joined(expr)


@functools.lru_cache(4096)
def _joined(expr: Any) -> Any:
    terms = list(_scaled(expr, ModularIndexing))
    for one, scale, (base, divisor, modulus) in terms:
        for other, times, (of, by, size) in terms:
            if other == one or of != base:
                continue
            if _equal(by, divisor, modulus) and _equal(times, scale, modulus):
                joined = ModularIndexing(base, divisor, modulus * size)
                return join_dimensions(expr - one - other + scale * joined)
    for one, scale, (base, divisor, modulus) in terms:
        for other, times, (of, by) in _scaled(expr, FloorDiv):
            if of == base and _equal(by, divisor, modulus) and _equal(times, scale, modulus):
                joined = FloorDiv(base, divisor)
                return join_dimensions(expr - one - other + scale * joined)
    return expr


def _equal(product: Any, one: Any, other: Any) -> bool:
    return bool(product == one * other)


def _scaled(expr: Any, function: Callable[..., Any]) -> Iterator[tuple[Any, Any, Any]]:
    """Terms that are a function's value times something: each with its factor and arguments."""
    for term in expr.args:
        factors = sympy.Mul.make_args(term)
        found = [f for f in factors if isinstance(f, function)]  # type: ignore[arg-type]
        if len(found) == 1:
            yield term, sympy.Mul(*(f for f in factors if f is not found[0])), found[0].args
