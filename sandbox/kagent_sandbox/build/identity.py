"""When are two candidates the same? By text, and by syntax tree."""

from __future__ import annotations

import ast
import hashlib


def source_hash(source: str) -> str:
    """SHA-256 of the text."""
    return hashlib.sha256(source.encode()).hexdigest()


def tree_hash(source: str) -> str:
    """SHA-256 of the syntax tree without docstrings: comments and layout do not count.

    Raises:
        SyntaxError: It is not Python.
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                node.body = node.body[1:]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()
