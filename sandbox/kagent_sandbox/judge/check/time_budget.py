"""Seconds that all executions of a candidate's check may take together.

Each execution has a limit of its own, which is for hangs. A kernel that stays below it in every
execution would hold the judge for minutes, and could not win: a check has a hundred and more.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kagent_sandbox.data.verdict import Rejected, Stage, Status
from kagent_sandbox.judge.arena.session import CandidateRejected

LEAST_S = 60.0
"""Seconds that every check has. The C++ seeds of attention and softmax took 4 to 7 s on two cores
that eight other programs used; most of it are the many calls in a row of `guests`."""
TIMES_EAGER = 300.0
"""Limit of a check where torch itself is slow, in multiples of eager's time for each case once. A
case is executed about ten times, so that a slow kernel may take 30 times as long as eager."""


@dataclass
class TimeBudget:
    """The rest of the limit.

    Attributes:
        eager_s: Computes the seconds that eager takes for all cases, once each; asked only by who
            needs more than `LEAST_S`.
        stage: Stage of a rejection.
    """

    eager_s: Callable[[], float]
    stage: Stage
    _spent_s: float = 0.0

    @contextlib.contextmanager
    def spend(self, case: str | None) -> Iterator[None]:
        """Executions of a case, whose time counts.

        Raises:
            CandidateRejected: All executions so far took longer than the check may.
        """
        began = time.perf_counter()
        yield
        self._spent_s += time.perf_counter() - began
        if self._spent_s <= LEAST_S:
            return
        allowed_s = max(LEAST_S, TIMES_EAGER * self.eager_s())
        if self._spent_s > allowed_s:
            text = (
                f"too slow to be checked: its executions took {self._spent_s:.3g} s so far, and "
                f"those of all cases may take {allowed_s:.3g} s together ({TIMES_EAGER:g} times "
                f"what eager torch takes for each case once, and at least {LEAST_S:g} s)"
            )
            raise CandidateRejected(Rejected(self.stage, Status.TIMEOUT, text, case))
