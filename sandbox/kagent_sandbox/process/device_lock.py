"""Turns on a device between processes: who times has it alone, who only works shares it.

Every request takes a ticket: a file with the next number, which its process keeps locked (flock).
Timings wait for all lower tickets, other work for those of timings alone. So turns come in the
order in which they were asked for, and a process that dies loses its turn, since the kernel lets go
of its locks. Files lie in /tmp, which is local to a machine. (In shared memory a login manager may
remove those of a user who has logged out.) Whose ticket somebody has removed is not alone any more,
which is an error and no turn.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from kagent_sandbox.errors import MachineError
from kagent_sandbox.runtime.text import printable

FOLDER = "KAGENT_LOCKS"
"""Environment variable: folder of the locks of all devices. Containers that share a device share
it.
"""
CPU = "cpu-0"
"""The CPU as a device. Builds work on it, whatever they are for."""
_DEFAULT = Path("/tmp/kagent-locks")  # noqa: S108 - world-writable on purpose, see _folder
_POLL_S = 0.02
_MOST_TEXT = 200
_TICKET = re.compile(r"([0-9]{12})-(timing|work)")

Mode = Literal["timing", "work"]


class LockClosed(Exception):  # noqa: N818
    """The lock was closed while a thread waited for its turn."""


class DeviceLock:
    """Turns on one device. Several threads may ask; each has a turn of its own.

    Args:
        device: Name of the device, such as `CPU`.
        on_wait: Is told who has the device, once for each process that is waited for.
        closed: Closes the lock, once set, as `close` does.
    """

    def __init__(
        self,
        device: str,
        on_wait: Callable[[str], None] | None = None,
        closed: threading.Event | None = None,
    ) -> None:
        self.device = device
        self.on_wait = on_wait
        self._told: set[str] = set()
        self._own: set[str] = set()  # tickets
        self._closed = closed or threading.Event()

    @contextlib.contextmanager
    def turn(self, mode: Mode) -> Iterator[None]:
        """Have the device, alone ("timing") or beside others that do not time ("work").

        Raises:
            LockClosed: `close` was called while this waited.
            MachineError: The folder of locks cannot be used, or the ticket in it was removed, so
                that others may have had the device, too.
        """
        folder = self._folder()
        path, ticket = _take_ticket(folder, mode)
        self._own.add(path.name)
        try:
            while (holder := _conflict(folder, path.name)) is not None:
                self._tell(holder)
                if self._closed.wait(_POLL_S):
                    raise LockClosed
            yield
            if not path.exists():
                raise _removed(path)
        finally:
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(ticket)
            self._own.discard(path.name)

    def awaited(self) -> bool:
        """Whether another process has a turn on the device or waits for one, or this process waits
        to time on it by another lock: it may have several judges. Its builds are no reason to rest.
        """
        return any(
            process != os.getpid() or (name.endswith("-timing") and name not in self._own)
            for name, process, _ in self._held()
        )

    def turns(self) -> list[tuple[int, str]]:
        """Processes that have a turn or wait for one, in their order, each with what it does."""
        return [(process, what) for _, process, what in self._held()]

    def _held(self) -> Iterator[tuple[str, int, str]]:
        """Tickets in their order: name, process, what it does."""
        folder = self._folder()
        for name in _tickets(folder):
            number, _, what = (_read_held(folder / name) or "").partition(" ")
            if number.isdigit():
                yield name, int(number), what

    def close(self) -> None:
        """Let no thread wait any longer."""
        self._closed.set()

    def _tell(self, holder: str) -> None:
        number, _, command = holder.partition(" ")
        if self.on_wait is None or number in self._told or number == str(os.getpid()):
            return
        self._told.add(number)
        self.on_wait(f"the device is shared: waiting for process {number} ({command})")

    def _folder(self) -> Path:
        """The device's folder, made if need be, for all users of this machine."""
        base = Path(os.environ.get(FOLDER) or _DEFAULT)
        folder = base / re.sub(r"[^A-Za-z0-9.-]", "_", self.device)
        try:
            for each in (base, folder):
                if not each.is_dir():
                    each.mkdir(parents=each == base, exist_ok=True)
                    each.chmod(0o1777)
        except OSError as e:
            raise _unusable(folder, e) from None
        return folder


def _unusable(folder: Path, error: OSError) -> MachineError:
    return MachineError(
        f"{folder}: the locks that keep two processes from timing at once cannot be used "
        f"({error.strerror}): set {FOLDER} to a folder that every process on this machine can write"
    )


def _removed(path: Path) -> MachineError:
    return MachineError(
        f"{path}: somebody has removed this lock, so that another process may have had the device "
        f"meanwhile: set {FOLDER} to a folder that nothing cleans, and begin again what was timed"
    )


def _take_ticket(folder: Path, mode: Mode) -> tuple[Path, int]:
    """The next ticket's path and its open, locked file."""
    try:
        with _open_queue(folder) as queue:
            fcntl.flock(queue, fcntl.LOCK_EX)
            number = max((int(name[:12]) for name in _tickets(folder)), default=0) + 1
            path = folder / f"{number:012d}-{mode}"
            ticket = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            fcntl.flock(ticket, fcntl.LOCK_EX)  # at once, but for one who reads it (`awaited`)
            os.fchmod(ticket, 0o644)
            os.write(ticket, f"{os.getpid()} {_command()}".encode()[:_MOST_TEXT])
    except OSError as e:
        raise _unusable(folder, e) from None
    return path, ticket


@contextlib.contextmanager
def _open_queue(folder: Path) -> Iterator[int]:
    """The file whose lock is held while a ticket is taken."""
    path, flags = folder / "queue", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        queue = os.open(path, flags)
    except FileNotFoundError:  # Linux refuses O_CREAT for another user's file in such a folder
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666))
            path.chmod(0o666)
        queue = os.open(path, flags)
    try:
        yield queue
    finally:
        os.close(queue)


def _tickets(folder: Path) -> list[str]:
    """Names of all tickets, in the order of their numbers."""
    return sorted(name for name in os.listdir(folder) if _TICKET.fullmatch(name))


def _conflict(folder: Path, own: str) -> str | None:
    """Holder of the turn that this ticket waits for; None if it is this ticket's turn.

    Raises:
        MachineError: It is there no longer.
    """
    timing = own.endswith("-timing")
    try:
        names = _tickets(folder)
    except OSError as e:
        raise _unusable(folder, e) from None
    if own not in names:
        raise _removed(folder / own)
    for name in names:
        if name >= own:
            return None
        if not timing and name.endswith("-work"):
            continue
        holder = _read_held(folder / name)
        if holder is not None:
            return holder
        with contextlib.suppress(OSError):  # its process died; another user's stays until theirs
            (folder / name).unlink()
    return None


def _read_held(path: Path) -> str | None:
    """Read a ticket's text about its process; None if it is no longer held."""
    try:
        ticket = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(ticket, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return printable(os.read(ticket, _MOST_TEXT).decode(errors="replace"))
    finally:
        os.close(ticket)
    return None


def _command() -> str:
    """Name of this process's work, for those who wait for it: "kagent evolve softmax"."""
    path = Path(sys.argv[0] if sys.argv and sys.argv[0] else "python")
    if path.name == "__main__.py":  # of python -m kagent
        path = path.parent
    if path.suffix == ".py" and (folders := path.parts[:-1]).count("kagent"):  # a worker of its own
        first = len(folders) - 1 - folders[::-1].index("kagent")
        return " ".join([*folders[first:], path.stem])
    words = [w for w in sys.argv[1:] if not w.startswith("-")]
    return " ".join([path.name, *words[:2]])
