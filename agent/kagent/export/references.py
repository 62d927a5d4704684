"""A task's reference.py as a library has it: without an import of kagent."""

from __future__ import annotations

import ast
import importlib.util
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

from kagent_sandbox.data.task import Task
from kagent_sandbox.errors import TaskError
from kagent_sandbox.syntax import parse

from kagent.search.definitions import needed_definitions

_HELPERS = "kagent_sandbox.draws"  # found without an import: it needs torch, and this does not


def shipped_reference(task: Task) -> str:
    """The text of reference.py, with those functions of `kagent_sandbox.draws` that it uses in
    place of their import.

    Raises:
        TaskError: It imports them in another form than `from kagent_sandbox.draws import name`.
    """
    path = task.folder / "reference.py"
    text = path.read_text(encoding="utf-8")
    if _HELPERS not in text:
        return text
    lines = text.splitlines(keepends=True)
    body = parse(text).body
    head = list(itertools.takewhile(_is_of_the_head, body))
    named = [n for n in body if isinstance(n, ast.ImportFrom) and n.module == _HELPERS]
    for node in named:
        if any(a.asname or a.name == "*" for a in node.names):
            raise TaskError(f"{path}: line {node.lineno}: write `from {_HELPERS} import name`")
        _replace(lines, node, "")
    if any(_names_helpers(node) for node in ast.walk(parse("".join(lines)))):
        raise TaskError(f"{path}: import {_HELPERS} at its top, as `from {_HELPERS} import name`")
    if not named:  # a comment names them
        return text
    needed = needed_definitions(_helpers(), [a.name for node in named for a in node.names])
    before = head[-1] if named[0] in head else named[0]
    then = body[min(body.index(before) + 1, len(body) - 1)]
    end = "\n" if isinstance(then, ast.FunctionDef | ast.ClassDef) else "\n\n"
    lines.insert(before.end_lineno or before.lineno, f"\n\n{needed.code}{end}")
    _add_imports(lines, [node for node in body if _is_import(node)], needed.imports)
    return "".join(lines)


def _add_imports(lines: list[str], there: Sequence[ast.stmt], needed: Iterable[str]) -> None:
    """Add imports ahead of a file's first one, or names to those of the same module."""
    new = ""
    for text in needed:
        (node,) = parse(text).body
        same = next((n for n in there if _from(n) == _from(node)), None)
        if isinstance(same, ast.ImportFrom) and isinstance(node, ast.ImportFrom):
            both = {ast.unparse(a): a for a in (*same.names, *node.names)}
            names = [both[n] for n in sorted(both)]
            merged = ast.ImportFrom(same.module, names, same.level)
            _replace(lines, same, f"{ast.unparse(merged)}\n")
        elif same is None:
            new += f"{text}\n"
    first = there[0].lineno - 1
    lines[first] = new + lines[first]


def _replace(lines: list[str], node: ast.stmt, text: str) -> None:
    """Put a text in place of a statement's lines, whose number stays."""
    end = node.end_lineno or node.lineno
    lines[node.lineno - 1 : end] = [text, *[""] * (end - node.lineno)]


def _helpers() -> str:
    """The text of the helpers' module."""
    spec = importlib.util.find_spec(_HELPERS)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")


def _is_of_the_head(node: ast.stmt) -> bool:
    """Whether a module's first statements may be it: its docstring, imports, those of types."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
    return isinstance(node, ast.Expr | ast.Import | ast.ImportFrom)


def _is_import(node: ast.stmt) -> bool:
    """Whether it imports something that is not of `__future__`."""
    if isinstance(node, ast.ImportFrom):
        return node.module != "__future__"
    return isinstance(node, ast.Import)


def _from(node: ast.stmt) -> str:
    """Module that an import takes names from; an `import` of modules itself."""
    if isinstance(node, ast.ImportFrom):
        return f"{'.' * node.level}{node.module or ''}"
    return ast.unparse(node)


def _names_helpers(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module == _HELPERS
    return isinstance(node, ast.Import) and any(a.name == _HELPERS for a in node.names)
