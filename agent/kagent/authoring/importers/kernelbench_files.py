"""Finding KernelBench's files. Reading them imports torch, which takes seconds; this does not."""

from __future__ import annotations

import re
from pathlib import Path

from kagent_sandbox.errors import UserError

_PARTS = (r"class Model", r"def get_inputs")


def problem_files(paths: list[Path]) -> list[Path]:
    """Files with a problem: those that are named, and those in folders that are.

    Raises:
        UserError: There are none.
    """
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise UserError(f"{path}: no such file or folder")
        if path.is_file():
            found.append(path)
        else:
            found += [f for f in sorted(path.rglob("*.py")) if is_problem(f)]
    if not found:
        raise UserError(f"{paths[0]}: no file there with Model and get_inputs")
    return list(dict.fromkeys(found))


def is_problem(path: Path) -> bool:
    """Whether a file looks like a problem."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return all(re.search(rf"^{part}\b", text, re.MULTILINE) for part in _PARTS)
