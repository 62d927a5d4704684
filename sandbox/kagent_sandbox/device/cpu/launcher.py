"""The judge's side of a CPU launcher: drives the confined process and keeps the clock.

Native code shares the process with the few lines that answer the judge. It could answer before its
work is done. It could also work between samples, in threads of OpenMP's pool, which outlive a
parallel region. So a sample's clock starts while the process is stopped, before it can see the
inputs. It stops when the judge has read secret places of the results. Only the values read then
count.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import secrets
import select
import socket
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NoReturn

import torch

from kagent_sandbox.data.plan import Plan, PlanError
from kagent_sandbox.data.plan_json import dump_plan
from kagent_sandbox.data.verdict import Status
from kagent_sandbox.device.cpu import priority as priority
from kagent_sandbox.device.cpu.arena import CpuArena
from kagent_sandbox.device.cpu.execution_request import (
    FAILED,
    LOOK,
    MOST_BYTES,
    REFUSED,
    TOKEN_BYTES,
    make_request,
)
from kagent_sandbox.device.cpu.exit_status import blame
from kagent_sandbox.device.cpu.flush import settle
from kagent_sandbox.device.cpu.native_loop import native_loop
from kagent_sandbox.device.interface import LaunchFailed, nothing
from kagent_sandbox.device.time_limits import bounded
from kagent_sandbox.errors import ConfinementError, MachineError
from kagent_sandbox.process.channel import ChannelError, ChannelTimeout
from kagent_sandbox.process.forkserver import ChildHandle, ForkServer
from kagent_sandbox.runtime.text import printable

_START_S = 30.0
_PREPARE_S = 10.0  # constructors of a binary run here
_LIFE_S = 3600.0
_MAX_ANSWER_BYTES = 64 << 10
# Of one launcher, before it is given any code: caches are flushed before each, which takes 20 ms
# where they are of 260 MiB.
_EMPTY_SAMPLES = 4
_FEWEST_KNOWN = 36  # empty samples, before any candidate is timed: the first launcher makes them
_REMEMBERED = 48  # empty samples: of the last few launchers
_OBSERVED_WORDS = 256  # that an empty sample reads, as a sample's observer does


@dataclass
class RequestCost:
    """Cost of a sample without any execution, over the last few launchers of a backend.

    All contenders subtract the same median: their own costs would differ by the variation of waking
    up.
    """

    costs_s: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    @property
    def cost_s(self) -> float:
        """Cost of one sample in seconds; 0 before the first request."""
        return statistics.median(self.costs_s) if self.costs_s else 0.0

    @property
    def missing(self) -> int:
        """Number of empty samples that the next launcher should make."""
        return max(_EMPTY_SAMPLES, _FEWEST_KNOWN - len(self.costs_s))


class _Line:
    """The socket on which one caller of a process is asked for executions."""

    def __init__(self, ours: socket.socket, child: ChildHandle) -> None:
        self._socket = ours
        self._ready = select.poll()
        self._ready.register(ours, select.POLLIN)
        self._ready.register(child.channel, 0)  # hang-ups are always reported
        self.send = ours.send
        self.close = ours.close

    def answer(self, wait_ms: float) -> bytes | None:
        """The answer; empty where the process has ended, None if there is none in time."""
        if not self._ready.poll(wait_ms):
            return None
        try:
            return self._socket.recv(MOST_BYTES, socket.MSG_DONTWAIT)
        except OSError:
            return b""


class CpuLauncher:
    """Runs plans of native code in a confined process over a sealed arena."""

    def __init__(
        self,
        server: ForkServer,
        arena: CpuArena,
        after_loss: Callable[[], None] = lambda: None,
        request_cost: RequestCost | None = None,
        callers: int = 1,
    ) -> None:
        """Start it without waiting for it, so that several start at once; the first request waits.

        Args:
            server: What it is forked from.
            arena: The memory that it maps.
            after_loss: Is called once the process has failed, and may raise.
            request_cost: What all launchers that are compared take off for being asked; None for
                one that takes no samples.
            callers: Threads that execute plans, each with a pool of OpenMP's.
        """
        self._arena = arena
        self._after_loss = after_loss
        self._request_cost = request_cost
        self._failure: LaunchFailed | None = None
        self.threads = 0
        """Threads of the process once torch's and OpenMP's had started: there will be no more."""
        self._begun = False
        self._priority: AbstractContextManager[object] = contextlib.nullcontext()
        self._stopped = False
        self._numbers: dict[str, int] = {}  # of prepared plans
        self._next = itertools.count()
        self._server = server
        self._callers = callers
        self._child, self._lines = self._spawn()

    def _spawn(self) -> tuple[ChildHandle, Sequence[_Line]]:
        """A process, and the lines on which its callers are asked for executions."""
        pairs = [
            socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(self._callers)
        ]
        try:
            fds = [self._arena.fd, *(theirs.fileno() for _, theirs in pairs)]
            child = self._server.spawn(fds, wall_limit_s=_LIFE_S)
        except BaseException:
            for ours, _ in pairs:
                ours.close()
            raise
        finally:
            for _, theirs in pairs:
                theirs.close()
        return child, [_Line(ours, child) for ours, _ in pairs]

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
            self.close()
            self._child, self._lines = self._spawn()
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
            self._priority = priority.of_process(pid)
        if loop := native_loop():
            self._ask({"do": "loop"}, [loop], _PREPARE_S)
        if self._request_cost is not None:
            self._find_request_cost(self._request_cost)

    def _find_request_cost(self, cost: RequestCost) -> None:
        """Take samples without any execution.

        Raises:
            MachineError: The process ends.
        """
        words = self._arena.words(4)
        try:
            for _ in range(cost.missing):
                self.stop()
                places = torch.randint(words.numel(), (_OBSERVED_WORDS,))
                words.take(places)  # a sample's results were written: reading faults no pages in
                settle()
                with self._priority:
                    took_s = self._execute([], _PREPARE_S, functools.partial(words.take, places))
                cost.costs_s.append(took_s)
        except LaunchFailed as e:
            raise MachineError(
                f"the CPU launcher failed before any candidate was in it: {e}"
            ) from e

    def load(self, binaries: Mapping[str, bytes]) -> None:
        """Take binaries (shared libraries) by hash. They are loaded by `prepare`."""
        hashes = list(binaries)
        self._ask({"do": "load", "hashes": hashes}, [binaries[h] for h in hashes], _PREPARE_S)

    def prepare(self, key: str, plan: Plan, offsets: Mapping[int, int]) -> None:
        """Resolve a plan whose buffer `id` starts at byte `offsets[id]`, under a name.

        Raises:
            PlanError: The plan does not fit the arena, the target or torch.
            LaunchFailed: A binary does not load, or its constructors fail.
        """
        if plan.target != "cpu":
            raise PlanError(f"a plan for {plan.target} cannot run on the CPU")
        for buffer in plan.buffers:
            start = offsets[buffer.id]
            if not 0 <= start <= start + buffer.nbytes <= self._arena.nbytes:
                raise PlanError(f"buffer {buffer.id} at byte {start} leaves the arena")
        at = {str(k): v for k, v in offsets.items()}
        number = self._numbers.setdefault(key, next(self._next))
        request: dict[str, object] = {"do": "prepare", "number": number, "at": at}
        self._ask(request, [dump_plan(plan)], bounded(_PREPARE_S))

    def forget(self, key: str) -> None:
        """Drop a prepared plan."""
        self._ask({"do": "forget", "number": self._numbers.pop(key)}, (), _PREPARE_S)

    def populate(self, keys: Sequence[str]) -> None:
        """See `Launcher`. The process goes on meanwhile."""
        numbers = [self._numbers[key] for key in keys]
        self._ask({"do": "populate", "numbers": numbers}, (), _PREPARE_S)

    def stop(self) -> None:
        """Stop all threads of the process, until it is asked for something.

        Raises:
            LaunchFailed: It has ended.
        """
        self._begin()
        if self._stopped:
            return
        if not self._child.freeze():
            raise self._fail(0.0)
        self._stopped = True

    def _resume(self) -> None:
        if self._stopped:
            self._stopped = False
            self._child.thaw()

    def wait_until_idle(self) -> None:
        """Return at once: launchers start and end while no other candidate is timed."""

    def run(self, key: str, *, limit_s: float) -> None:
        """Execute once and return when it is done."""
        self.repeat(key, 1, limit_s=limit_s)

    def repeat(self, key: str, count: int, *, limit_s: float) -> None:
        """Execute a prepared plan some times in a row."""
        self._begin()
        self._execute([key] * count, limit_s, nothing)

    def sample(
        self, keys: Sequence[str], *, limit_s: float, observe: Callable[[], None] = nothing
    ) -> float:
        """µs per execution of `keys`, in order, once each; see `Launcher`.

        With placements that exceed the caches together every execution starts cold. What asking
        costs varies by some 50 µs: pass keys for much more than that.

        Raises:
            ValueError: No keys, or a launcher that was made for untimed executions.
        """
        if not keys or self._request_cost is None:
            raise ValueError("nothing to time" if not keys else "this launcher is not for timing")
        self.stop()
        with self._priority:
            took_s = self._execute(keys, limit_s, observe)
        return 1e6 * (took_s - self._request_cost.cost_s) / len(keys)

    def _execute(self, keys: Sequence[str], limit_s: float, observe: Callable[[], object]) -> float:
        """Execute prepared plans once each. Seconds from before the process, if it is stopped, goes
        on until `observe` is done.
        """
        line = self._lines[0]
        request = make_request([self._numbers[key] for key in keys])
        self._put(request)  # there when it goes on
        wait_ms = max(0.0, limit_s) * 1e3
        start = time.perf_counter()
        self._resume()
        answer = line.answer(wait_ms)
        observe()
        took_s = time.perf_counter() - start
        self._accept(answer, request, limit_s)
        return took_s

    def execute_together(self, keys: Sequence[Sequence[str]], *, limit_s: float) -> None:
        """Execute prepared plans in all callers at once, each of them its own in order."""
        self.stop()
        requests = [make_request([self._numbers[key] for key in own]) for own in keys]
        for line, request in zip(self._lines, requests, strict=True):
            self._put(request, line)
        end = time.perf_counter() + limit_s
        self._resume()
        for line, request in zip(self._lines, requests, strict=True):
            wait_ms = max(0.0, end - time.perf_counter()) * 1e3
            self._accept(line.answer(wait_ms), request, limit_s)

    def _accept(self, answer: bytes | None, request: bytes, limit_s: float) -> None:
        """Make sure that a request was answered as it should be; None: it was not in time."""
        token = request[:TOKEN_BYTES]
        if answer is None:
            raise self._fail(limit_s, hung="native code")
        if answer != token:
            self._refuse(answer, token, limit_s)

    def _refuse(self, answer: bytes, token: bytes, limit_s: float) -> NoReturn:
        """Say why executions were not answered as they should be.

        Raises:
            PlanError: The plan does not suit torch.
            LaunchFailed: The candidate failed.
        """
        if not answer:
            raise self._fail(limit_s)
        text = answer.removeprefix(token)
        said = printable(text.partition(b" ")[2].decode(errors="replace"))
        if answer.startswith(token) and text.startswith(REFUSED):
            raise PlanError(said)
        if answer.startswith(token) and text.startswith(FAILED):
            raise LaunchFailed(Status.RUNTIME_ERROR, said)
        self._tampered()

    def wall_us(self, keys: Sequence[str], count: int, *, limit_s: float) -> None:
        """None: samples are on the judge's clock."""

    def close(self) -> None:
        """End the process and all that it started."""
        self._child.close()
        for line in self._lines:
            line.close()

    # -- the protocol ----------------------------------------------------------------------------

    def _ask(self, request: Mapping[str, object], blobs: Sequence[bytes], limit_s: float) -> None:
        self._begin()
        self._resume()
        token = secrets.token_hex(8)  # the answer must name it: one sent ahead cannot know it
        self._put(LOOK)
        try:
            self._child.channel.send({**request, "token": token}, blobs)
        except ChannelError:
            raise self._fail(0.0) from None
        self._receive(str(request["do"]), token, limit_s)

    def _put(self, message: bytes, line: _Line | None = None) -> None:
        """Put a message where the process reads next, or where another of its callers does.

        Raises:
            LaunchFailed: It has failed before, or has ended.
        """
        if self._failure is not None:
            raise LaunchFailed(self._failure.status, str(self._failure))
        try:
            (line or self._lines[0]).send(message)
        except OSError:
            raise self._fail(0.0) from None

    def _receive(self, doing: str, token: str, limit_s: float) -> None:
        try:
            answer = self._child.channel.recv(max(0.0, limit_s), max_bytes=_MAX_ANSWER_BYTES).obj
        except ChannelTimeout:
            what = "a constructor of the library" if doing == "prepare" else "native code"
            raise self._fail(limit_s, hung=what) from None
        except ChannelError:
            raise self._fail(limit_s) from None
        if not isinstance(answer, dict) or answer.get("token") != token:
            self._tampered()
        if "plan" in answer:
            raise PlanError(printable(str(answer["plan"]))[:4000])
        if "error" in answer:
            raise LaunchFailed(Status.RUNTIME_ERROR, printable(str(answer["error"]))[:4000])

    def _tampered(self) -> NoReturn:
        """End the process: what came from it is no answer to what it was asked.

        Raises:
            LaunchFailed: Always.
        """
        self._child.kill()
        self._failure = LaunchFailed(Status.TAMPER, "native code wrote to the result channel")
        self._after_loss()
        raise self._failure

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
