"""The judge's side of a CPU launcher:

drives the confined process, and takes time on its own clock.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from kagent_sandbox.channel import ChannelError, ChannelTimeout
from kagent_sandbox.errors import ConfinementError, MachineError
from kagent_sandbox.forkserver import Child, ForkServer, printable
from kagent_sandbox.launch import urgency
from kagent_sandbox.launch.base import LaunchFailed
from kagent_sandbox.launch.cpu_arena import CpuArena
from kagent_sandbox.launch.cpu_blame import blame
from kagent_sandbox.patience import bounded
from kagent_sandbox.plan import Plan, PlanError
from kagent_sandbox.plan_json import dump_plan
from kagent_sandbox.verdict import Status

_START_S = 30.0
_PREPARE_S = 10.0  # constructors of a binary run here
_LIFE_S = 3600.0
_MAX_ANSWER_BYTES = 64 << 10
_CALIBRATIONS = 3
_EMPTY_GOES = 8


@dataclass
class Asking:
    """The least that a "go" without any execution has cost in any launcher of a backend.

    All take the same off: two contenders' own costs would differ by what being woken varies by.
    """

    go_s: float = math.inf


class CpuLauncher:
    """Runs plans of native code in a confined process over a sealed arena.

    What this does not cover: native code shares the process with the few lines that answer the
    judge, so it can answer early and finish later. It has no threads of its own to hide in, the
    process is stopped while results are read, and `wall_us` counts what is left over.
    """

    def __init__(
        self,
        server: ForkServer,
        arena: CpuArena,
        after_loss: Callable[[], None] = lambda: None,
        asking: Asking | None = None,
    ) -> None:
        """Start it without waiting for it, so that several start at once; the first request waits.

        Args:
            server: What it is forked from.
            arena: The memory that it maps.
            after_loss: Is called once the process has failed, and may raise.
            asking: What all launchers that are compared take off for being asked.
        """
        self._nbytes = arena.nbytes
        self._after_loss = after_loss
        self._asking = Asking() if asking is None else asking
        self._failure: LaunchFailed | None = None
        self.threads = 0
        """Threads of the process once torch's and OpenMP's had started: there will be no more."""
        self._begun = False
        self._urgency: AbstractContextManager[object] = contextlib.nullcontext()
        self._woken = time.perf_counter()
        self._asking_s = math.inf  # what `fresh_us` costs without any execution
        self._spawn: Callable[[], Child] = lambda: server.spawn([arena.fd], wall_limit_s=_LIFE_S)
        self._child = self._spawn()

    def _begin(self) -> None:
        """Wait until it has started. One that does not start is made once more.

        Raises:
            MachineError: It does not start.
            ConfinementError: It cannot be confined here.
        """
        if self._begun:
            return
        self._begun = True
        try:
            self._start()
        except ConfinementError:
            raise
        except MachineError:
            self._failure = None
            self._child.close()
            self._child = self._spawn()
            self._start()

    def _start(self) -> None:
        """Wait for it, and find out what asking costs while nobody's code is there."""
        try:
            answer = self._child.channel.recv(_START_S, max_bytes=_MAX_ANSWER_BYTES).obj
        except ChannelError as e:
            exit_ = self._child.kill()
            raise MachineError(
                f"the CPU launcher did not start: {e}; it {exit_.describe()}\n{exit_.log_tail}"
            ) from None
        threads = answer.get("ready") if isinstance(answer, dict) else None
        self.threads = threads if isinstance(threads, int) else 0
        pid = self._child.pid()
        if pid is not None:
            self._urgency = urgency.of_process(pid)
        try:
            for _ in range(_CALIBRATIONS):
                with self.quiesced():
                    pass
                self._asking_s = min(self._asking_s, self._since_woken([], _PREPARE_S))
            least_s = min(self._timed([[]] * _EMPTY_GOES, _PREPARE_S))
        except LaunchFailed as e:
            raise MachineError(
                f"the CPU launcher failed before any candidate was in it: {e}"
            ) from e
        self._asking.go_s = min(self._asking.go_s, least_s)

    def load(self, binaries: Mapping[str, bytes]) -> None:
        """Take binaries (shared libraries) by hash. They are loaded by `prepare`."""
        self._begin()
        hashes = list(binaries)
        self._ask({"do": "load", "hashes": hashes}, [binaries[h] for h in hashes], _PREPARE_S)

    def prepare(self, key: str, plan: Plan, placement: Mapping[int, int]) -> None:
        """Resolve a plan whose buffer `id` starts at byte `placement[id]`, under a name.

        Raises:
            PlanError: The plan does not fit the arena, the target or torch.
            LaunchFailed: A binary does not load, or its constructors fail.
        """
        if plan.target != "cpu":
            raise PlanError(f"a plan for {plan.target} cannot run on the CPU")
        for buffer in plan.buffers:
            start = placement[buffer.id]
            if not 0 <= start <= start + buffer.nbytes <= self._nbytes:
                raise PlanError(f"buffer {buffer.id} at byte {start} leaves the arena")
        self._begin()
        at = {str(k): v for k, v in placement.items()}
        request: dict[str, object] = {"do": "prepare", "key": key, "at": at}
        self._ask(request, [dump_plan(plan)], bounded(_PREPARE_S))

    def forget(self, key: str) -> None:
        """Drop a prepared plan."""
        self._ask({"do": "forget", "key": key}, (), _PREPARE_S)

    @contextlib.contextmanager
    def quiesced(self) -> Iterator[None]:
        """All threads of the process are stopped inside: the judge writes inputs, reads results."""
        if not self._child.stop():
            raise self._fail(0.0)
        try:
            yield
        finally:
            self._woken = time.perf_counter()
            self._child.cont()

    def hush(self) -> None:
        """Nothing to wait for: launchers are started and ended in the lane."""

    def run(self, key: str, *, limit_s: float) -> None:
        """Execute once and return when it is done."""
        self._arm([[key]])
        self._go(limit_s)

    def samples(self, keys: Sequence[str], count: int, *, limit_s: float) -> list[float]:
        """`count` times in µs of one execution by the judge's clock: all of `keys`, once each.

        With placements which exceed the caches together every run starts cold. What asking costs
        is taken off as it was before any native code was loaded. It varies by some 20 µs: pass
        keys for much more than that.

        Raises:
            ValueError: No keys.
        """
        if not keys:
            raise ValueError("nothing to time")
        turns = [i % len(keys) for i in range(count)]  # none is always the first
        took_s = self._timed([[*keys[turn:], *keys[:turn]] for turn in turns], limit_s)
        return [1e6 * (s - self._asking.go_s) / len(keys) for s in took_s]

    def wall_us(self, keys: Sequence[str], count: int, *, limit_s: float) -> float:
        """µs per execution by the judge's clock, of `count` back to back.

        It ends with another question and its answer, so that work done after an early answer
        counts.
        """
        deadline = time.monotonic() + limit_s
        self._arm([[keys[i % len(keys)] for i in range(count)]])
        with self._urgency:
            start = time.perf_counter()
            self._go(limit_s)
            self._ask({"do": "ping"}, (), deadline - time.monotonic())
            took_s = time.perf_counter() - start
        return 1e6 * (took_s - 2 * self._asking.go_s) / count

    def fresh_us(self, keys: Sequence[str], *, limit_s: float) -> float:
        """µs per execution of `keys`, in order, since `quiesced` ended: see `Launcher`. Without any
        keys, µs that the process takes to do nothing.
        """
        took_s = self._since_woken(keys, limit_s) - self._asking_s
        return took_s / max(1, len(keys)) * 1e6

    def _since_woken(self, keys: Sequence[str], limit_s: float) -> float:
        """Seconds from when the process went on until it has run `keys` and answered again."""
        with self._urgency:
            self._arm([keys])
            self._go(limit_s)
            self._ask({"do": "ping"}, (), limit_s)  # an early answer to "go" gains nothing
            return time.perf_counter() - self._woken

    def close(self) -> None:
        """End the process and all that it started."""
        self._child.close()

    # -- the protocol ----------------------------------------------------------------------------

    def _arm(self, parts: Sequence[Sequence[str]]) -> None:
        """Line up executions, so that each `_go` is nothing but running those of its part."""
        self._ask({"do": "arm", "parts": [list(keys) for keys in parts]}, (), _PREPARE_S)

    def _timed(self, parts: Sequence[Sequence[str]], limit_s: float) -> list[float]:
        """Seconds that each of several series of executions takes."""
        deadline = time.monotonic() + limit_s
        self._arm(parts)
        with self._urgency:
            return [self._go(deadline - time.monotonic()) for _ in parts]

    def _go(self, limit_s: float) -> float:
        """Run the next part of what is lined up; seconds on the judge's clock."""
        start = time.perf_counter()
        self._ask({"do": "go"}, (), limit_s)
        return time.perf_counter() - start

    def _ask(self, request: dict[str, object], blobs: Sequence[bytes], limit_s: float) -> None:
        if self._failure is not None:
            raise LaunchFailed(self._failure.status, str(self._failure))
        token = secrets.token_hex(8)  # an answer sent ahead of its question cannot know it
        try:
            self._child.channel.send({**request, "token": token}, blobs)
            answer = self._child.channel.recv(max(0.0, limit_s), max_bytes=_MAX_ANSWER_BYTES).obj
        except ChannelTimeout:
            what = "a constructor of the library" if request["do"] == "prepare" else "native code"
            raise self._fail(limit_s, hung=what) from None
        except ChannelError:
            raise self._fail(limit_s) from None
        if not isinstance(answer, dict) or answer.get("token") != token:
            self._child.kill()
            self._failure = LaunchFailed(Status.TAMPER, "native code wrote to the result channel")
            self._after_loss()
            raise self._failure
        if "plan" in answer:
            raise PlanError(printable(str(answer["plan"]))[:4000])
        if "error" in answer:
            raise LaunchFailed(Status.RUNTIME_ERROR, printable(str(answer["error"]))[:4000])

    def _fail(self, limit_s: float, *, hung: str = "") -> LaunchFailed:
        """End the process and say why, in a form that fits a verdict.

        Raises:
            DeviceWedged: Nothing works any more.
        """
        exit_ = (None if hung else self._child.wait(2.0)) or self._child.kill()
        if self._failure is None:
            self._failure = blame(exit_, limit_s, hung=hung)
            self._after_loss()
        return self._failure
