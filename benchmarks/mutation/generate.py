"""All mutants of a candidate's file."""

from __future__ import annotations

import ast
from pathlib import Path

from mutation import cxx, python
from mutation.edits import Mutant, apply


def mutants_of(path: Path) -> list[Mutant]:
    """Mutants of a seed in the order of its lines; each text once."""
    return mutants_of_source(f"{path.parent.name}/{path.name}", path.read_text())


def mutants_of_source(file: str, source: str) -> list[Mutant]:
    """Mutants of a candidate's text: of its Python, and of the kernels in its literals."""
    found = [apply(file, source, edit) for edit in python.edits_of(source)]
    for start, text in kernel_sources(source):
        at, prelude = cxx.prelude_of(text, cuda="__global__" in text)
        for edit in cxx.edits_of(text):
            placed = type(edit)(start + edit.start, start + edit.stop, edit.text, edit.kind)
            rounded = edit.text == "Rounded"
            found.append(
                apply(
                    file, source, placed, prelude if rounded else "", start + at if rounded else 0
                )
            )
    unique = {m.source: m for m in found if m.source != source}
    return sorted(unique.values(), key=lambda m: m.line)


def kernel_sources(source: str) -> list[tuple[int, str]]:
    """Raw literals that hold C++ or CUDA: where their text starts, and the text."""
    found = []
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            continue
        start = lines[node.lineno - 1] + node.col_offset
        if source.startswith('r"""', start) and "(" in node.value and "{" in node.value:
            found.append((start + 4, node.value))
    return found
