"""Quotients of sizes that are sums of products: torch cancels only a factor that all terms have in
sight. `(B·H·W - 2·B·H) / (B·H)` is `W - 2`, and a kernel's grid may be split there.
"""

from __future__ import annotations

import functools
from typing import Any

import sympy
from sympy.polys.polyerrors import BasePolynomialError
from torch._inductor.sizevars import SizeVarAllocator
from torch.utils._sympy.functions import FloorDiv

_torchs_floor: Any = FloorDiv.eval.__func__  # type: ignore[attr-defined]
_torchs_multiple: Any = SizeVarAllocator.statically_known_multiple_of


def install() -> None:
    """Have torch divide so. Never taken back."""
    FloorDiv.eval = classmethod(_floor)  # type: ignore[method-assign,assignment]
    SizeVarAllocator.statically_known_multiple_of = _is_multiple  # type: ignore[method-assign]


def _floor(cls: Any, base: Any, divisor: Any) -> Any:
    exact = exact_quotient(base, divisor)
    return _torchs_floor(cls, base, divisor) if exact is None else exact


def _is_multiple(self: Any, numerator: Any, denominator: Any) -> bool:
    if _torchs_multiple(self, numerator, denominator):
        return True
    return exact_quotient(sympy.sympify(numerator), sympy.sympify(denominator)) is not None


@functools.lru_cache(4096)
def exact_quotient(dividend: Any, divisor: Any) -> Any:
    """A quotient that holds for all values of the symbols.

    Args:
        dividend: A sympy expression.
        divisor: Another one.

    Returns:
        A polynomial with whole coefficients; None if there is none, or for a dividend that is no
        sum, or a divisor without symbols, which torch divides by itself.
    """
    if not isinstance(dividend, sympy.Add) or not getattr(divisor, "free_symbols", None):
        return None
    symbols = sorted(dividend.free_symbols | divisor.free_symbols, key=str)
    try:
        quotient, rest = sympy.div(dividend, divisor, *symbols, domain="ZZ")
    except (BasePolynomialError, ZeroDivisionError):
        return None
    return None if rest else quotient
