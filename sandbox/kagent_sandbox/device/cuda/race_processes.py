"""Processes of the final race: forked from a server that has torch's compiler imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kagent_sandbox.data.records import to_json
from kagent_sandbox.device.baseline_calls import BaselineCall
from kagent_sandbox.device.cpu.facts import usable_cores
from kagent_sandbox.device.cuda.launcher import Connection
from kagent_sandbox.device.cuda.launcher_pool import START_LIMIT_S
from kagent_sandbox.errors import DeviceError
from kagent_sandbox.process.channel import MAX_MESSAGE_BYTES
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
    ) -> None:
        """Start nothing yet.

        Args:
            server: Makes the server, which is not started.
            connect: Starts a process of a server, which is making its context.
            free_bytes: What is free of the device.
        """
        self._make_server = server
        self._connect = connect
        self._free_bytes = free_bytes
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

    def compile_ahead(self, calls: Sequence[BaselineCall], need_bytes: int) -> list[bytes]:
        """Compile each call with torch's compiler; return the code for the launchers of a race.

        The calls are compiled side by side, each in a process of its own that never sees a
        candidate: that is work of the host, of one core each, and runs nothing on the device.

        Args:
            calls: The calls.
            need_bytes: Memory of the device that one takes.

        Returns:
            Empty for a call that fails, and for all of them where there is no room: others that
            use the device keep half of what is free, by the calls' inputs and results.
        """
        room = self._free_bytes() // 2 // (need_bytes + PROCESS_BYTES)
        at_once = min(len(calls), usable_cores(), room)
        if at_once < 1:
            return [b""] * len(calls)
        self.prefetch()
        with ThreadPoolExecutor(at_once, "compile") as threads:
            return list(threads.map(self._compile, calls))

    def _compile(self, call: BaselineCall) -> bytes:
        """Empty if it fails: the launcher of the race compiles it again, and says why."""
        try:
            connection = self.connection()
        except DeviceError:
            return b""
        try:
            connection.send({"do": "compile", **described({call.name: call})})
            return connection.receive_blob("compile", BASELINES_LIMIT_S, MAX_MESSAGE_BYTES)
        except DeviceError:
            return b""
        finally:
            connection.kill()

    def close(self) -> None:
        """End the server and all that was forked from it."""
        if self._server is not None:
            self._server.close()


def described(calls: Mapping[str, BaselineCall]) -> dict[str, object]:
    """Calls for a process that runs as another user, who may not read a user's task folder."""
    references = {c.reference: Path(c.reference).read_text() for c in calls.values()}
    return {"calls": {k: to_json(c) for k, c in calls.items()}, "references": references}
