"""Python's parser, for several threads at once."""

from __future__ import annotations

import ast
import os
import threading
import unicodedata

from kagent_sandbox.runtime.text import printable

_UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # control, format, halves, separators that are no newline
_lock = threading.RLock()
# CPython keeps the depth of the tree that it makes in one place for all threads. Where a garbage
# collection lets another thread in that parses too, the first ends in "SystemError: AST constructor
# recursion depth mismatch" (seen with 3.11.7).


def refuse_unseen(source: str) -> None:
    """Refuse a source that is not what it looks like to whoever reads it: with characters that are
    not seen, that turn a line around, or that end one for some programs only.

    Raises:
        SyntaxError: It holds one other than newline, tab, carriage return and form feed.
    """
    for number, line in enumerate(source.split("\n"), 1):
        if line.isprintable():
            continue
        for character in line:
            if character not in "\t\r\f" and unicodedata.category(character) in _UNSEEN:
                name = unicodedata.name(character, "a control character")
                raise SyntaxError(
                    f"the source holds U+{ord(character):04X} ({name}), which nobody sees: write "
                    f"it as an escape ({printable(character)}) in a string, or remove it",
                    ("candidate.py", number, None, line),
                )


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


def _new_lock() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_new_lock)
