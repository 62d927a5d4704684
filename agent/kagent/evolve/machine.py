"""Interfaces that the loop needs: something that builds, and something that judges.

`kagent.fleet` opens them, here or on a cluster; a test's are a few lines of arithmetic.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from kagent_sandbox.data.build import BuildRequest, Built, Contender
from kagent_sandbox.data.race import Race
from kagent_sandbox.data.verdict import CaseError, Passed, Rejected

from kagent.fleet.station import Builds
from kagent.runs.lineage import Candidate
from kagent.runs.profiles import Profile

TakesProfile: TypeAlias = Callable[[Candidate, Built, threading.Event], Profile | None]
"""Profiles a candidate on the device, in a turn on it; ends early once the event is set. None: the
profiler did not work before, and is not tried again.
"""


class CandidateJudge(Protocol):
    """Decides on what was built. Called from one thread at a time."""

    def check(self, built: Built) -> tuple[CaseError, ...] | Rejected:
        """Check that it is correct on every case, hidden ones included."""

    def sweep(self, built: Built) -> Sequence[Mapping[str, float]] | Rejected:
        """Median µs by case of each configuration, by a few samples; see `JudgeClient.sweep`."""

    def measure(
        self,
        built: Built,
        errors: tuple[CaseError, ...],
        incumbent: Built | None = None,
        against: str = "",
        *,
        choice: Mapping[str, int] | None = None,
    ) -> Passed | Rejected:
        """Time it on every benchmark case, interleaved with the incumbent.

        Args:
            built: The candidate.
            errors: The result of `check` for it.
            incumbent: The best candidate so far; None if there is none.
            against: The incumbent's id.
            choice: The incumbent's configuration per case.
        """

    def race(
        self, contenders: Sequence[Contender], *, hidden: bool, baselines: bool = True
    ) -> Race:
        """Time contenders side by side, with all baselines or without, on hidden benchmark cases
        or on visible ones.
        """


@dataclass(frozen=True)
class Unit:
    """A judge on a device of its own, with the device's name: a GPU's UUID, or a CPU's host."""

    name: str
    judge: CandidateJudge


@dataclass(frozen=True)
class Machine:
    """Builder and judge of a session."""

    builder: Builds
    judge: CandidateJudge
    jobs: int  # builds at once
    quiet: bool  # nothing may be built while it times: kernels run on the cores that build
    request: Callable[[str], BuildRequest]  # of a source, for all cases but the final race's
    race_request: Callable[[str], BuildRequest] | None  # for the final race; None: same cases
    prepare: Callable[[Callable[[str], None]], Mapping[str, object]]
    """Measures baselines and ceilings, says what it does, and returns them as JSON."""
    timed_request: Callable[[str], BuildRequest] | None = None  # for the benchmark cases alone
    tune: int = 1  # configurations of a candidate's tunables that are tried before its verdict
    unit: str = ""  # name of the judge's device
    others: Callable[[Callable[[str], None]], Sequence[Unit]] | None = None
    """Measures what further judges need, says what it does, and returns those whose devices are
    like the first one's."""
    moves: bool = False  # a judge that is lost may come back on another device
    profile: TakesProfile | None = None  # for incumbents; None: there is no device for that here


def contender(candidate: Candidate, built: Built) -> Contender:
    """A passed candidate, with the configuration that was the fastest on each case."""
    verdict = candidate.verdict
    timings = verdict.timings if isinstance(verdict, Passed) else ()
    return Contender(str(candidate.id), built, {t.case: t.config for t in timings})
