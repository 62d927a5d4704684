"""Later analyses of a run (ablations, profiles): a file beside its folder.

A run's folder is evidence: only what decides its course changes it. `RUN.analyses.jsonl` has one
JSON object per line. `RunStore.history` adds them to the run's events.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kagent_sandbox.errors import RunError

from kagent.runs.files import MEND, clear_errors, read_regular

_MOST_BYTES = 64 << 20


def analyses_path(folder: Path) -> Path:
    """The file beside a run's folder; it may not exist."""
    folder = folder.resolve()
    return folder.with_name(f"{folder.name}.analyses.jsonl")


def add_analysis(folder: Path, run_id: str, kind: str, data: Mapping[str, Any]) -> Path:
    """Keep an analysis of a run, in one write, and return the file.

    Args:
        folder: Of the run.
        run_id: The manifest's: a folder's name may be used again.
        kind: Of the event, such as "ablated".
        data: JSON.

    Raises:
        RunError: The file cannot be written.
    """
    path = analyses_path(folder)
    row = {"run": run_id, "at": time.time(), "kind": kind, "data": data}
    line = json.dumps(row, separators=(",", ":"), allow_nan=False) + "\n"
    with clear_errors(path):
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        with open(fd, "wb", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # nobody's line may follow half a one
            size, text = os.fstat(fd).st_size, line.encode()
            if (file.write(text) or 0) < len(text):
                file.truncate(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return path


def read_analyses(folder: Path, run_id: str) -> Iterator[tuple[float, str, str]]:
    """Time, kind and JSON of each analysis of a run, in order.

    Raises:
        RunError: The file is damaged.
    """
    path = analyses_path(folder)
    if not path.exists():
        return
    with clear_errors(path):
        lines = read_regular(path, _MOST_BYTES).splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if row["run"] == run_id:
                yield row["at"], row["kind"], json.dumps(row["data"])
        except (ValueError, KeyError, TypeError, RecursionError) as e:
            raise RunError(f"{path}: line {number} is damaged: {e}: {MEND}") from None
