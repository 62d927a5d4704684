"""Processes of the final race: forked from a server that has torch's compiler imported."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kagent_sandbox.data.records import to_json
from kagent_sandbox.device.baseline_calls import BaselineCall
from kagent_sandbox.device.compile_only import GO_ON, TIME, WAITS
from kagent_sandbox.device.cuda.launcher import Connection
from kagent_sandbox.device.cuda.launcher_pool import START_LIMIT_S
from kagent_sandbox.errors import DeviceError
from kagent_sandbox.process.channel import MAX_MESSAGE_BYTES
from kagent_sandbox.process.cores import usable_cores
from kagent_sandbox.process.device_lock import Mode
from kagent_sandbox.process.forkserver import ForkServer

BASELINES_LIMIT_S = 1800.0  # max-autotune of a large product takes minutes
PROCESS_BYTES = 2 << 30  # of the device: a context, the clock's buffer, what torch keeps


class RaceProcesses:
    """Makes launchers that can compile, and compiles ahead for them."""

    def __init__(
        self,
        server: Callable[[], ForkServer],
        connect: Callable[[ForkServer], Connection],
        free_bytes: Callable[[], int],
        quiet: Callable[[], None],
    ) -> None:
        """Start nothing yet.

        Args:
            server: Makes the server, which is not started.
            connect: Starts a process of a server, which is making its context.
            free_bytes: What is free of the device.
            quiet: Waits until no other process is being started or ended on the device.
        """
        self._make_server = server
        self._connect = connect
        self._free_bytes = free_bytes
        self._quiet = quiet
        self._server: ForkServer | None = None

    def prefetch(self) -> ForkServer:
        """Begin to import torch's compiler; does not wait for it.

        The import takes 12 s on a cold file system (H100 host, torch 2.11), and each process would
        pay it.
        """
        if self._server is None:
            self._server = self._make_server()
            self._server.start()
        return self._server

    def connection(self) -> Connection:
        """A process with a context.

        Raises:
            DeviceError: It does not come up.
        """
        connection = self._connect(self.prefetch())
        try:
            connection.pid = connection.receive("context", START_LIMIT_S)
        except BaseException:
            connection.kill()
            raise
        return connection

    def compile_ahead(
        self, calls: Sequence[BaselineCall], need_bytes: int
    ) -> Generator[Mode, None, list[bytes]]:
        """Compile each call with torch's compiler; return the code for the launchers of a race.

        The calls are compiled side by side, each in a process of its own that never sees a
        candidate: that is work of the host. Where the compiler is going to time variants, its
        process waits; when all of them have ended or wait, those that wait time one after the
        other, and nothing else is done on the device.

        Args:
            calls: The calls.
            need_bytes: Memory of the device that one takes.

        Yields:
            The turn on the device that the next step needs. The first needs "work".

        Returns:
            Empty for a call that fails, and for all of them where there is no room: others that
            use the device keep half of what is free, by the calls' inputs and results.
        """
        made = [b""] * len(calls)
        room = self._free_bytes() // 2 // (need_bytes + PROCESS_BYTES)
        at_once = min(len(calls), usable_cores(), room)
        if at_once < 1:
            return made
        self.prefetch()
        left = deque(enumerate(calls))
        lanes = [_Lane() for _ in range(at_once)]
        try:
            with ThreadPoolExecutor(at_once, "compile") as threads:
                while True:
                    list(threads.map(lambda lane: self._compile(lane, left, made), lanes))
                    if all(lane.process is None for lane in lanes):
                        return made
                    yield "timing"
                    for lane in lanes:
                        self._quiet()
                        lane.time_variants()
                    yield "work"
        finally:
            for lane in lanes:
                lane.end()

    def _compile(
        self, lane: _Lane, left: deque[tuple[int, BaselineCall]], made: list[bytes]
    ) -> None:
        """Compile what the lane has begun, and further calls, until its process waits.

        Nothing is made of a call that fails: the launcher of the race compiles it again, and says
        why.
        """
        while True:
            try:
                if lane.process is None:
                    try:
                        lane.call, call = left.popleft()
                    except IndexError:
                        return
                    lane.process = self.connection()
                    lane.process.send({"do": "compile", **described({call.name: call})})
                else:
                    lane.process.send({"do": GO_ON})
                said, blob = lane.process.receive_blob(
                    "compile", BASELINES_LIMIT_S, MAX_MESSAGE_BYTES
                )
                if said == WAITS:
                    return
                made[lane.call] = blob
            except DeviceError:
                pass
            lane.end()

    def close(self) -> None:
        """End the server and all that was forked from it."""
        if self._server is not None:
            self._server.close()


@dataclass
class _Lane:
    """Room for one process that compiles."""

    process: Connection | None = None  # None: there is none, and the lane is free
    call: int = 0  # number of the call that it compiles

    def time_variants(self) -> None:
        """Let the process, which waits, have the device. If it fails, its call is given up."""
        if self.process is not None:
            try:
                self.process.ask({"do": TIME}, limit_s=BASELINES_LIMIT_S)
            except DeviceError:
                self.end()

    def end(self) -> None:
        """End the process; the lane is free."""
        if self.process is not None:
            self.process.kill()
            self.process = None


def described(calls: Mapping[str, BaselineCall]) -> dict[str, object]:
    """Calls for a process that runs as another user, who may not read a user's task folder."""
    references = {c.reference: Path(c.reference).read_text() for c in calls.values()}
    return {"calls": {k: to_json(c) for k, c in calls.items()}, "references": references}
