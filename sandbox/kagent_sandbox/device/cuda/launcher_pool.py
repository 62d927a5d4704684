"""Launcher processes made ahead, and those that end: what goes on beside the one in use.

A process takes about half a second to make its context, and a tenth to end, and both keep the
device busy. So they are begun where nothing is timed, and `wait_until_idle` is called before times
are taken. One is always ready. The next one is begun when a candidate's launcher is closed, so that
it comes up during the check of the next candidate.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from kagent_sandbox.device.cuda.launcher import Connection
from kagent_sandbox.errors import DeviceError

START_LIMIT_S = 120.0
AHEAD = 2
"""Processes that are ready or being made, at most: each holds nearly 1 GiB of the device."""
SHARED = 1
"""As many where others use the device, too."""
_ENDING_AT_ONCE = 4


class LauncherPool:
    """Processes with a context that no candidate has used."""

    def __init__(self, connect: Callable[[], Connection], when_short: Callable[[], None]) -> None:
        """Begin nothing yet.

        Args:
            connect: Starts a process that is making its context.
            when_short: Frees device memory, for another try when none comes up.
        """
        self._connect = connect
        self._when_short = when_short
        self._ahead = AHEAD
        self._ready: deque[Connection] = deque()
        self._making: Connection | None = None
        self._ending: list[Future[None]] = []
        self._enders = ThreadPoolExecutor(_ENDING_AT_ONCE, "end")

    def share(self) -> None:
        """Keep fewer from now on, and wait until those that are too many are gone."""
        self._ahead = SHARED
        self.wait_until_idle()
        while len(self._ready) > self._ahead:
            self._ready.pop().kill()

    def begin(self, *, least: int | None = None) -> None:
        """Begin to make one if there are fewer than `least`, by default as many as are kept; never
        two at a time.
        """
        least = self._ahead if least is None else least
        if self._making is None and len(self._ready) < least:
            self._making = self._connect()

    def take(self) -> Connection:
        """A process with its context. One that died while it waited is replaced.

        Raises:
            DeviceError: No process comes up in two tries.
            ChildDied: The server that they are forked from is gone.
        """
        while self._ready:
            connection = self._ready.popleft()
            if connection.child.wait(0.0) is None:
                return connection
            connection.kill()
        try:
            return self._made()
        except DeviceError:
            self._when_short()
            return self._made()

    def give_back(self, connection: Connection) -> None:
        """Take back one that was taken and that no candidate has used."""
        self._ready.appendleft(connection)

    def end(self, connection: Connection) -> None:
        """End a process without waiting for it, and make up for it."""
        if not connection.dead:
            connection.dead = True
            self._ending.append(self._enders.submit(connection.child.close))
        self.begin()

    def wait_until_idle(self) -> None:
        """Wait until none is being made or ended. One that fails is made again when needed."""
        with contextlib.suppress(DeviceError):
            if self._making is not None:
                self._ready.append(self._made())
        self.wait_ended()

    def wait_ended(self) -> None:
        """Wait until those that were ended are gone, and the memory that they had mapped.

        Raises:
            ChildDied: One does not end.
        """
        while self._ending:
            self._ending.pop().result()

    def drop(self) -> None:
        """End all that nobody has taken."""
        for connection in (*self._ready, *([self._making] if self._making else ())):
            connection.kill()
        self._ready.clear()
        self._making = None

    def close(self) -> None:
        """End everything."""
        try:
            self.drop()
            self.wait_ended()
        finally:
            self._enders.shutdown()

    def _made(self) -> Connection:
        """Wait for the one that is being made, begun now if there is none."""
        self.begin(least=len(self._ready) + 1)
        connection, self._making = self._making, None
        assert connection is not None, "one was begun"
        try:
            connection.pid = connection.receive("context", START_LIMIT_S)
        except BaseException:
            connection.kill()
            raise
        return connection
