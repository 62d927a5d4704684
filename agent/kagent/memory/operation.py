"""Hashes of a task's computation and its signature: tasks with equal ones are related."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterable, Iterator

from kagent_sandbox.data.task import Task
from kagent_sandbox.syntax import without_texts

from kagent.search.definitions import needed_definitions

_NAME = re.compile(r"[A-Za-z_]\w*")
REFERENCE = "reference"


def operation_of(task: Task) -> str:
    """Hash of how the task is called and of its float64 reference: of the function `reference` and
    all of the file that it uses, comments and docstrings left out. Cases, tolerances, summary and
    the entry's name do not count.

    Tasks with equal hashes are the same operation: a kernel of one can be a kernel of the other.
    """
    source = (task.folder / "reference.py").read_text(encoding="utf-8")
    return _hash([form_of(task), *_computation(source)])


def form_of(task: Task) -> str:
    """Hash of how the task is called: its arguments and results, with dimensions numbered in the
    order of their first use, and whether it is one of matrix products.
    """
    names: dict[str, str] = {}

    def numbered(size: object) -> str:
        return _NAME.sub(lambda m: names.setdefault(m[0], f"d{len(names)}"), str(size))

    arguments = [
        [
            None if a.shape is None else [numbered(s) for s in a.shape],
            a.dtype,
            None if a.value is None else numbered(a.value),
            a.layout,
            a.optional is not None,
            a.may_change,
        ]
        for a in task.arguments
    ]
    results = [[[numbered(s) for s in r.shape], r.dtype] for r in task.compared]
    return _hash([json.dumps([arguments, results, task.matrix])])


def _computation(source: str) -> Iterator[str]:
    """Dumps of the top-level statements that the reference needs, in the file's order."""
    for statement in needed_definitions(source, [REFERENCE]).statements:
        if isinstance(statement, ast.Import) and not any(a.asname for a in statement.names):
            continue  # the names that are used say as much
        for node in ast.walk(statement):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                node.body = without_texts(node.body)
        yield ast.dump(statement)


def _hash(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
