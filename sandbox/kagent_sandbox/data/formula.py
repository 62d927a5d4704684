"""Arithmetic formulas over named numbers, and nothing else."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

from kagent_sandbox.syntax import parse_expression

_BINARY: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


_CALLS: Mapping[str, Callable[..., float]] = {
    "min": min,
    "max": max,
    "cdiv": lambda a, b: -(-a // b),
}


def evaluate(formula: str, names: Mapping[str, float]) -> float:
    """Evaluate an arithmetic formula over named numbers, and nothing else.

    Raises:
        ValueError: It is not arithmetic, or names something unknown.
    """

    def value(node: ast.expr) -> float:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        if isinstance(node, ast.Name) and node.id in names:
            return names[node.id]
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            return _BINARY[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.IfExp):
            return value(node.body) if value(node.test) else value(node.orelse)
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in _CALLS
        ):
            return _CALLS[node.func.id](*(value(a) for a in node.args))
        raise ValueError(f"formula {formula!r}: cannot read {ast.unparse(node)!r}")

    try:
        return value(parse_expression(formula))
    except (SyntaxError, ZeroDivisionError, OverflowError) as e:
        raise ValueError(f"formula {formula!r}: {e}") from None
