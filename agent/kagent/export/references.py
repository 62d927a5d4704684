"""A task's reference.py as a library has it: without an import of kagent."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

from kagent_sandbox.data.task import Task
from kagent_sandbox.errors import TaskError
from kagent_sandbox.syntax import parse

_HELPERS = "kagent_sandbox.draws"  # found without an import: it needs torch, and this does not


def shipped_reference(task: Task) -> str:
    """The text of reference.py, with the functions of `kagent_sandbox.draws` in place of their
    import.

    Raises:
        TaskError: It imports them in another form than `from kagent_sandbox.draws import name`.
    """
    path = task.folder / "reference.py"
    text = path.read_text(encoding="utf-8")
    if _HELPERS not in text:
        return text
    lines = text.splitlines(keepends=True)
    helpers = _body()
    for node in reversed(parse(text).body):
        if isinstance(node, ast.ImportFrom) and node.module == _HELPERS:
            if any(a.asname or a.name == "*" for a in node.names):
                raise TaskError(f"{path}: line {node.lineno}: write `from {_HELPERS} import name`")
            lines[node.lineno - 1 : node.end_lineno] = [helpers]
            helpers = ""
    found = "".join(lines)
    if any(_names_helpers(node) for node in ast.walk(parse(found))):
        raise TaskError(f"{path}: import {_HELPERS} at its top, as `from {_HELPERS} import name`")
    return found


def _body() -> str:
    """The helpers' text without its docstring and what only a module's beginning may have."""
    spec = importlib.util.find_spec(_HELPERS)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text(encoding="utf-8")
    first = next(
        n
        for n in parse(source).body
        if isinstance(n, ast.Import | ast.ImportFrom) and getattr(n, "module", "") != "__future__"
    )
    return "".join(source.splitlines(keepends=True)[first.lineno - 1 :])


def _names_helpers(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module == _HELPERS
    return isinstance(node, ast.Import) and any(a.name == _HELPERS for a in node.names)
