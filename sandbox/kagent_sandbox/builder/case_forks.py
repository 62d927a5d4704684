"""Forks that trace the cases of a candidate: several at once, each with limits on its time.

Compiles and host code have limits of their own: a fork says when a compile starts and ends, and one
that is stuck in either is killed.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from kagent_sandbox.builder.compile import time_limit as limits
from kagent_sandbox.builder.compile.fork import CompileFork, end_group
from kagent_sandbox.builder.crash_report import CrashPipe
from kagent_sandbox.data.build import BuildCase
from kagent_sandbox.data.verdict import Rejected, Stage, Status
from kagent_sandbox.process.channel import Channel, ChannelError, Message

_LOOK_S = 0.05  # between two looks at a CPU clock that stands still on a busy machine
COMPILE_GRACE_S = 1.0  # a compile that Python can still interrupt ends itself
_MESSAGE_S = 30.0  # for the rest of a message that has begun

Trace = Callable[[BuildCase, Channel, Channel | None], None]
"""Runs in the fork: traces the case, sends the result, never returns. The channels lead to the
worker and to the compile fork.
"""


@dataclass
class _ForkSlot:
    """A slot that traces one case after the other; `compiler` stays from case to case."""

    compiler: CompileFork | None = None


@dataclass
class _Running:
    position: int
    case: BuildCase
    pid: int
    channel: Channel
    lane: _ForkSlot
    crash: CrashPipe
    since: float
    host_left_s: float
    compiling: str | None = None
    cpu_before_s: float = 0.0  # of its processes when the compile began

    def cpu_s(self) -> float:
        """CPU time in seconds of it and of its compile fork."""
        compiler = self.lane.compiler
        own = limits.cpu_s(self.pid)
        return own + (limits.cpu_s(compiler.pid) if compiler is not None else 0.0)

    def left_s(self, compile_limit_s: float) -> float:
        """Seconds to its limit: of CPU time for a compile, of wall time for host code."""
        if self.compiling:
            return compile_limit_s + COMPILE_GRACE_S - (self.cpu_s() - self.cpu_before_s)
        return self.since + self.host_left_s - time.monotonic()

    def heard(self, compiling: str | None) -> None:
        """It says that a compile starts or has ended."""
        now = time.monotonic()
        if not self.compiling:
            self.host_left_s -= now - self.since
        self.compiling, self.since = compiling, now
        if compiling:
            self.cpu_before_s = self.cpu_s()


class CaseForks:
    """Traces cases in fresh forks.

    Args:
        forks: Forks at once.
        trace: What a fork runs.
        new_compiler: Starts a compile fork; None where no kernel needs one.
        compile_limit_s: Seconds of CPU time for one kernel.
        host_limit_s: For host code of one case.
        deadline: For all cases, on the monotonic clock.
    """

    def __init__(
        self,
        forks: int,
        trace: Trace,
        new_compiler: Callable[[], CompileFork] | None,
        compile_limit_s: float,
        host_limit_s: float,
        deadline: float,
    ) -> None:
        self._idle = [_ForkSlot() for _ in range(forks)]
        self._running: dict[int, _Running] = {}  # by descriptor
        self._trace = trace
        self._new_compiler = new_compiler
        self._compile_limit_s = compile_limit_s
        self._host_limit_s = host_limit_s
        self._deadline = deadline

    def results(self, cases: Sequence[BuildCase]) -> Iterator[tuple[BuildCase, Message | Rejected]]:
        """The last message of each case's fork, or why it sent none; in the order of the cases.

        Leaving the loop early ends what still runs.
        """
        done: dict[int, Message | Rejected] = {}
        started = 0
        try:
            for position, case in enumerate(cases):
                while position not in done:
                    while self._idle and started < len(cases):
                        self._start(started, cases[started])
                        started += 1
                    done.update(self._wait())
                yield case, done.pop(position)
        finally:
            for running in self._running.values():
                end_group(running.pid)
                running.channel.close()
                running.crash.close()
                self._idle.append(running.lane)
            self._running.clear()
            for lane in self._idle:
                _close(lane)

    def _start(self, position: int, case: BuildCase) -> None:
        lane = self._idle.pop()
        if lane.compiler is None and self._new_compiler is not None:
            lane.compiler = self._new_compiler()
        ours, theirs = Channel.pair()
        crash = CrashPipe()
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            ours.close()
            crash.in_child()
            self._trace(case, Channel(theirs), lane.compiler.channel if lane.compiler else None)
            os._exit(1)
        theirs.close()
        crash.in_parent()
        now, left = time.monotonic(), self._host_limit_s
        running = _Running(position, case, pid, ours, lane, crash, now, left)
        self._running[ours.fileno()] = running

    def _wait(self) -> dict[int, Message | Rejected]:
        """Hear what the forks say until one has ended; results by position."""
        poller = select.poll()
        for fd in self._running:
            poller.register(fd, select.POLLIN)
        while True:
            first = min(r.left_s(self._compile_limit_s) for r in self._running.values())
            left = min(max(first, _LOOK_S), self._deadline - time.monotonic())
            ready = poller.poll(max(0.0, left) * 1e3)
            ended = {}
            for fd, _ in ready:
                running = self._running[fd]
                result = self._heard(running)
                if result is not None:
                    ended[running.position] = result
            if not ready:
                late = time.monotonic() >= self._deadline
                for running in list(self._running.values()):
                    if late or running.left_s(self._compile_limit_s) <= 0:
                        ended[running.position] = self._timeout(running)
            if ended:
                return ended

    def _heard(self, running: _Running) -> Message | Rejected | None:
        """One message of a fork; its result if it is the last."""
        try:
            message = running.channel.recv(_MESSAGE_S)
        except ChannelError:
            with running.crash:
                return _died(self._end(running, failed=True), running)
        answer = message.obj
        if isinstance(answer, dict) and "compiling" in answer:
            running.heard(cast("str | None", answer["compiling"]))
            return None
        with running.crash:
            self._end(running, failed=not isinstance(answer, dict) or "hashes" not in answer)
        return message

    def _end(self, running: _Running, *, failed: bool) -> int:
        """Bury a fork; its exit code."""
        del self._running[running.channel.fileno()]
        running.channel.close()
        status = end_group(running.pid)
        if failed:  # its compile fork may still be at what was asked of it
            _close(running.lane)
        self._idle.append(running.lane)
        return status

    def _timeout(self, running: _Running) -> Rejected:
        """End a fork whose time is up; what that means for the candidate."""
        late = time.monotonic() >= self._deadline
        with running.crash as crash:
            if not running.compiling:
                crash.ask(running.pid)
            self._end(running, failed=True)
            line = crash.line()
        if running.compiling and not late:
            error = limits.too_slow(running.compiling, self._compile_limit_s)
            return Rejected(Stage.BUILD, Status.TIMEOUT, error.message, running.case.name)
        if late:
            what = f"compiling kernel {running.compiling}" if running.compiling else "in host code"
            message = f"{line}building all cases takes too long; it was cut while {what}"
            if not running.compiling:
                message += f" of {running.case.name}: is there an endless loop?"
        else:
            message = (
                f"{line}host code of {running.case.name} ran for {self._host_limit_s:g} s: is "
                "there an endless loop? It should only allocate results and launch kernels"
            )
        return Rejected(Stage.BUILD, Status.TIMEOUT, message, running.case.name)


def _close(lane: _ForkSlot) -> None:
    if lane.compiler is not None:
        lane.compiler.close()
        lane.compiler = None


def _died(status: int, running: _Running) -> Rejected:
    compiling = running.compiling
    doing = f"while compiling kernel {compiling}" if compiling else "in host code"
    if status < 0:
        how = f"died of {signal.Signals(-status).name}"
    else:
        how = f"ended itself with status {status}"
    line = running.crash.line()
    message = f"{line}the process that traced {running.case.name} {how} {doing}"
    return Rejected(Stage.BUILD, Status.RUNTIME_ERROR, message, running.case.name)
