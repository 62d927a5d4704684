"""Mutations of Triton kernels and of host code: by syntax tree, applied to the text.

Left alone: what only steers performance (TUNE and the tunables it names, num_warps, eviction
policies, decorators), 64-bit casts (they matter beyond 2^31 elements only), annotations and
literals of text.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from mutation.edits import Edit

_OPERATORS: dict[type[ast.operator], tuple[str, tuple[str, ...]]] = {
    ast.Add: ("+", ("-",)),
    ast.Sub: ("-", ("+",)),
    ast.Mult: ("*", ("/",)),
    ast.Div: ("/", ("*",)),
    ast.FloorDiv: ("//", ("*",)),
    ast.Mod: ("%", ("//",)),
    ast.BitAnd: ("&", ("|",)),
    ast.BitOr: ("|", ("&",)),
}
_COMPARISONS: dict[type[ast.cmpop], tuple[str, tuple[str, ...]]] = {
    ast.Lt: ("<", ("<=", ">")),
    ast.LtE: ("<=", ("<", ">=")),
    ast.Gt: (">", (">=", "<")),
    ast.GtE: (">=", (">", "<=")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
}
_CALLS = {
    "tl.maximum": ("tl.minimum",),
    "tl.minimum": ("tl.maximum",),
    "tl.max": ("tl.min",),
    "tl.sum": ("tl.max",),
    "tl.exp": ("tl.exp2",),
    "tl.exp2": ("tl.exp",),
    "tl.log": ("tl.log2",),
    "min": ("max",),
    "max": ("min",),
}
_TUNING = {"num_warps", "num_stages", "eviction_policy", "cache_modifier", "options"}


def edits_of(source: str) -> Iterator[Edit]:
    """All mutations of a candidate's Python; text inside of literals is not touched."""
    tree = ast.parse(source)
    walker = _Walker(source, _tunables(tree))
    for statement in tree.body:
        if not walker.is_tuning(statement):
            yield from walker.visit(statement)


def _tunables(tree: ast.Module) -> set[str]:
    """Names that TUNE sweeps, and TUNE."""
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="TUNE")], value=ast.Dict(keys=keys)):
                return {"TUNE"} | {str(k.value) for k in keys if isinstance(k, ast.Constant)}
    return {"TUNE"}


class _Walker:
    def __init__(self, source: str, tuning: set[str]) -> None:
        self._source = source
        self._tuning = tuning
        # Columns of the syntax tree count bytes of UTF-8, those of a string characters.
        self._lines = source.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    def is_tuning(self, statement: ast.stmt) -> bool:
        """Whether a statement of the module sets a tunable."""
        targets = statement.targets if isinstance(statement, ast.Assign) else ()
        return any(isinstance(t, ast.Name) and t.id in self._tuning for t in targets)

    def visit(self, node: ast.AST) -> Iterator[Edit]:
        """Mutations of a node and of all inside of it."""
        yield from self._own(node)
        for child in self._children(node):
            yield from self.visit(child)

    def _children(self, node: ast.AST) -> Iterator[ast.AST]:
        if isinstance(node, ast.FunctionDef):
            yield from node.body
            return
        if isinstance(node, ast.Import | ast.ImportFrom | ast.AnnAssign):
            if isinstance(node, ast.AnnAssign) and node.value is not None:
                yield node.value
            return
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.keyword) and child.arg in _TUNING:
                continue
            if isinstance(child, ast.Call) and ast.unparse(child).endswith(".to(tl.int64)"):
                yield from self._children(child)
            else:
                yield child

    def _own(self, node: ast.AST) -> Iterator[Edit]:
        match node:
            case ast.BinOp():
                yield from self._binary(node)
            case ast.AugAssign():
                yield from self._augmented(node)
            case ast.Compare():
                yield from self._comparison(node)
            case ast.BoolOp():
                pair = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
                yield from self._between(node.values[0], node.values[1], *pair, "comparison")
            case ast.UnaryOp(op=ast.Not() | ast.USub()):
                yield self._replace(node, self._text(node.operand), "sign")
                if "inf" in self._text(node.operand) or "e38" in self._text(node.operand):
                    yield self._replace(node, "0.0", "initial value")
            case ast.Constant():
                yield from self._constant(node)
            case ast.Call():
                yield from self._call(node)
            case ast.IfExp():
                yield self._replace(node, f"({self._text(node.body)})", "condition")
                yield self._replace(node, f"({self._text(node.orelse)})", "condition")
            case ast.If():
                yield self._replace(node.test, "True", "condition")
                yield self._replace(node.test, "False", "condition")
            case ast.Expr(value=ast.Call()):
                yield self._replace(node, "pass", "statement")
            case ast.Attribute(attr="float32"):
                for narrow in ("float16", "bfloat16"):
                    yield self._replace(node, f"{self._text(node.value)}.{narrow}", "accumulator")

    def _binary(self, node: ast.BinOp) -> Iterator[Edit]:
        if type(node.op) in _OPERATORS:
            old, new = _OPERATORS[type(node.op)]
            for text in new:
                yield from self._between(node.left, node.right, old, text, "operator")
        for gone, kept in ((node.left, node.right), (node.right, node.left)):
            if isinstance(gone, ast.Constant):
                yield self._replace(node, f"({self._text(kept)})", "constant dropped")

    def _augmented(self, node: ast.AugAssign) -> Iterator[Edit]:
        if type(node.op) in _OPERATORS:
            old, new = _OPERATORS[type(node.op)]
            for text in (*new, ""):
                yield from self._between(node.target, node.value, f"{old}=", f"{text}=", "operator")
        yield self._replace(node, "pass", "statement")

    def _comparison(self, node: ast.Compare) -> Iterator[Edit]:
        left = node.left
        for op, right in zip(node.ops, node.comparators, strict=True):
            old, new = _COMPARISONS.get(type(op), ("", ()))
            for text in new:
                yield from self._between(left, right, old, text, "comparison")
            left = right

    def _constant(self, node: ast.Constant) -> Iterator[Edit]:
        value = node.value
        if isinstance(value, bool):
            yield self._replace(node, repr(not value), "constant")
        elif isinstance(value, int):
            for other in (value + 1, value - 1):
                if other >= 0:
                    yield self._replace(node, str(other), "constant")
        elif isinstance(value, float):
            changed = repr(value * 1.001) if value else "1.0"
            yield self._replace(node, changed, "constant scaled" if value else "constant")

    def _call(self, node: ast.Call) -> Iterator[Edit]:
        name = _name(node.func)
        for other in _CALLS.get(name, ()):
            yield self._replace(node.func, other, "call")
        if name.endswith(".to") and isinstance(node.func, ast.Attribute):
            if [ast.unparse(a) for a in node.args] != ["tl.int64"]:
                yield self._replace(node, self._text(node.func.value), "cast")
        elif name == "tl.where":
            for kept in node.args[1:]:
                # A sum over a scalar is not the sum over a row of it: keep the mask's shape.
                text = f"({self._text(kept)}) + 0 * ({self._text(node.args[0])})"
                yield self._replace(node, text, "mask dropped")
        elif name in ("tl.cdiv", "triton.cdiv") and len(node.args) == 2:
            a, b = (self._text(arg) for arg in node.args)
            yield self._replace(node, f"(({a}) // ({b}))", "call")
        elif name in ("range", "tl.range") and node.args:
            stop = node.args[min(1, len(node.args) - 1)]
            for sign in "+-":
                yield self._replace(stop, f"({self._text(stop)}) {sign} 1", "loop bound")
        elif name in ("tl.load", "tl.store"):
            yield from self._access(node)

    def _access(self, node: ast.Call) -> Iterator[Edit]:
        pointer = node.args[0]
        for sign in "+-":
            yield self._replace(pointer, f"({self._text(pointer)}) {sign} 1", "offset")
        keywords = [k for k in node.keywords if k.arg in ("mask", "other")]
        if keywords:
            # From the end of the last positional argument to the end of the last of the two:
            # seeds name mask and other before anything else.
            start = self._span(node.args[-1])[1]
            stop = max(self._span(k)[1] for k in keywords)
            yield Edit(start, stop, "", "mask dropped")
        for keyword in keywords:
            if keyword.arg == "other":
                text = "1.0" if self._text(keyword.value) == "0.0" else "0.0"
                yield self._replace(keyword.value, text, "initial value")

    # -- text ------------------------------------------------------------------------------------

    def _span(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, ast.expr | ast.stmt | ast.keyword)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self._offset(node.lineno, node.col_offset),
            self._offset(node.end_lineno, node.end_col_offset),
        )

    def _offset(self, line: int, column_bytes: int) -> int:
        text = self._lines[line - 1].encode()[:column_bytes].decode()
        return self._starts[line - 1] + len(text)

    def _text(self, node: ast.AST) -> str:
        start, stop = self._span(node)
        return self._source[start:stop]

    def _replace(self, node: ast.AST, text: str, kind: str) -> Edit:
        return Edit(*self._span(node), text, kind)

    def _between(
        self, left: ast.AST, right: ast.AST, old: str, new: str, kind: str
    ) -> Iterator[Edit]:
        """An operator between two operands, which may be in brackets."""
        start, stop = self._span(left)[1], self._span(right)[0]
        gap = re.sub(r"#[^\n]*", lambda m: " " * len(m[0]), self._source[start:stop])
        at = gap.find(old)
        if at >= 0:
            yield Edit(start + at, start + at + len(old), new, kind)


def _name(function: ast.expr) -> str:
    return ast.unparse(function)
