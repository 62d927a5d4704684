"""State of a CPU launcher's process, as the kernel shows it and as the process reports it.

The first is read from outside, where native code cannot falsify it: threads, signals, files, cores
and memory. The second is what only the process can see: control words of floating point, addresses
of handlers, OpenMP's settings. Native code could falsify it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from kagent_sandbox.device.cpu.execution_request import LOOK
from kagent_sandbox.device.cpu.launcher import CpuLauncher
from kagent_sandbox.device.cpu.process_state import ProcessStateChanged
from kagent_sandbox.device.interface import LaunchFailed
from kagent_sandbox.device.process_snapshot import ProcessSnapshot, Status
from kagent_sandbox.device.time_limits import bounded

_ASK_S = 10.0
_SAID = f"{ProcessStateChanged.__name__}: "


class CpuHost(CpuLauncher):
    """A CPU launcher that can be asked whether its guest has left it as it was."""

    def seen(self) -> ProcessSnapshot:
        """Read the state that the kernel shows. The process should be stopped."""
        pid = self._child.pid()
        if pid is None:
            raise self._fail(0.0)
        threads: dict[int, Status] = {}
        for task in os.listdir(f"/proc/{pid}/task"):
            threads[int(task)] = _status(f"/proc/{pid}/task/{task}/status")
        return ProcessSnapshot(_status(f"/proc/{pid}/status"), threads, _files(pid))

    def asked_bytes(self) -> int:
        """Memory of its own that it has asked the kernel for; the process should be stopped.

        What is freed and used again does not show, nor what is less than the C library's steps.
        """
        pid = self._child.pid()
        if pid is None:
            raise self._fail(0.0)
        return int(_status(f"/proc/{pid}/status").get("VmData", "0").split()[0]) << 10

    def more_bytes(self) -> int:
        """Return how much more is allocated than at the last call, as the process reports it."""
        try:
            return int(self._told("count") or "0")
        except ValueError:
            return 0

    def remember(self) -> None:
        """Have the process look at itself, for `changes`."""
        self._told("remember")

    def changes(self) -> str:
        """Describe the changes since the process was told to remember; empty if there are none."""
        return self._told("compare")

    def lend(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Make whole pages of the arena read-only to it, and all others writable."""
        pages = [list(r) for r in ranges]
        self._ask({"do": "house", "what": "lend", "ranges": pages}, (), _ASK_S)

    def unload(self) -> None:
        """End all callers but the first, then unload the guest's libraries. No plan may be
        prepared.

        Raises:
            LaunchFailed: The process did not survive that.
        """
        for line in self._lines[1:]:
            self._put(LOOK, line)
        self._ask({"do": "unload"}, (), bounded(_ASK_S))

    def _told(self, what: str) -> str:
        """Return the process's answer to a question about itself."""
        try:
            self._ask({"do": "house", "what": what}, (), _ASK_S)
        except LaunchFailed as e:
            if not str(e).startswith(_SAID):
                raise
            return str(e).removeprefix(_SAID)
        return ""


def _status(path: str) -> Status:
    """A status file of /proc; empty where it may not be read."""
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        pairs = (line.partition(":") for line in file)
        return {key: value.strip() for key, _, value in pairs}
    return {}


def _files(pid: int) -> frozenset[str] | None:
    try:
        names = os.listdir(f"/proc/{pid}/fd")
        return frozenset(f"{n}: {os.readlink(f'/proc/{pid}/fd/{n}')}"[:200] for n in names)
    except OSError:  # another user's
        return None
