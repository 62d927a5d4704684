"""Files and databases on a disk that may be full, read-only, shared or damaged."""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from kagent_sandbox.errors import RunError


def write_file(path: Path, text: str) -> None:
    """Write a file so that its name never shows half of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def take_lock(folder: Path) -> IO[str]:
    """Hold the folder for this process, until the file is closed or the process ends.

    Raises:
        RunError: Another process holds it.
    """
    lock = (folder / "lock").open("a+", encoding="ascii")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip()
        lock.close()
        raise RunError(f"{folder}: process {holder} is working on this run") from None
    lock.seek(0)
    lock.truncate()
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def connect(path: Path) -> sqlite3.Connection:
    """Open the database of events for appending, made if need be."""
    db = sqlite3.connect(path, timeout=10)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=NORMAL")
    db.execute(
        "CREATE TABLE IF NOT EXISTS events (seq INTEGER PRIMARY KEY AUTOINCREMENT, "
        "at REAL NOT NULL, kind TEXT NOT NULL, data TEXT NOT NULL)"
    )
    db.commit()
    return db


def connect_to_read(path: Path) -> sqlite3.Connection:
    """A write-ahead log wants a writable folder even of readers, unless the file cannot change."""
    for flags in ("mode=ro", "immutable=1"):
        db = sqlite3.connect(f"{path.resolve().as_uri()}?{flags}", uri=True, timeout=10)
        try:
            db.execute("SELECT count(*) FROM sqlite_master")
        except sqlite3.OperationalError:
            db.close()
        else:
            return db
    raise RunError(f"{path}: cannot be read")


@contextmanager
def clear_errors(folder: Path) -> Iterator[None]:
    """Turn what a disk can do to a program into one line that names the folder and the remedy."""
    try:
        yield
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RunError(f"{folder}: the disk is full: free some space, then resume") from None
        if e.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            remedy = "make it writable, or name another place with --runs"
            raise RunError(f"{folder}: cannot be written: {remedy}") from None
        raise RunError(f"{folder}: {e}") from None
    except sqlite3.Error as e:
        text = str(e)
        if "full" in text:
            raise RunError(f"{folder}: the disk is full: free some space, then resume") from None
        if "readonly" in text or "unable to open" in text:
            remedy = "make it writable, or name another place with --runs"
            raise RunError(f"{folder}: cannot be written: {remedy}") from None
        if isinstance(e, sqlite3.OperationalError):
            raise RunError(f"{folder}/lineage.sqlite: {e}") from None
        raise RunError(f"{folder}/lineage.sqlite is damaged: {e}") from None
