"""Kernels of a run: a file for each text, named by its hash."""

from __future__ import annotations

import re
from pathlib import Path

from kagent_sandbox.errors import RunError

from kagent.runs.files import MEND, read_file
from kagent.runs.lineage import kernel_id

_KERNEL = re.compile(r"[0-9a-f]{16}")


def kernel_path(folder: Path, kernel: str) -> Path:
    """Path of a kernel's text in a run's folder."""
    return folder / "kernels" / f"{kernel}.py"


def read_kernel(folder: Path, kernel: str) -> str:
    """A kernel's text.

    Args:
        folder: Of the run.
        kernel: Its id.

    Raises:
        RunError: Its file is missing or was changed, or this is no kernel's id.
    """
    if not _KERNEL.fullmatch(kernel):
        raise RunError(f"{folder}: {kernel!r:.40} is no kernel's id")
    path = kernel_path(folder, kernel)
    source = read_file(path)
    if kernel_id(source) != kernel:
        raise RunError(f"{path}: its text was changed after it was stored: {MEND}")
    return source
