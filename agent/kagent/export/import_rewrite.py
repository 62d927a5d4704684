"""A kernel's file as it is judged, and as a library has it: the same but for one import.

The two are compared as syntax trees. A file that asks where it is could be another one in a library
than in the judge's hands, and is refused.

Candidates take `cuda_kernel`, `cpp_kernel` and `tensor_map` from `kagent_sandbox.lang`; a library
brings its own copy of what these are outside of a build, `_runtime`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from kagent_sandbox.errors import UserError
from kagent_sandbox.syntax import parse

JUDGED = "kagent_sandbox.lang"
SHIPPED = ".._runtime"
_PLACES = frozenset(
    {"__file__", "__loader__", "__module__", "__name__", "__package__", "__path__", "__spec__"}
)
"""Names that tell a file where it is."""


def as_shipped(source: str) -> str:
    """The file with its import taken from the library.

    Raises:
        UserError: It imports more of kagent than a library has, or in a form without a name; or it
            asks where it is.
    """
    _refuse_curious(parse(source))
    return _rewritten(source, _shipped_import)


def as_judged(text: str) -> str:
    """The inverse of `as_shipped`, up to the form of the import."""
    return _rewritten(text, _judged_import)


def kagent_imports(source: str) -> list[str]:
    """Names that a file takes from kagent; a whole module by its own.

    Raises:
        UserError: As `as_shipped`.
    """
    as_shipped(source)
    found = []
    for node in _imports(source):
        if isinstance(node, ast.ImportFrom) and node.module == JUDGED:
            found += [a.name for a in node.names]
        elif isinstance(node, ast.Import | ast.ImportFrom) and _shipped_import(node) is not None:
            found.append("module")
    return found


def _rewritten(source: str, replace: object) -> str:
    assert callable(replace)
    lines = source.splitlines(keepends=True)
    found = list(_imports(source))
    for node in reversed(found):
        text = replace(node)
        if text is None:
            continue
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        first, last = lines[node.lineno - 1], lines[node.end_lineno - 1]
        head = first.encode()[: node.col_offset].decode()
        tail = last.encode()[node.end_col_offset :].decode()
        lines[node.lineno - 1 : node.end_lineno] = [head + text + tail]
    rewritten = "".join(lines)
    if _without_imports(rewritten) != _without_imports(source):
        raise UserError(
            "its file would be another one with its import rewritten: write the import on a line "
            "of its own, and no characters that end a line for some programs only"
        )
    return rewritten


def _without_imports(source: str) -> str:
    """The syntax tree but for what its imports name; empty where it is no Python."""
    try:
        tree = parse(source)
    except SyntaxError:
        return ""
    return ast.dump(_Unnamed().visit(tree))


class _Unnamed(ast.NodeTransformer):
    """Takes the names out of imports."""

    def visit_Import(self, _: ast.Import) -> ast.Pass:
        return ast.Pass()

    def visit_ImportFrom(self, _: ast.ImportFrom) -> ast.Pass:
        return ast.Pass()


def _refuse_curious(tree: ast.Module) -> None:
    """Refuse a file that asks where it is: its module's name is another one in a library.

    Raises:
        UserError: It does; `if __name__ == "__main__"` is no such question.
    """
    main = {
        id(node.left)
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        and [ast.unparse(c) for c in node.comparators] == ["'__main__'"]
    }
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(level=level, lineno=line) if level:
                what = ast.unparse(node)
            case ast.Name(id=what, lineno=line) | ast.Attribute(attr=what, lineno=line):
                if what not in _PLACES or (what == "__name__" and id(node) in main):
                    continue
            case _:
                continue
        raise UserError(
            f"its line {line} asks where it is ({what}): in a library it would get another answer "
            "than when it was judged; remove it"
        )


def _imports(source: str) -> Iterator[ast.Import | ast.ImportFrom]:
    found = [n for n in ast.walk(parse(source)) if isinstance(n, ast.Import | ast.ImportFrom)]
    yield from sorted(found, key=lambda n: (n.lineno, n.col_offset))


def _shipped_import(node: ast.Import | ast.ImportFrom) -> str | None:
    if isinstance(node, ast.Import):
        ours = [a for a in node.names if a.name.split(".")[0] in ("kagent", "kagent_sandbox")]
        if not ours:
            return None
        only = node.names[0]
        if len(node.names) > 1 or only.name != JUDGED or only.asname is None:
            raise _refused(node)
        return f"from .. import _runtime as {only.asname}"
    if node.level or (node.module or "").split(".")[0] not in ("kagent", "kagent_sandbox"):
        return None
    if node.module == JUDGED:
        return f"from {SHIPPED} import {_names(node)}"
    if node.module == "kagent_sandbox" and [a.name for a in node.names] == ["lang"]:
        return f"from .. import _runtime as {node.names[0].asname or 'lang'}"
    raise _refused(node)


def _judged_import(node: ast.Import | ast.ImportFrom) -> str | None:
    if isinstance(node, ast.Import) or node.level != 2:
        return None
    if node.module == "_runtime":
        return f"from {JUDGED} import {_names(node)}"
    return f"from kagent_sandbox import lang as {node.names[0].asname}"


def _names(node: ast.ImportFrom) -> str:
    return ", ".join(a.name if a.asname is None else f"{a.name} as {a.asname}" for a in node.names)


def _refused(node: ast.Import | ast.ImportFrom) -> UserError:
    return UserError(
        f"its line {node.lineno}, {ast.unparse(node)!r}, cannot be carried into a library: write "
        f"from {JUDGED} import cuda_kernel (or cpp_kernel, tensor_map)"
    )
