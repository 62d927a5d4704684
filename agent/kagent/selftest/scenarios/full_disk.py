"""Fills a small disk under a run's store: `python full_disk.py FOLDER`, for `faults.disk_full`.

Says in one line how that ended. Exit status 1: something was lost.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sqlite3
import sys
from pathlib import Path

from kagent_sandbox.data.language import CPP
from kagent_sandbox.errors import RunError

from kagent.runs.manifest import Manifest
from kagent.runs.store import RunStore

_NEW_NAMESPACES = 0x00020000 | 0x10000000  # of mounts and of users
_DISK_BYTES = 1 << 20
_TEXT = "x" * 2000
_MOST_EVENTS = 10_000
_AFTERWARDS = 20


def own_disk(folder: Path) -> bool:
    """Mount a small file system that this process alone sees; False if that is denied."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_NEW_NAMESPACES):
        return False
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    except OSError:
        return False
    options = f"size={_DISK_BYTES}".encode()
    return bool(libc.mount(b"none", os.fsencode(folder), b"tmpfs", 0, options) == 0)


def limit_files() -> None:
    """Let no file grow past the disk's size: what is written then fails as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (_DISK_BYTES // 2, hard))


def allow_files() -> None:
    """Take the limit away again."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def fill(store: RunStore) -> tuple[int, str]:
    """Record until it fails: events that were recorded, and how it failed."""
    for number in range(_MOST_EVENTS):
        try:
            store.append("note", {"number": number, "text": _TEXT})
        except RunError as e:
            return number, str(e)
    raise SystemExit("the disk never filled up")


def numbers(store: RunStore) -> list[int]:
    """The recorded numbers."""
    return [e.data["number"] for e in store.history().events if e.kind == "note"]


def main() -> None:
    """Fill, look, make room, go on, look again."""
    folder = Path(sys.argv[1], "disk")
    folder.mkdir()
    mounted = own_disk(folder)
    filler = folder / "filler"
    if mounted:
        filler.write_bytes(bytes(_DISK_BYTES // 2))
    else:
        limit_files()
    with RunStore.create(folder / "runs", _manifest()) as store:
        count, message = fill(store)
        run = store.folder
    filler.unlink(missing_ok=True)
    if not mounted:
        allow_files()
    with RunStore.open(run) as store:
        if numbers(store) != list(range(count)):
            raise SystemExit(f"{count} events were recorded, and {numbers(store)} are there")
        for number in range(count, count + _AFTERWARDS):
            store.append("note", {"number": number, "text": _TEXT})
    with RunStore.open(run, write=False) as store:
        if numbers(store) != list(range(count + _AFTERWARDS)):
            raise SystemExit("what was recorded once there was room is not there")
    database = sqlite3.connect(run / "lineage.sqlite")
    (sound,) = database.execute("PRAGMA integrity_check").fetchone()
    database.close()
    if sound != "ok":
        raise SystemExit(f"the database is damaged: {sound}")
    reason = message.partition(": ")[2]
    sys.stdout.write(
        f"{reason}; {count} events kept, {_AFTERWARDS} more once there was room"
        f"{'' if mounted else ' (a limit on files, for want of a disk of its own)'}\n"
    )


def _manifest() -> Manifest:
    return Manifest(
        task="rows",
        task_folder="",
        task_digest="",
        matrix=False,
        kind="cpu",
        target="cpu",
        seed=0,
        lang=CPP.name,
        proposer="tuner",
        operators=(),
        in_flight=1,
        configs=1,
        environment={},
        started="",
        version="",
        id="",
    )


if __name__ == "__main__":
    main()
