"""Forks that trace the cases of a candidate: several at once, with limits on the time of each case.

Compiles and host code have limits of their own: a fork says when a compile starts and ends, and one
that is stuck in either is killed.

A fork costs several times as much as the trace of a case. So a fork traces one case after the
other, and what host code keeps from one to the next must not matter: a case that fails after
another one is traced again in a fresh fork, and so is one that is drawn in secret. Where its plan
is not the same, every case is traced in a fork of its own.
"""

from __future__ import annotations

import functools
import os
import random
import select
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import cast

from kagent_sandbox.builder.case_fork import ForkSlot, RunningFork, close_compiler
from kagent_sandbox.builder.compile.fork import CompileFork, end_group
from kagent_sandbox.builder.crash_report import CrashPipe
from kagent_sandbox.data.build import BuildCase
from kagent_sandbox.data.verdict import Rejected
from kagent_sandbox.process.channel import Channel, ChannelError, Message

_LOOK_S = 0.05  # between two looks at a CPU clock that stands still on a busy machine
_MESSAGE_S = 30.0  # for the rest of a message that has begun

Trace = Callable[[Sequence[BuildCase], Channel, Channel | None], None]
"""Runs in the fork: traces the cases in order, sends the result of each, and never returns. It ends
after the first failure. The channels lead to the worker and to the compile fork.
"""


class CaseForks:
    """Traces cases in forks.

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
        self._forks = forks
        self._idle = [ForkSlot() for _ in range(forks)]
        self._running: dict[int, RunningFork] = {}  # by descriptor
        self._cases: Sequence[BuildCase] = ()
        self._waiting: deque[deque[int]] = deque()  # positions, by fork
        self._done: dict[int, Message | Rejected] = {}
        self._after_others: list[int] = []  # positions of cases that were not their fork's first
        self._trace = trace
        self._new_compiler = new_compiler
        self._compile_limit_s = compile_limit_s
        self._host_limit_s = host_limit_s
        self._deadline = deadline

    def results(self, cases: Sequence[BuildCase]) -> Iterator[tuple[BuildCase, Message | Rejected]]:
        """The last message of each case, or why there is none; in the order of the cases.

        Leaving the loop early ends what still runs.
        """
        self._cases = cases
        whole = range(len(cases))
        try:
            # In turn, so that what several forks compile differs as early as it does in the cases.
            self._waiting.extend(deque(whole[i :: self._forks]) for i in range(self._forks))
            self._run_until(lambda: len(self._done) == len(cases) or self._failed_in_order())
            if self._after_others and not self._failed_in_order() and not self._same_alone():
                self._done.clear()
                self._waiting.extend(deque([i]) for i in whole)
            for position, case in enumerate(cases):
                self._run_until(functools.partial(self._done.__contains__, position))
                yield case, self._done.pop(position)
        finally:
            for running in self._running.values():
                end_group(running.pid)
                running.channel.close()
                running.crash.close()
                self._idle.append(running.lane)
            self._running.clear()
            for lane in self._idle:
                close_compiler(lane)

    def _failed_in_order(self) -> bool:
        """Whether one failed while all before it did not: nobody may ask for those after it."""
        for position in range(len(self._cases)):
            if position not in self._done:
                return False
            if _is_failure(self._done[position]):
                return True
        return False

    def _same_alone(self) -> bool:
        """Whether a case that was traced after others has the same plan in a fresh fork."""
        position = random.SystemRandom().choice(self._after_others)
        before = self._done.pop(position)
        self._waiting.append(deque([position]))
        self._run_until(functools.partial(self._done.__contains__, position))
        same = _plan(before) == _plan(self._done[position])
        self._done[position] = before  # with what the compiler said when it ran
        return same

    def _run_until(self, over: Callable[[], bool]) -> None:
        while not over():
            while self._idle and self._waiting:
                positions = self._waiting.popleft()
                if positions:
                    self._start(positions)
            self._wait()

    def _start(self, positions: deque[int]) -> None:
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
            compiler = lane.compiler.channel if lane.compiler else None
            self._trace([self._cases[i] for i in positions], Channel(theirs), compiler)
            os._exit(1)
        theirs.close()
        crash.in_parent()
        position = positions.popleft()
        self._running[ours.fileno()] = RunningFork(
            position=position,
            case=self._cases[position],
            further=positions,
            first=True,
            pid=pid,
            channel=ours,
            lane=lane,
            crash=crash,
            since=time.monotonic(),
            host_left_s=self._host_limit_s,
        )

    def _wait(self) -> None:
        """Hear what the forks say until there is a result."""
        poller = select.poll()
        for fd in self._running:
            poller.register(fd, select.POLLIN)
        while True:
            first = min(r.left_s(self._compile_limit_s) for r in self._running.values())
            left = min(max(first, _LOOK_S), self._deadline - time.monotonic())
            ready = poller.poll(max(0.0, left) * 1e3)
            heard = [self._heard(self._running[fd]) for fd, _ in ready]
            if any(heard):
                return
            if not ready:
                late = time.monotonic() >= self._deadline
                over = [
                    r
                    for r in self._running.values()
                    if late or r.left_s(self._compile_limit_s) <= 0
                ]
                for running in over:
                    self._give_up(running)
                if over:
                    return

    def _heard(self, running: RunningFork) -> bool:
        """One message of a fork; whether it was a result or its end."""
        try:
            message = running.channel.recv(_MESSAGE_S)
        except ChannelError:
            with running.crash:
                status = self._end(running, failed=True)
                self._failure(running, lambda: running.died(status))
            return True
        answer = message.obj
        if isinstance(answer, dict) and "compiling" in answer:
            running.heard(cast("str | None", answer["compiling"]))
            return False
        if _is_failure(message):
            with running.crash:
                self._end(running, failed=True)
            self._failure(running, lambda: message)
            return True
        self._done[running.position] = message
        if not running.first:
            self._after_others.append(running.position)
        if running.further:
            running.goes_on(self._cases, self._host_limit_s)
        else:
            with running.crash:
                self._end(running, failed=False)
        return True

    def _failure(self, running: RunningFork, why: Callable[[], Message | Rejected]) -> None:
        """A fork has ended at a case: alone, that may go well. Those after it are still to do."""
        if running.first:
            self._done[running.position] = why()
        else:
            running.further.appendleft(running.position)
        self._waiting.append(running.further)

    def _end(self, running: RunningFork, *, failed: bool) -> int:
        """Wait for the end of a fork and return its exit code."""
        del self._running[running.channel.fileno()]
        running.channel.close()
        status = end_group(running.pid)
        if failed:  # its compile fork may still be at what was asked of it
            close_compiler(running.lane)
        self._idle.append(running.lane)
        return status

    def _give_up(self, running: RunningFork) -> None:
        """End a fork whose time is up. In a fresh one the case would take as long."""
        self._done[running.position] = self._timeout(running)
        self._waiting.append(running.further)

    def _timeout(self, running: RunningFork) -> Rejected:
        """End a fork whose time is up; what that means for the candidate."""
        late = time.monotonic() >= self._deadline
        with running.crash as crash:
            if not running.compiling:
                crash.ask(running.pid)
            self._end(running, failed=True)
            line = crash.line()
        if late:
            return running.cut_by_deadline(line)
        if running.compiling:
            return running.compiled_too_long(self._compile_limit_s)
        return running.ran_too_long(line, self._host_limit_s)


def _is_failure(result: Message | Rejected) -> bool:
    return isinstance(result, Rejected) or not (
        isinstance(result.obj, dict) and "hashes" in result.obj
    )


def _plan(result: Message | Rejected) -> bytes | None:
    return None if isinstance(result, Rejected) or _is_failure(result) else result.blobs[0]
