"""Sources of many candidates in little room: every distinct line once, as highlighted HTML."""

from __future__ import annotations

import difflib
import functools
import sys
from collections.abc import Iterable, Sequence
from html import escape

from kagent_sandbox.runtime.text import printable
from pygments.lexers.python import PythonLexer
from pygments.token import STANDARD_TYPES, Token, _TokenType

_PLAIN = {Token, Token.Text, Token.Text.Whitespace, Token.Name, Token.Punctuation}


class Lines:
    """Distinct lines, each as text and as HTML with Pygments' short class names."""

    def __init__(self) -> None:
        self.html: list[str] = []
        self._numbers: dict[str, int] = {}

    def add(self, source: str) -> list[int]:
        """Numbers of a source's lines."""
        numbers = []
        for html in highlighted(source):
            number = self._numbers.setdefault(html, len(self.html))
            if number == len(self.html):
                self.html.append(html)
            numbers.append(number)
        return numbers


# A live page is written anew for each candidate, from all before it: with fewer places than a run
# has candidates, none would be found again.
@functools.lru_cache(maxsize=4096)
def highlighted(source: str) -> tuple[str, ...]:
    """HTML of each line of a Python file, every character visible."""
    lines: list[list[str]] = [[]]
    lexer = PythonLexer(stripnl=False, ensurenl=False)  # type: ignore[no-untyped-call]
    for kind, text in lexer.get_tokens(printable(source).rstrip("\n")):  # type: ignore[no-untyped-call]
        name = _class(kind)
        for i, part in enumerate(text.split("\n")):
            if i:
                lines.append([])
            if part:
                html = escape(part, quote=False)
                lines[-1].append(f'<i class="{name}">{html}</i>' if name else html)
    return tuple(sys.intern("".join(parts)) for parts in lines)  # candidates share most lines


def _class(kind: _TokenType) -> str:
    if kind in _PLAIN:
        return ""
    known: _TokenType | None = kind
    while known is not None and known not in STANDARD_TYPES:
        known = known.parent
    return STANDARD_TYPES[known] if known is not None else ""


def changes(before: Sequence[int], after: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """List the differences between two lists of line numbers: (start, end) in one, (start, end) in
    the other.
    """
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    return [(i1, i2, j1, j2) for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag != "equal"]


def count(edits: Iterable[tuple[int, int, int, int]]) -> tuple[int, int]:
    """Lines that were removed and added."""
    edits = list(edits)
    return sum(i2 - i1 for i1, i2, _, _ in edits), sum(j2 - j1 for _, _, j1, j2 in edits)
