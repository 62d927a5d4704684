"""A task's reference.py as a library has it: without an import of kagent."""

from __future__ import annotations

import ast
import importlib.util
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from kagent_sandbox.data.task import Task
from kagent_sandbox.errors import TaskError
from kagent_sandbox.syntax import parse

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
    helpers = _Helpers()
    used = helpers.used_by(a.name for node in named for a in node.names)
    functions = "".join(f"\n\n{helpers.text_of(node)}\n" for node in used)
    before = head[-1] if named[0] in head else named[0]
    if not isinstance(body[min(body.index(before) + 1, len(body) - 1)], _DEFINITIONS):
        functions += "\n"
    lines.insert(before.end_lineno or before.lineno, functions)
    _add_imports(lines, [node for node in body if _is_import(node)], helpers.imports_of(used))
    return "".join(lines)


_DEFINITIONS = (ast.FunctionDef, ast.ClassDef)


def _add_imports(
    lines: list[str], there: Sequence[ast.stmt], needed: Iterable[ast.Import | ast.ImportFrom]
) -> None:
    """Add imports ahead of a file's first one, or names to those of the same module."""
    new = ""
    for node in needed:
        same = next((n for n in there if _from(n) == _from(node)), None)
        if isinstance(same, ast.ImportFrom):
            both = {ast.unparse(a): a for a in (*same.names, *node.names)}
            names = [both[n] for n in sorted(both)]
            merged = ast.ImportFrom(same.module, names, same.level)
            _replace(lines, same, f"{ast.unparse(merged)}\n")
        elif same is None:
            new += f"{ast.unparse(node)}\n"
    first = there[0].lineno - 1
    lines[first] = new + lines[first]


def _replace(lines: list[str], node: ast.stmt, text: str) -> None:
    """Put a text in place of a statement's lines, whose number stays."""
    end = node.end_lineno or node.lineno
    lines[node.lineno - 1 : end] = [text, *[""] * (end - node.lineno)]


class _Helpers:
    """Definitions of the helpers' module."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec(_HELPERS)
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin).read_text(encoding="utf-8")
        self.lines = source.splitlines()
        body = parse(source).body
        self.imports = [n for n in body if isinstance(n, ast.Import | ast.ImportFrom)]
        self.defined = {name: node for node in body for name in _defines(node)}

    def used_by(self, names: Iterable[str]) -> list[ast.stmt]:
        """Definitions of these names, and all that they need, in the module's order."""
        found: set[str] = set()
        left = [n for n in names if n in self.defined]
        while left:
            found.add(name := left.pop())
            needed = _reads(self.defined[name]) & self.defined.keys()
            left += needed - found
        return [node for name, node in self.defined.items() if name in found]

    def imports_of(self, used: Iterable[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
        """The imports that definitions need."""
        read = {name for node in used for name in _reads(node)}
        for node in filter(_is_import, self.imports):
            names = [a for a in node.names if (a.asname or a.name).partition(".")[0] in read]
            if names and isinstance(node, ast.Import):
                yield ast.Import(names)
            elif names and isinstance(node, ast.ImportFrom):
                yield ast.ImportFrom(node.module, names, node.level)

    def text_of(self, node: ast.stmt) -> str:
        """A definition as it stands in the module."""
        return "\n".join(self.lines[_first_line(node) - 1 : node.end_lineno])


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


def _defines(node: ast.stmt) -> list[str]:
    """Names that a statement of a module defines."""
    if isinstance(node, _DEFINITIONS):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [t.id for t in node.targets if isinstance(t, ast.Name)]
    return []


def _reads(node: ast.AST) -> set[str]:
    """Names that a statement mentions."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _first_line(node: ast.stmt) -> int:
    """Line on which a definition begins, its decorators included."""
    decorators = getattr(node, "decorator_list", [])
    return min((d.lineno for d in decorators), default=node.lineno)


def _names_helpers(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module == _HELPERS
    return isinstance(node, ast.Import) and any(a.name == _HELPERS for a in node.names)
