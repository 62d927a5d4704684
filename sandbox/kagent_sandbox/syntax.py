"""Python's parser, for several threads at once."""

from __future__ import annotations

import ast
import os
import re
import threading
import unicodedata
from collections.abc import Sequence

from kagent_sandbox.runtime.text import printable

_UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # control, format, halves, separators that are no newline
_ENCODING = re.compile(r"[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")
_BLANK = re.compile(r"[ \t\f]*(#|$)")  # the second line may declare one if the first is such
_lock = threading.RLock()
# CPython keeps the depth of the tree that it makes in one place for all threads. Where a garbage
# collection lets another thread in that parses too, the first ends in "SystemError: AST constructor
# recursion depth mismatch" (seen with 3.11.7).


def refuse_unseen(source: str) -> None:
    """Refuse a source that is not what it looks like to whoever reads it: with characters that are
    not seen, that turn a line around, or that end one for some programs only; or one that declares
    an encoding, in which Python reads another text than everybody else.

    Raises:
        SyntaxError: It holds such a character other than newline, tab and carriage return, or
            declares another encoding than UTF-8.
    """
    _refuse_encoding(source)
    for number, line in enumerate(source.split("\n"), 1):
        if line.isprintable():
            continue
        for character in line:
            if character not in "\t\r" and unicodedata.category(character) in _UNSEEN:
                name = unicodedata.name(character, "a control character")
                raise SyntaxError(
                    f"the source holds U+{ord(character):04X} ({name}), which nobody sees: write "
                    f"it as an escape ({printable(character)}) in a string, or remove it",
                    ("candidate.py", number, None, line),
                )


def _refuse_encoding(source: str) -> None:
    """Refuse what PEP 263 lets a file say in its first two lines, unless it says UTF-8."""
    for number, line in enumerate(re.split(r"\r\n?|\n", source, maxsplit=2)[:2], 1):
        if found := _ENCODING.match(line):
            if found[1].lower().replace("_", "-") not in ("utf-8", "utf8"):
                raise SyntaxError(
                    f"the source declares the encoding {found[1]}: Python would read another text "
                    "than is seen. It is UTF-8: remove the declaration",
                    ("candidate.py", number, None, line),
                )
            return
        if not _BLANK.match(line):
            return


def parse(source: str) -> ast.Module:
    """`ast.parse(source)`, one thread at a time.

    Raises:
        SyntaxError: It is no Python; ValueError, RecursionError and MemoryError as `ast.parse` has
            them.
    """
    with _lock:
        return ast.parse(source)


def parse_expression(source: str) -> ast.expr:
    """The tree of a single expression, one thread at a time.

    Raises:
        SyntaxError: It is none; others as `parse` has them.
    """
    with _lock:
        return ast.parse(source, mode="eval").body


def without_texts(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Statements without docstrings and other texts that nothing reads."""
    return [
        s
        for s in body
        if not (
            isinstance(s, ast.Expr)
            and isinstance(s.value, ast.Constant)
            and isinstance(s.value.value, str)
        )
    ]


def _new_lock() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_new_lock)
