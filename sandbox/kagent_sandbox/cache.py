"""Figures that are measured once per device and versions: JSON in the user's cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
from pathlib import Path
from typing import TypeVar

from kagent_sandbox.data.records import RecordError, from_json, to_json
from kagent_sandbox.runtime.store import write

T = TypeVar("T")


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/kagent`, by default `~/.cache/kagent`. It may not exist.

    Where it cannot be written, this user's folder among the temporary files: torch's compiler works
    with no folder that is read-only.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = (Path(base) if base else Path.home() / ".cache") / "kagent"
    return folder if _can_be_made(folder) else _temporary() or folder


def _can_be_made(folder: Path) -> bool:
    """Whether files can be written there, once it has been made."""
    there = next((p for p in (folder, *folder.parents) if p.exists()), folder)
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _temporary() -> Path | None:
    """A folder that is this user's alone, since binaries are loaded from it; None if it is not."""
    folder = Path(tempfile.gettempdir()) / f"kagent-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return None
    private = stat.S_ISDIR(status.st_mode) and not stat.S_IMODE(status.st_mode) & 0o077
    return folder if private and status.st_uid == os.getuid() else None


def compiled_folder() -> Path:
    """Folder of what torch's compiler leaves behind in trusted processes."""
    return cache_folder() / "inductor"


def named(what: str, *parts: object) -> str:
    """A file's name for figures that depend on `parts`."""
    text = "\0".join(str(p) for p in parts)
    return f"{what}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def load(name: str, cls: type[T]) -> T | None:
    """A record that `save` wrote, or None: absent, unreadable and outdated are the same."""
    try:
        return from_json(cls, json.loads((cache_folder() / f"{name}.json").read_bytes()))
    except (OSError, ValueError, RecordError):
        return None


def save(name: str, record: object) -> None:
    """Write a record for later runs; where the folder cannot be written they measure again."""
    path = cache_folder() / f"{name}.json"
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    write(path, json.dumps(to_json(record), allow_nan=False, indent=1).encode())
