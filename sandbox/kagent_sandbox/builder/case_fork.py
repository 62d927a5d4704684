"""One fork that traces cases: its times and limits, and the verdicts on one that died or hung."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kagent_sandbox.builder.compile import time_limit as limits
from kagent_sandbox.builder.compile.fork import CompileFork
from kagent_sandbox.builder.crash_report import CrashPipe
from kagent_sandbox.data.build import BuildCase
from kagent_sandbox.data.verdict import Rejected, Stage, Status
from kagent_sandbox.process.channel import Channel
from kagent_sandbox.process.cpu_clock import cpu_s

COMPILE_GRACE_S = 1.0  # at most: a compile that Python can still interrupt ends itself
_COMPILE_GRACE = 0.25  # as a share of a shorter limit


@dataclass
class ForkSlot:
    """A slot that has one fork after the other; `compiler` stays."""

    compiler: CompileFork | None = None


@dataclass
class RunningFork:
    """One fork, and the case that it traces now."""

    position: int  # of the case that it traces now
    case: BuildCase
    further: deque[int]  # positions of those that it traces afterwards
    first: bool  # whether the case is the first that it traces
    pid: int
    channel: Channel
    lane: ForkSlot
    crash: CrashPipe
    since: float
    host_left_s: float
    compiling: str | None = None
    cpu_before_s: float = 0.0  # of its processes when the compile began

    def cpu_s(self) -> float:
        """CPU time in seconds of it and of its compile fork."""
        compiler = self.lane.compiler
        own = cpu_s(self.pid)
        return own + (cpu_s(compiler.pid) if compiler is not None else 0.0)

    def left_s(self, compile_limit_s: float) -> float:
        """Seconds to its limit: of CPU time for a compile, of wall time for host code."""
        if self.compiling:
            grace_s = min(COMPILE_GRACE_S, _COMPILE_GRACE * compile_limit_s)
            return compile_limit_s + grace_s - (self.cpu_s() - self.cpu_before_s)
        return self.since + self.host_left_s - time.monotonic()

    def goes_on(self, cases: Sequence[BuildCase], host_left_s: float) -> None:
        """Note that the fork has sent the result of a case and traces the next one."""
        self.position = self.further.popleft()
        self.case = cases[self.position]
        self.first = False
        self.since, self.host_left_s = time.monotonic(), host_left_s

    def heard(self, compiling: str | None) -> None:
        """Note that a compile starts or has ended."""
        now = time.monotonic()
        if not self.compiling:
            self.host_left_s -= now - self.since
        self.compiling, self.since = compiling, now
        if compiling:
            self.cpu_before_s = self.cpu_s()

    def died(self, status: int) -> Rejected:
        """Verdict on a fork that ended before it sent a result; `status` is its exit code."""
        if status < 0:
            how = f"died of {signal.Signals(-status).name}"
        else:
            how = f"ended itself with status {status}"
        doing = f"while {self._compile}" if self.compiling else "in host code"
        text = f"{self.crash.line()}the process that traced {self.case.name} {how} {doing}"
        return Rejected(Stage.BUILD, Status.RUNTIME_ERROR, text, self.case.name)

    def compiled_too_long(self, limit_s: float) -> Rejected:
        """Verdict on a kernel whose compile took longer than its limit."""
        assert self.compiling
        return self._timeout(limits.too_slow(self.compiling, limit_s).message)

    def ran_too_long(self, line: str, limit_s: float) -> Rejected:
        """Verdict on host code that took longer than its limit; `line` is where it was."""
        return self._timeout(
            f"{line}host code of {self.case.name} ran for {limit_s:g} s: is "
            "there an endless loop? It should only allocate results and launch kernels"
        )

    def cut_by_deadline(self, line: str) -> Rejected:
        """Verdict where all cases together took too long; `line` is where host code was."""
        what = self._compile if self.compiling else "in host code"
        message = f"{line}building all cases takes too long; it was cut while {what}"
        if not self.compiling:
            message += f" of {self.case.name}: is there an endless loop?"
        return self._timeout(message)

    @property
    def _compile(self) -> str:
        return f"compiling kernel {self.compiling}"

    def _timeout(self, message: str) -> Rejected:
        return Rejected(Stage.BUILD, Status.TIMEOUT, message, self.case.name)


def close_compiler(lane: ForkSlot) -> None:
    """End a slot's compile fork; the next fork there starts another."""
    if lane.compiler is not None:
        lane.compiler.close()
        lane.compiler = None
