"""Arithmetic formulas over named numbers, texts and lists of numbers, and nothing else."""

from __future__ import annotations

import ast
import copy
import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, cast

from kagent_sandbox.syntax import parse_expression

MOST_BITS = 1024
"""Bits of a power's whole numbers: a larger one is a typo, and would take for ever."""


def _power(base: float, exponent: float) -> float:
    """`base ** exponent`.

    Raises:
        OverflowError: It has more than `MOST_BITS` bits.
    """
    whole = isinstance(base, int) and isinstance(exponent, int)
    if whole and abs(exponent) * int(abs(base)).bit_length() > MOST_BITS:
        raise OverflowError(f"{base}**{exponent} is too large")
    return cast("float", base**exponent)


Value: TypeAlias = int | float | bool | str | tuple[int | float, ...]
"""A name's value: a number, a flag, a text, or a list of numbers."""
MOST_NUMBERS = 1 << 16  # of a list
_NUMBERS = frozenset({int, float, bool})

_BINARY: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}

_COMPARISONS: Mapping[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


_CALLS: Mapping[str, Callable[..., Any]] = {
    "min": min,
    "max": max,
    "sum": lambda numbers: sum(numbers),
    "len": lambda numbers: len(numbers),
    "cdiv": lambda a, b: _each(lambda x, y: -(-x // y), a, b),
}


def _each(operation: Callable[[Any, Any], Any], a: Value, b: Value) -> Any:
    """The operation on numbers; on a list, element by element.

    Raises:
        TypeError: One is a text, or two lists are not of one length.
    """
    if isinstance(a, int | float) and isinstance(b, int | float):
        return operation(a, b)
    lists = [v for v in (a, b) if isinstance(v, tuple)]
    if any(isinstance(v, str) for v in (a, b)):
        raise TypeError("a text is no number")
    if len({len(v) for v in lists}) > 1:
        raise TypeError(f"lists of {len(lists[0])} and {len(lists[1])} numbers")
    count = len(lists[0])
    pairs = zip(*(v if isinstance(v, tuple) else (v,) * count for v in (a, b)), strict=True)
    return tuple(operation(x, y) for x, y in pairs)


Names: TypeAlias = Mapping[str, Value]


def evaluate(formula: str, names: Names) -> float:
    """Evaluate an arithmetic formula over named values, and nothing else.

    On a list arithmetic goes element by element: `sum(cdiv(lengths, 16))`.

    Raises:
        ValueError: It is not arithmetic, names something unknown, or its value is no finite number.
    """
    try:
        found = _read(formula)(names)
    except (SyntaxError, ArithmeticError, TypeError, RecursionError, MemoryError) as e:
        raise ValueError(f"formula {formula!r}: {e}") from None
    if not isinstance(found, int | float) or not math.isfinite(found):
        raise ValueError(f"formula {formula!r}: its value is {found!r}, expected a finite number")
    return found


@functools.lru_cache(maxsize=1024)
def _read(formula: str) -> Callable[[Names], Any]:
    """The formula as a function: cases are drawn by the thousand, each with a cost.

    Raises:
        SyntaxError: It is no expression; others as `ast.parse` has them.
    """

    def read(node: ast.expr) -> Callable[[Names], Any]:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float | str):
            constant = node.value
            return lambda _: constant
        if isinstance(node, ast.Name):
            return named(node.id)
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            operation, left, right = _BINARY[type(node.op)], read(node.left), read(node.right)
            return lambda names: _each(operation, left(names), right(names))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            operand = read(node.operand)
            return lambda names: _each(operator.sub, 0, operand(names))
        if (
            isinstance(node, ast.Compare)
            and len(node.ops) == 1
            and type(node.ops[0]) in _COMPARISONS
        ):
            compare = _COMPARISONS[type(node.ops[0])]
            left, right = read(node.left), read(node.comparators[0])
            return lambda names: compare(left(names), right(names))
        if isinstance(node, ast.BoolOp):
            parts = [read(v) for v in node.values]
            whole = all if isinstance(node.op, ast.And) else any
            return lambda names: whole(part(names) for part in parts)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            operand = read(node.operand)
            return lambda names: not operand(names)
        if isinstance(node, ast.IfExp):
            test, body, other = read(node.test), read(node.body), read(node.orelse)
            return lambda names: body(names) if test(names) else other(names)
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in _CALLS
        ):
            function, arguments = _CALLS[node.func.id], [read(a) for a in node.args]
            return lambda names: function(*(a(names) for a in arguments))
        raise ValueError(f"formula {formula!r}: cannot read {ast.unparse(node)!r}")

    def named(name: str) -> Callable[[Names], Any]:
        def value(names: Names) -> Any:
            if name not in names:
                raise ValueError(f"formula {formula!r}: cannot read {name!r}")
            return names[name]

        return value

    tree = parse_expression(formula)
    exact = read(tree)
    quick = _on_numbers(tree)
    if quick is None:
        return exact
    called = {n.func for n in ast.walk(tree) if isinstance(n, ast.Call)}
    names_read = (n for n in ast.walk(tree) if isinstance(n, ast.Name) and n not in called)
    used = tuple({n.id for n in names_read})  # a dimension may have a function's name

    def value(names: Names) -> Any:
        for name in used:
            if type(names.get(name)) not in _NUMBERS:  # a list, a text, or nothing
                return exact(names)
        try:
            return quick(names)
        except TypeError:  # its text names functions
            return exact(names)

    return value


def _on_numbers(tree: ast.expr) -> Callable[[Names], Any] | None:
    """A formula that can be read, as Python's own code; where all names are numbers it has the same
    value, in a third of the time. None where it holds a text, or is too deep for the compiler.
    """
    try:
        body = _OnNumbers().visit(copy.deepcopy(tree))
        given = ast.arguments(
            posonlyargs=[], args=[ast.arg("names")], kwonlyargs=[], kw_defaults=[], defaults=[]
        )
        whole = ast.fix_missing_locations(ast.Expression(ast.Lambda(given, body)))
        code = compile(whole, "formula", "eval")
    except (_HoldsTextError, ValueError, RecursionError, MemoryError, SyntaxError):
        return None
    scope = {**_CALLS, "cdiv": lambda a, b: -(-a // b), "_power": _power, "_bool": bool}
    # of nodes that `_read` knows, and nothing else
    found: Callable[[Names], Any] = eval(code, {"__builtins__": {}, **scope})  # noqa: S307
    return found


class _HoldsTextError(Exception):
    """A text in a formula: arithmetic would repeat it, or put two together."""


class _OnNumbers(ast.NodeTransformer):
    """Rewrites a formula for `_on_numbers`."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Subscript(ast.Name("names", ast.Load()), ast.Constant(node.id), ast.Load())

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if isinstance(node.value, str):
            raise _HoldsTextError
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.op, ast.Pow):
            return _call("_power", [node.left, node.right])
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.op, ast.USub):
            return ast.BinOp(ast.Constant(0), ast.Sub(), node.operand)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        return _call("_bool", [node])

    def visit_Call(self, node: ast.Call) -> ast.expr:
        assert isinstance(node.func, ast.Name)
        return _call(node.func.id, [self.visit(a) for a in node.args])


def _call(name: str, arguments: list[ast.expr]) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), arguments, [])
