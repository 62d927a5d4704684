"""The judge's handle on a launcher process: requests, limits, and the end of the process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from kagent_sandbox.data.plan import Plan
from kagent_sandbox.data.plan_json import dump_plan
from kagent_sandbox.data.verdict import Status
from kagent_sandbox.device.baseline_calls import ReadyBaseline
from kagent_sandbox.device.interface import Blame, LaunchFailed, nothing
from kagent_sandbox.errors import DeviceError
from kagent_sandbox.process.channel import ChannelClosed, ChannelError, ChannelTimeout
from kagent_sandbox.process.forkserver import ChildHandle

REPLY_BYTES = 4 << 20
PREPARE_LIMIT_S = 30.0
_STATUSES = {s.value for s in Status}
_BLAMES: Mapping[object, Blame] = {"kernel": "kernel", "unclear": "unclear", "machine": "machine"}


class Connection:
    """Requests and answers of one launcher process, with a limit on each."""

    def __init__(self, child: ChildHandle) -> None:
        self.child = child
        self.untrusted = False  # whether candidates' code has been loaded
        self.dead = False
        self.pid: object = None  # as it says itself, once it has its context

    def ask(
        self,
        request: Mapping[str, object],
        *,
        limit_s: float,
        blobs: Sequence[bytes] = (),
        fds: Sequence[int] = (),
    ) -> object:
        """One request and its answer.

        Raises:
            LaunchFailed: The candidate's code failed, hung or ended the process.
            DeviceError: The same, before any candidate's code was loaded.
        """
        if self.dead:
            raise self._failure(Status.RUNTIME_ERROR, "the launcher has ended")
        self.send(request, blobs=blobs, fds=fds)
        return self.receive(str(request["do"]), limit_s)

    def send(
        self, request: Mapping[str, object], *, blobs: Sequence[bytes] = (), fds: Sequence[int] = ()
    ) -> None:
        """Send a request without waiting for its answer."""
        try:
            self.child.channel.send(dict(request), blobs, fds)
        except ChannelError as e:
            raise self._ended(f"{e}") from None

    def receive(self, doing: str, limit_s: float) -> object:
        """The answer to the request sent last; see `ask`."""
        return self._receive(doing, limit_s, REPLY_BYTES)[0]

    def receive_blob(self, doing: str, limit_s: float, max_bytes: int) -> tuple[object, bytes]:
        """The answer to the request sent last, which may come with a blob; see `ask`."""
        said, blobs = self._receive(doing, limit_s, max_bytes)
        return said, blobs[0] if blobs else b""

    def _receive(
        self, doing: str, limit_s: float, max_bytes: int
    ) -> tuple[object, Sequence[bytes]]:
        try:
            message = self.child.channel.recv(limit_s, max_bytes=max_bytes)
        except ChannelTimeout:
            self.kill()
            raise self._failure(
                Status.TIMEOUT, f"no answer to {doing!r} within {limit_s:.1f} s: killed"
            ) from None
        except ChannelClosed as e:
            raise self._ended(f"{e}") from None
        except ChannelError as e:
            self.kill()
            raise self._failure(Status.TAMPER, f"a malformed answer to {doing!r}: {e}") from None
        answer = message.obj
        if not isinstance(answer, dict) or len(answer) != 1:
            self.kill()
            raise self._failure(Status.TAMPER, f"a malformed answer to {doing!r}")
        if "ok" in answer:
            return answer["ok"], message.blobs
        failed = answer.get("failed")
        if (
            isinstance(failed, list)
            and len(failed) == 3
            and all(isinstance(word, str) for word in failed)
            and failed[0] in _STATUSES
            and failed[2] in _BLAMES
        ):
            status = Status(failed[0])
            if status is Status.GPU_FAULT:  # the context is gone with it
                self.kill()
            raise self._failure(status, failed[1][:2000], _BLAMES[failed[2]])
        self.kill()
        text = f"the launcher failed at {doing!r}: {str(answer.get('error'))[:2000]}"
        raise self._failure(Status.RUNTIME_ERROR, text)

    def kill(self) -> None:
        """End the process and all that it started."""
        if not self.dead:
            self.dead = True
            self.child.close()

    def _failure(self, status: Status, message: str, blame: Blame = "kernel") -> Exception:
        if self.untrusted:
            return LaunchFailed(status, message, blame=blame)
        return DeviceError(f"before any candidate's code was loaded: {message}")

    def _ended(self, message: str) -> Exception:
        how = self.child.wait(5.0)
        self.kill()
        if how is not None:
            message = f"the launcher {how.describe()}"
            if how.log_tail.strip():
                message += f"; its log ends: {how.log_tail.strip()[-800:]}"
        # A kernel ends the context, not the process; a limit of ours was the candidate's to keep.
        limit = how is not None and how.reason is not None
        return self._failure(Status.RUNTIME_ERROR, message, "kernel" if limit else "unclear")


class GpuLauncher:
    """See `kagent_sandbox.device.interface.Launcher`. Made by `GpuBackend.launcher`."""

    def __init__(
        self,
        connection: Connection,
        *,
        settle: Callable[[], None],
        quiet: Callable[[], None],
        after_loss: Callable[[], None],
        end: Callable[[Connection], None],
        baselines: Mapping[str, ReadyBaseline],
    ) -> None:
        """Wrap a process that has its context and the arena open.

        Args:
            connection: To the process.
            settle: Waits until the judge's own work on the device is done.
            quiet: Waits until no other process is being started or ended on the device.
            after_loss: Checks the device after a fault or a kill; raises `DeviceWedged`.
            end: Ends the process without waiting for it; `quiet` waits.
            baselines: What became of the baselines that were asked for.
        """
        self._connection = connection
        self._settle = settle
        self._quiet = quiet
        self._after_loss = after_loss
        self._end = end
        self.baselines = baselines

    def load(self, binaries: Mapping[str, bytes]) -> None:
        """Lock the process down (first call) and take binaries by hash.

        Raises:
            LaunchFailed, DeviceError: See `Launcher`.
        """
        hashes = list(binaries)
        self._ask("load", PREPARE_LIMIT_S, blobs=[binaries[h] for h in hashes], hashes=hashes)
        self._connection.untrusted = True

    def prepare(self, key: str, plan: Plan, offsets: Mapping[int, int]) -> None:
        """Bind a plan to a placement in the arena.

        Raises:
            LaunchFailed, DeviceError: See `Launcher`.
        """
        places = {str(k): v for k, v in offsets.items()}
        self._ask("prepare", PREPARE_LIMIT_S, blobs=[dump_plan(plan)], key=key, offsets=places)

    def forget(self, key: str) -> None:
        """Drop a prepared plan."""
        self._ask("forget", PREPARE_LIMIT_S, key=key)

    def populate(self, keys: Sequence[str]) -> None:
        """Return at once: the device has all of the arena."""

    def stop(self) -> None:
        """Return at once: the device is idle between calls."""

    def wait_until_idle(self) -> None:
        """Wait until no other process is being started or ended on the device."""
        self._quiet()

    def run(self, key: str, *, limit_s: float) -> None:
        """Execute once; the device is idle afterwards.

        Raises:
            LaunchFailed, DeviceError: See `Launcher`.
        """
        self._settle()
        self._ask("run", limit_s, key=key)

    def sample(
        self, keys: Sequence[str], *, limit_s: float, observe: Callable[[], None] = nothing
    ) -> float:
        """Mean device time in µs of one execution each of `keys`, each from a cold L2.

        Raises:
            LaunchFailed, DeviceError: See `Launcher`.
        """
        times = self.samples(keys, len(keys), limit_s=limit_s)
        observe()
        return sum(times) / len(times)

    def samples(self, keys: Sequence[str], count: int, *, limit_s: float) -> list[float]:
        """Device times in µs of work whose inputs stay as they are (a baseline's), rotating over
        `keys`, each from a cold L2.

        Raises:
            LaunchFailed, DeviceError: See `Launcher`.
        """
        self._settle()
        self._quiet()
        start = time.perf_counter()
        times = self._ask("samples", limit_s, keys=list(keys), count=count)
        elapsed_us = 1e6 * (time.perf_counter() - start)
        if (
            not isinstance(times, list)
            or len(times) != count
            or not all(isinstance(t, float) and math.isfinite(t) and t >= 0 for t in times)
            or sum(times) > elapsed_us
        ):
            self._connection.kill()
            raise LaunchFailed(Status.TAMPER, "the launcher's times are not times")
        return cast("list[float]", times)

    def wall_us(self, keys: Sequence[str], count: int, *, limit_s: float) -> float:
        """µs per execution on the judge's clock, of `count` back to back: at least what they took.

        What the request costs is in it. A slope between two requests would be without, but too
        small where the shorter one was slow: for a busy host, or a kernel that counts its runs.
        The cache is warm: comparable with the events' times from above only.

        Raises:
            LaunchFailed, DeviceError: See `Launcher`.
        """
        self._settle()
        self._quiet()
        for executions in (min(count, 3), count):  # the first warms up
            start = time.perf_counter()
            self._ask("repeat", limit_s, keys=list(keys), count=executions)
            elapsed_s = time.perf_counter() - start
        return 1e6 * elapsed_s / count

    def close(self) -> None:
        """End the process and all that it started, without waiting for it."""
        self._end(self._connection)

    def _ask(
        self, do: str, limit_s: float, *, blobs: Sequence[bytes] = (), **rest: object
    ) -> object:
        try:
            return self._connection.ask({"do": do, **rest}, limit_s=limit_s, blobs=blobs)
        except LaunchFailed:
            if self._connection.dead:  # killed while it ran, or faulted
                self._after_loss()
            raise
