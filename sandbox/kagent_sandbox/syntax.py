"""Python's parser, for several threads at once."""

from __future__ import annotations

import ast
import os
import threading

_lock = threading.RLock()
# CPython keeps the depth of the tree that it makes in one place for all threads. Where a garbage
# collection lets another thread in that parses too, the first ends in "SystemError: AST constructor
# recursion depth mismatch" (seen with 3.11.7).


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
