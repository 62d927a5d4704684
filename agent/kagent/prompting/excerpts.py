"""Sources in few lines: what a file says about itself, and the parts that another file lacks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from kagent_sandbox.data.language import CUDA
from kagent_sandbox.syntax import parse

from kagent.prompting.measured import docstring
from kagent.prompting.text import clipped, fenced

SHORT_LINES = 80  # a source of at most so many lines is shown whole
ABOUT_LINES = 14
HOST_LINES = 40
_OPEN = re.compile(r"^[^\s/#}].*")  # a line at the margin that is no comment and closes nothing


def outline(source: str, entry: str) -> str:
    """Return the file's own description, or its host function where it has none."""
    about = docstring(source)
    if about:
        return fenced(clipped(about.partition("\n\n")[0], ABOUT_LINES))
    host = host_function(source, entry)
    return fenced(clipped(host, HOST_LINES), "python") if host else ""


def sketch(source: str, entry: str) -> str:
    """Return an excerpt of an unmeasured file that is not to be changed: the source if it is short,
    else its own description and its host function.
    """
    if source.count("\n") < SHORT_LINES:
        return fenced(source, "python")
    host = fenced(clipped(host_function(source, entry), HOST_LINES), "python")
    about = clipped(docstring(source), ABOUT_LINES)
    return "\n\n".join([*([fenced(about)] if about else []), host])


def host_function(source: str, entry: str) -> str:
    """Source of the entry function; empty if there is none."""
    for node in _body(source):
        if isinstance(node, ast.FunctionDef) and node.name == entry:
            return ast.get_source_segment(source, node) or ""
    return ""


def essentials(source: str, known: str, entry: str, lines: int) -> str:
    """Return at most about `lines` lines of a long file, in its order. The pieces that `known`
    lacks, the host function and kernels come before the others. A note tells of omissions.
    """
    pieces = list(_pieces(source))
    seen = {_plain(p.text) for p in _pieces(known)}
    new = [p for p in pieces if _plain(p.text) not in seen]
    kept: set[int] = set()
    left = lines
    for piece in sorted(new, key=lambda p: (p.rank(entry), p.at)):
        size = piece.text.count("\n") + 1
        if size <= left or not kept:
            kept.add(piece.at)
            left -= size
    chosen = [p for p in new if p.at in kept]
    if not chosen:
        return ""
    shared, long = len(pieces) - len(new), len(new) - len(chosen)
    why = [f"{shared} pieces that the parent has too"] if shared else []
    why += [f"{long} for length"] if long else []
    text = fenced(clipped("\n\n".join(p.text for p in chosen), 2 * lines), CUDA.name)
    return text + (f"\n\nLeft out: {' and '.join(why)}." if why else "")


@dataclass(frozen=True, slots=True)
class _Piece:
    """A definition at the top level of a file, or of a kernel's source within it."""

    at: int
    text: str

    def rank(self, entry: str) -> int:
        """Return the order in which to keep parts: the host function, kernels, the rest."""
        if self.text.startswith(f"def {entry}("):
            return 0
        return 1 if re.search(r"\b__global__\b|^@.*\bjit\b", self.text, re.MULTILINE) else 2


def _pieces(source: str) -> Iterator[_Piece]:
    at = 0
    for number, node in enumerate(_body(source)):
        text = _segment(source, node)
        value = node.value if isinstance(node, ast.Assign | ast.Expr) else None
        inner = value.value if isinstance(value, ast.Constant) else None
        if isinstance(inner, str) and "\n" in inner:
            if number == 0 and isinstance(node, ast.Expr):
                continue  # the docstring is told elsewhere
            for part in _definitions(inner):
                yield _Piece(at := at + 1, part)
        elif not isinstance(node, ast.Import | ast.ImportFrom):
            yield _Piece(at := at + 1, text)


def _segment(source: str, node: ast.stmt) -> str:
    """Source of a statement, its decorators included."""
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(d.lineno for d in decorators)])
    return "\n".join(source.splitlines()[first - 1 : node.end_lineno])


def _definitions(text: str) -> Iterator[str]:
    """A C++ source in pieces that begin at the margin after a blank line, directives left out."""
    for block in re.split(r"\n\s*\n(?=\S)", text.strip("\n")):
        kept = [line for line in block.split("\n") if not line.startswith("#include")]
        if any(_OPEN.match(line) for line in kept):
            yield "\n".join(kept)


def _plain(text: str) -> str:
    return re.sub(r"\s+|//[^\n]*", "", text)


def _body(source: str) -> list[ast.stmt]:
    try:
        return parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
