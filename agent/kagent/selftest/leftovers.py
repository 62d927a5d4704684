"""Leftovers of attacks on the machine, seen from outside: processes, files, shared memory, IPC.

What it does not see: files deeper than in the folders that are looked through (the temporary ones,
shared memory, home, the working directory) unless they are the baits; what another user hides; what
is gone again before the end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from kagent_sandbox.confine.libc import prctl
from kagent_sandbox.confine.users import FIRST_UID, UIDS
from kagent_sandbox.process import process_tree

_GRACE_S = 3.0
_EXIT_S = 60.0  # for the kernel to take apart what has ended: a GPU's context on a busy host
_SUBREAPER = 36
_PREFIX = "kagent-selftest-"


class Leftovers:
    """Watches from its making until `left` is asked. To be closed.

    Meanwhile temporary files go to a folder of its own, and processes whose parents have died
    become children of this process instead of vanishing among the machine's.

    Args:
        name: A name that attacks are asked to give to what they leave.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._stack = contextlib.ExitStack()
        with self._stack:
            prctl(_SUBREAPER, 1)
            self._stack.callback(prctl, _SUBREAPER, 0)
            self._before = self._things()
            self._processes_before = _processes_below()
            _remove_stale()
            prefix = f"{_PREFIX}{os.getpid()}-"
            made = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
            self._own = Path(self._stack.enter_context(made))
            self._own.chmod(0o711)  # children of another user reach their folders in it
            self._stack.enter_context(_temporary_files_in(self._own))
            self._stack = self._stack.pop_all()

    def close(self) -> None:
        """Watch no more."""
        self._stack.close()

    def left(self) -> list[str]:
        """List what is new on the machine once all that kagent started has been closed."""
        began = since = time.monotonic()
        while True:
            now = time.monotonic()
            if self._all_are_ending() and now - began < _EXIT_S:
                since = now  # a caller that waits for their end has as long after it
            processes = self._processes()
            if not processes or now - since >= _GRACE_S:
                break
            time.sleep(0.05)
        own = {f"file {p}" for p in self._own.iterdir()}  # now: a process's end takes files along
        return [*processes, *sorted(own | self._things() - self._before)]

    def _processes(self) -> list[str]:
        """New processes below this one. Those that have ended and nobody asked about are asked."""
        left = []
        for pid in self._new():
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0] == pid:
                    continue
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
                left.append(f"process {pid}: {command[:100].decode(errors='replace').strip()}")
        return left

    def _new(self) -> list[int]:
        """Process ids of what was started below this process since the making."""
        return [pid for pid, _ in sorted(_processes_below() - self._processes_before)]

    def _all_are_ending(self) -> bool:
        """Whether the kernel takes apart every new process, or one below that."""
        below = process_tree.descendants
        return all(any(map(process_tree.exiting, (pid, *below(pid)))) for pid in self._new())

    def _things(self) -> set[str]:
        """Files and IPC objects that can only be a candidate's: by their owner, or their name."""
        return {*_files(self._name), *_ipc()}


def _processes_below() -> set[tuple[int, int]]:
    """Process ids below this process, each with the time of its start: ids are used again."""
    below = process_tree.descendants(os.getpid())
    began = {pid: process_tree.began(pid) for pid in below}
    return {(pid, ticks) for pid, ticks in began.items() if ticks is not None}


def _remove_stale() -> None:
    """Remove folders of selftests that were killed before they could."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        with contextlib.suppress(OSError, ValueError):
            gone = not Path(f"/proc/{int(folder.name.split('-')[2])}").exists()
            if gone and folder.stat().st_uid == os.getuid():
                shutil.rmtree(folder)


@contextlib.contextmanager
def _temporary_files_in(folder: Path) -> Iterator[None]:
    before, tempfile.tempdir = os.environ.get("TMPDIR"), str(folder)
    os.environ["TMPDIR"] = str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = None
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


def _files(name: str) -> Iterator[str]:
    places = {tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue"}  # noqa: S108
    for folder in sorted({*places, str(Path.home()), str(Path.cwd())}):
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    owner = entry.stat(follow_symlinks=False).st_uid
                    if _confined(owner) or name in entry.name:
                        yield f"file {entry.path}"


def _ipc() -> Iterator[str]:
    """Shared memory, semaphores and queues of System V that a confined user made."""
    for kind in ("shm", "sem", "msg"):
        with contextlib.suppress(OSError):
            head, *rows = Path(f"/proc/sysvipc/{kind}").read_text(encoding="ascii").splitlines()
            columns = head.split()
            for row in rows:
                values = dict(zip(columns, row.split(), strict=True))
                maker = int(values["cuid"])
                if _confined(maker) or maker == os.getuid() != 0:
                    yield f"System V {kind} {values[f'{kind}id']}"


def _confined(uid: int) -> bool:
    """Whether it is a user that confined children run as where the caller is root."""
    return FIRST_UID <= uid < FIRST_UID + UIDS
