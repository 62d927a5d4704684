"""Changing a file's text at places that its syntax tree names, and nowhere else."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class TextEdit:
    """Replace the characters from `start` to `stop`."""

    start: int
    stop: int
    text: str


class EditableText:
    """Source with the positions of its lines. The tree counts columns in bytes of UTF-8."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._lines = source.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    def at(self, line: int, column: int) -> int:
        """Offset of a position as the tree gives it: line from 1, column in bytes."""
        text = self._lines[line - 1] if line <= len(self._lines) else ""
        if not text.isascii():
            column = len(text.encode()[:column].decode())
        return self._starts[line - 1] + column

    def span(self, node: ast.expr | ast.stmt | ast.alias | ast.arg) -> tuple[int, int]:
        """First offset of a node and the one after its last."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self.at(node.lineno, node.col_offset)
        return start, self.at(node.end_lineno, node.end_col_offset)

    def lines_of(self, node: ast.stmt) -> tuple[int, int]:
        """Span of the whole lines of a top-level statement, decorators included."""
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        assert node.end_lineno is not None
        return self._starts[first - 1], self._starts[node.end_lineno]

    def apply(self, edits: Iterable[TextEdit]) -> str:
        """The text with all edits made; they must not overlap."""
        parts: list[str] = []
        position = 0
        for edit in sorted(edits):
            assert edit.start >= position, "edits overlap"
            parts += [self.source[position : edit.start], edit.text]
            position = edit.stop
        return "".join([*parts, self.source[position:]])
