"""Definitions of a module that some of its names need: what a file takes along of another one."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kagent_sandbox.syntax import parse


@dataclass(frozen=True)
class Needed:
    """Statements of a module, in its order, and imports apart.

    Attributes:
        statements: All of them.
        imports: Whole statements, each in a line.
        code: The others, as they stand in the module, two empty lines between them.
        names: Names that they bind.
    """

    statements: list[ast.stmt]
    imports: list[str]
    code: str
    names: set[str]


def needed_definitions(source: str, wanted: Iterable[str]) -> Needed:
    """Find the statements of a module that some of its names need.

    Args:
        source: The module's text.
        wanted: The names.
    """
    lines = source.splitlines(keepends=True)
    statements = [n for n in parse(source).body if not isinstance(n, ast.If)]
    waiting, found = list(wanted), set()
    while waiting:
        name = waiting.pop()
        for node in statements:
            if node not in found and name in defined_names(node):
                found.add(node)
                waiting += [n.id for n in ast.walk(node) if isinstance(n, ast.Name)]
    needed = [node for node in statements if node in found]
    imports, code, names = [], [], set[str]()
    for node in needed:
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.append(ast.unparse(node))
            continue
        names |= set(defined_names(node))
        decorated = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(d.lineno for d in decorated)])
        text = "".join(lines[first - 1 : node.end_lineno])
        code.append(text.rstrip("\n"))
    return Needed(needed, imports, "\n\n\n".join(code), names)


def defined_names(node: ast.stmt) -> Iterator[str]:
    """Names that a statement of a module binds."""
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
            yield from ((a.asname or a.name).partition(".")[0] for a in aliases)
        case _:
            for inner in ast.walk(node):
                if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                    yield inner.id
