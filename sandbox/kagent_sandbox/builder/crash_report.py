"""Find the line of a candidate's file where it died or was ended, from faulthandler's dump."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import select
import signal
from typing import Self

from kagent_sandbox.builder.policy import CANDIDATE_FILE, at_line, source_line

_FRAME = re.compile(
    rf'^ *File "(?P<file>[^"\n]*{re.escape(CANDIDATE_FILE)})", line (?P<line>\d{{1,7}}) in',
    re.MULTILINE,
)
_DUMP = re.compile(r"^(Fatal Python error|Timeout \(\d)", re.MULTILINE)
_MOST_BYTES = 64 << 10
_DUMP_S = 0.25  # for a process that is asked where it is


def crash_line(dump: str, source: str | None = None) -> str:
    """The innermost line of the candidate in a dump, as messages begin with it; or nothing.

    The line's text is taken from `source` where that is given, otherwise from the file.
    """
    found = _FRAME.search(dump)
    if found is None:
        return ""
    line = int(found["line"])
    if source is None:
        return at_line(line, source_line(found["file"], line))
    lines = source.splitlines()
    return at_line(line, lines[line - 1].strip()[:200]) if 0 < line <= len(lines) else ""


def printed_before(log: str) -> str:
    """Return the output that a process printed itself before Python's dump."""
    found = _DUMP.search(log)
    return (log[: found.start()] if found else log).strip()


class CrashPipe:
    """A way for a fork to leave a dump behind, whatever becomes of it, and of the disk."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def in_child(self) -> None:
        """Make deadly signals leave a dump in the pipe. Called in the fork."""
        faulthandler.enable(file=self._write, all_threads=False)

    def in_parent(self) -> None:
        """Prepare for reading the dump. Called in the parent, after the fork."""
        os.close(self._write)
        self._write = -1

    def ask(self, pid: int) -> None:
        """Have a fork that is about to be killed say where it is; it dies of that, too."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGABRT)
        poller = select.poll()
        poller.register(self._read, 0)  # the end of it: the fork is gone
        poller.poll(_DUMP_S * 1e3)

    def line(self) -> str:
        """Return the result of `crash_line` for the dump."""
        with contextlib.suppress(BlockingIOError):
            return crash_line(os.read(self._read, _MOST_BYTES).decode("utf-8", "replace"))
        return ""

    def close(self) -> None:
        """Let go of the descriptors."""
        for fd in (self._read, self._write):
            if fd >= 0:
                os.close(fd)
        self._read = self._write = -1
