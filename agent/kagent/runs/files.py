"""Files and databases on a disk that may be full, read-only, shared or damaged."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import sqlite3
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from kagent_sandbox.errors import RunError, UserError
from kagent_sandbox.process.temporary_space import temporary_space

from kagent.runs.checksums import as_text

_COLUMNS = (
    "seq INTEGER PRIMARY KEY AUTOINCREMENT, "
    "at REAL NOT NULL, kind TEXT NOT NULL, data TEXT NOT NULL"
)
_UNCHECKED_TABLE = f"CREATE TABLE events ({_COLUMNS})"  # of runs up to format 2
_TABLE = f"CREATE TABLE events ({_COLUMNS}, checksum TEXT NOT NULL)"
_SEQUENCE = "CREATE TABLE sqlite_sequence(name,seq)"  # as sqlite makes it for AUTOINCREMENT
_KNOWN = (("events", _TABLE), ("events", _UNCHECKED_TABLE), ("sqlite_sequence", _SEQUENCE))


def write_file(path: Path, data: str | bytes) -> None:
    """Write a file so that its name never shows half of it.

    Whatever has the name is replaced, links too: for files of folders that are kagent's own. For a
    path that a user names, `place_for` says what to write.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(data.encode() if isinstance(data, str) else data)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def place_for(path: Path) -> Path:
    """The file that a path of a user's stands for, which a link may lead to. It can be written now.

    Raises:
        UserError: Something else than a file is there, or no file can be made there.
    """
    with _clear_place(path):
        target = path.resolve(strict=False)
        if target.is_symlink():  # a loop, which newer Pythons leave as it is
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        if target.exists() and not target.is_file():
            raise UserError(f"{path}: {_kind_of(target)}, where a file was expected: name a file")
        if not target.parent.is_dir():
            missing = target.parent if path.is_symlink() else path.parent
            raise UserError(f"{path}: cannot be written: there is no folder {missing}")
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    return target


def require_folder(path: Path) -> None:
    """Make sure that a folder which a user names can be written, or made.

    Raises:
        UserError: It cannot.
    """
    with _clear_place(path):
        there = path.resolve(strict=False)
        while not there.exists():
            there = there.parent
        if not there.is_dir():
            raise UserError(f"{there}: {_kind_of(there)}, where a folder was expected")
        with tempfile.TemporaryDirectory(prefix=".kagent-", dir=there):
            pass


@contextmanager
def _clear_place(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, ValueError) as e:  # a loop of links, a name with a zero byte
        reason = e.strerror if isinstance(e, OSError) else e
        raise UserError(f"{path}: cannot be written ({reason}): name another place") from None


def _kind_of(path: Path) -> str:
    """The kind of thing that lies at a path, in words."""
    kinds = {
        stat.S_ISDIR: "a folder",
        stat.S_ISREG: "a file",
        stat.S_ISFIFO: "a pipe",
        stat.S_ISSOCK: "a socket",
    }
    mode = os.stat(path).st_mode
    return next((name for is_one, name in kinds.items() if is_one(mode)), "a device")


_TRIES = 4
_PAUSE_S = 0.05


def take_lock(folder: Path) -> IO[str]:
    """Hold the folder for this process, until the file is closed or the process ends.

    Raises:
        RunError: Another process holds it, or the lock of somebody else's folder is no file.
    """
    _only_a_file(folder / "lock")
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
    lock = os.fdopen(_here(str(folder / "lock"), flags), "a+", encoding="ascii")
    for last in (*(_TRIES - 1) * (False,), True):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not last:
                time.sleep(_PAUSE_S)  # a reader holds it for a moment (`_is_held`)
                continue
            lock.seek(0)
            holder = lock.read().strip()
            lock.close()
            who = f"process {holder}" if holder else "another process"
            raise RunError(f"{folder}: {who} is working on this run") from None
        break
    return lock


def _here(path: str, flags: int) -> int:
    """Open a file, and wherever its name leads no other one: its holder writes into a lock."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def is_inside(path: Path, folder: Path) -> bool:
    """Whether a path, its links followed, is a folder or lies below it."""
    return path.resolve().is_relative_to(folder.resolve())


def refuse_linked_folders(folder: Path, names: Iterable[str]) -> None:
    """Make sure that a run's own folders are no links: files would be written elsewhere.

    Raises:
        RunError: One is.
    """
    for name in names:
        if (folder / name).is_symlink():
            raise RunError(f"{folder / name}: a link, where a folder was expected")


def sign_lock(lock: IO[str], text: str) -> None:
    """Write into a lock that this process holds."""
    lock.seek(0)
    lock.truncate()
    lock.write(text)
    lock.flush()


def _is_held(folder: Path) -> bool:
    """Whether a process works on the folder. Nothing is written."""
    try:
        with open(folder / "lock", "rb", opener=_here) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:  # held, or not for us to see
        return True
    return False


def connect(path: Path) -> sqlite3.Connection:
    """Open the database of events for appending, made if need be."""
    _only_a_file(path)
    db = sqlite3.connect(path, timeout=10)
    db.text_factory = as_text
    try:
        _refuse_programs(path, db)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.execute(_TABLE.replace("CREATE TABLE", "CREATE TABLE IF NOT EXISTS", 1))
        db.commit()
    except BaseException:
        db.close()
        raise
    return db


def connect_to_read(path: Path, *, alone: bool = False) -> sqlite3.Connection:
    """Open the database of events and change nothing in its folder.

    A killed process leaves a write-ahead log, and sqlite writes beside it even to read: it is read
    from a copy.

    Args:
        path: Of the database.
        alone: Whether this process holds the folder, so that no other one writes.
    """
    log = path.with_name(f"{path.name}-wal")
    for file in (path, log):
        _only_a_file(file)
    if _has_log(path) and (alone or not _is_held(path.parent)):
        return _copied(path, log)
    for flags in ("mode=ro", "immutable=1"):
        db = sqlite3.connect(f"{path.resolve().as_uri()}?{flags}", uri=True, timeout=10)
        db.text_factory = as_text
        try:
            _refuse_programs(path, db)
        except sqlite3.OperationalError:
            db.close()
        except BaseException:
            db.close()
            raise
        else:
            return db
    raise RunError(f"{path}: cannot be read")


def _has_log(path: Path) -> bool:
    """Whether the database's header says that its changes are in a write-ahead log."""
    try:
        with path.open("rb") as file:
            return file.read(20)[18:] == b"\2\2"
    except FileNotFoundError:
        return False


def _copied(path: Path, log: Path) -> sqlite3.Connection:
    """The database and its log as they are now, in memory."""
    with temporary_space(), tempfile.TemporaryDirectory(prefix="kagent-") as folder:
        copy = Path(folder, path.name)
        shutil.copyfile(path, copy)
        if log.exists():
            shutil.copyfile(log, copy.with_name(log.name))
        db = sqlite3.connect(":memory:")
        db.text_factory = as_text
        try:
            with contextlib.closing(sqlite3.connect(copy)) as found:
                found.backup(db)
            _refuse_programs(path, db)
        except BaseException:
            db.close()
            raise
    return db


def _refuse_programs(path: Path, db: sqlite3.Connection) -> None:
    """A database of somebody else's may hold triggers, and views that never end: read no such one.

    Raises:
        RunError: It has anything but the table of events.
    """
    db.execute("PRAGMA trusted_schema=OFF")
    for name, sql in db.execute("SELECT name, sql FROM sqlite_master"):
        if (name, sql) not in _KNOWN:
            raise RunError(f"{path}: no database of a run: it also defines {name!r:.80}")


def _only_a_file(path: Path) -> None:
    """Make sure that a file of a run's folder is no link, pipe or device.

    Raises:
        RunError: This is.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        kind = "a link" if path.is_symlink() else _kind_of(path)
        raise RunError(f"{path}: {kind}, where a file was expected")


def read_file(path: Path) -> str:
    """A text file of a run's folder.

    Raises:
        RunError: It is not there, no text, or no plain file.
    """
    _only_a_file(path)
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RunError(f"{path} is missing: put it back, or start a new run") from None
    except OSError as e:
        raise RunError(f"{path}: cannot be read ({e.strerror})") from None
    except UnicodeDecodeError as e:
        raise RunError(f"{path}: {e}") from None


def read_regular(path: Path, most_bytes: int) -> bytes:
    """All bytes of a file that somebody names, or of one that a link leads to.

    A device or a pipe is not opened: to open some does something, others never end, or begin when
    somebody writes. One that takes the file's place meanwhile is opened without waiting, and not
    read.

    Raises:
        OSError: It cannot be read.
        UserError: It is no plain file, or a larger one.
    """
    _require_regular(path, os.stat(path), most_bytes)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    with open(fd, "rb") as file:
        _require_regular(path, os.fstat(fd), most_bytes)
        data = file.read(most_bytes + 1)  # a file that grows, or has no size, is read no further
    if len(data) > most_bytes:
        raise UserError(_too_large(path, most_bytes))
    return data


def _require_regular(path: Path, found: os.stat_result, most_bytes: int) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise UserError(f"{path}: a folder, where a file was expected")
    if not stat.S_ISREG(found.st_mode):
        raise UserError(f"{path}: a device, pipe or socket, where a plain file was expected")
    if found.st_size > most_bytes:
        raise UserError(_too_large(path, most_bytes))


def _too_large(path: Path, most_bytes: int) -> str:
    return f"{path}: larger than {most_bytes >> 20} MiB, the most that is read"


MEND = "put it back from a copy, or start a new run"
"""The remedy for a file of a run that is damaged."""


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
        if e.errno in (errno.EEXIST, errno.ENOTDIR):
            way = next((p for p in (folder, *folder.parents) if p.exists()), folder)
            if not way.is_dir():
                raise RunError(
                    f"{way}: {_kind_of(way)}, where a folder was expected: name another place"
                ) from None
        if e.errno == errno.ENOENT and not folder.exists():
            reason = f"cannot be made there ({e.strerror})"
            raise RunError(f"{folder}: {reason}: name another place") from None
        other = f" ({e.filename})" if e.filename not in (None, str(folder)) else ""
        raise RunError(f"{folder}: {e.strerror or e}{other}") from None
    except UnicodeDecodeError as e:  # from an error of sqlite's that quotes what it read
        raise RunError(f"{folder}/lineage.sqlite is damaged: {e}: {MEND}") from None
    except sqlite3.Error as e:
        text = str(e)
        if "full" in text:
            raise RunError(f"{folder}: the disk is full: free some space, then resume") from None
        if "readonly" in text or "unable to open" in text:
            remedy = "make it writable, or name another place with --runs"
            raise RunError(f"{folder}: cannot be written: {remedy}") from None
        if "no such table" in text:
            raise RunError(
                f"{folder}/lineage.sqlite is damaged (it holds no events): {MEND}"
            ) from None
        if isinstance(e, sqlite3.OperationalError):
            raise RunError(f"{folder}/lineage.sqlite: {e}") from None
        raise RunError(f"{folder}/lineage.sqlite is damaged: {e}: {MEND}") from None
