"""Timed blocks: a few samples, each on inputs that nothing of its process has seen."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kagent_sandbox.data.task import Kind
from kagent_sandbox.data.verdict import Stage
from kagent_sandbox.device.cpu.baselines import MOST_SETS, SPAN_US, runs_for
from kagent_sandbox.device.cpu.flush import settle
from kagent_sandbox.judge.arena.layout import pitch_of
from kagent_sandbox.judge.check.checker import place_plan
from kagent_sandbox.judge.check.inputs import UnseenInputs
from kagent_sandbox.judge.check.spot_checks import SpotReading
from kagent_sandbox.judge.timing import metrics

if TYPE_CHECKING:
    from kagent_sandbox.data.build import Contender
    from kagent_sandbox.data.device import Ceilings
    from kagent_sandbox.data.task import Case, Task
    from kagent_sandbox.judge.arena.placement import PlanPlacement
    from kagent_sandbox.judge.arena.session import LauncherSession
    from kagent_sandbox.judge.check.checker import Checker
    from kagent_sandbox.judge.check.inputs import InputSet


@dataclass(frozen=True, slots=True)
class Round:
    """Pairs of blocks after which a candidate that clearly loses is dropped."""

    pairs: int
    samples: int  # per block


@dataclass(frozen=True, slots=True)
class Schedule:
    """Numbers of pairs and samples of a comparison on one kind of device."""

    rounds: tuple[Round, ...]  # of each case
    further: Round | None  # while it may yet turn out to be faster; its pairs are of all cases
    interim_looks: int  # most further rounds
    placements: int | None  # placements that one block rotates over; None: all

    def more(self, cases: int) -> Round | None:
        """Return the further round of each case, of so many cases."""
        if self.further is None:
            return None
        return Round(math.ceil(self.further.pairs / cases), self.further.samples)

    def pairs(self, cases: int) -> int:
        """Pairs of blocks of one case of so many, at most."""
        more = self.more(cases)
        return sum(p.pairs for p in self.rounds) + (self.interim_looks * more.pairs if more else 0)


SCHEDULES: Mapping[Kind, Schedule] = {
    # Every sample costs fresh inputs and a verification, which cost more than the sample itself.
    "gpu": Schedule((Round(1, 14), Round(1, 14), Round(2, 14)), None, 0, 1),
    # A pair of single samples is over within some 10 ms, in which little else happens: pairs differ
    # by hardly more than those of longer blocks would, and there can be more of them. Who is far
    # behind shows from four. 24 are the least that anybody is promoted by.
    "cpu": Schedule((Round(4, 1), Round(6, 1), Round(14, 1)), Round(36, 1), 9, None),
}
_SAMPLES_FROM_US: Mapping[float, int] = {400.0: 2, 100.0: 4}
"""Samples of a block on a GPU that are enough from so many µs on: they vary by a tenth as much as
short kernels', and each costs inputs that are a hundred times as large."""


def placement_count(task: Task, case: Case, kind: Kind, ceilings: Ceilings) -> int:
    """Return the number of placements that each contender rotates over.

    GPU: two, since addresses shift a 28 µs kernel by 0.7 %. CPU: three, and more for short kernels,
    since a sample runs all of them: it must outlast the variation of waking up.
    """
    if kind == "gpu":
        return 2
    return _for_span(metrics.attainable_us(task, case, ceilings), MOST_SETS)


def _for_span(us: float, most: int) -> int:
    """Placements for a CPU's sample, each being executed in `us`."""
    return runs_for(SPAN_US, us, least=3, most=most)


def _enough(us: float) -> float:
    """Samples of a block on a GPU that are enough for kernels of so many µs."""
    return next((n for least_us, n in _SAMPLES_FROM_US.items() if us >= least_us), math.inf)


@dataclass
class TimedBlocks:
    """Contenders that take turns on one case.

    Every execution works on inputs that its process has never seen, over stale values, and a few
    secret places of its results are compared: no more executions are counted than were verified.
    Nothing can be remembered, so that nothing has to be looked for afterwards.

    All sit in the same places, so that none is favoured by its addresses; from block to block a
    contender moves to its next places. It lasts as long as its session.
    """

    session: LauncherSession
    checker: Checker
    case: Case
    contenders: Mapping[str, Contender]
    count: int  # placements of each
    at_once: int | None  # placements that one block rotates over; None: all
    blocks: dict[str, list[tuple[float, ...]]] = field(init=False)
    side: str = field(init=False)  # the side that is or was timed: it is to blame for a failure
    _placements: dict[str, list[PlanPlacement]] = field(init=False, default_factory=dict)
    _unseen: UnseenInputs = field(init=False)

    def __post_init__(self) -> None:
        self.side = next(iter(self.contenders))
        self.blocks = {side: [] for side in self.contenders}
        # Of all of them together: what one has seen, another could find in the arena.
        self._unseen = UnseenInputs(self.checker.sampler, self.case)

    def prepare(self) -> None:
        """Place everyone.

        Raises:
            CandidateRejected: The plan of `side` cannot be had in the launcher.
        """
        plans = {side: c.plan(self.case.name) for side, c in self.contenders.items()}
        pitch = pitch_of(plans.values())
        for side, plan in plans.items():
            self.side = side
            self._placements[side] = place_plan(
                self.checker.task,
                self.case,
                plan,
                self.session.arena,
                count=self.count,
                pitch=pitch,
                prefix=f"t{side}",
                owner=side,
            )
            self.session.prepare(self._placements[side], self.case.name)

    def sample(self, side: str, samples: int, *, verify: bool = False) -> None:
        """Time one block. Every execution has inputs of its own, and its secret places are
        verified.

        Args:
            side: The contender.
            samples: Number of samples; on a GPU fewer are taken where they are long.
            verify: Whether all of one execution's results is compared. The choice of it is secret.

        Raises:
            CandidateRejected: The contender failed, or its results are wrong.
        """
        whole = random.SystemRandom().randrange(min(samples, 2)) if verify else None
        placements = self._now(side)
        block: list[float] = []
        readings: list[SpotReading] = []
        for i in range(samples):
            self.side = side
            input_sets = self._write(placements)
            with self.session.clock.part("compare"):
                spot_checks = [self.checker.sampler.spot_checks(d) for d in input_sets]
                results = self.checker.task.results
                reading = SpotReading(self.session.arena, placements, spot_checks, results)
            if self.at_once is None:
                with self.session.clock.part("settle"):
                    settle()
            us = self.session.sample(placements, self.case.name, observe=reading.read)
            block.append(us)
            readings.append(reading)
            if i == whole:
                self._compare(placements, input_sets)
            if self.at_once is not None and len(block) >= _enough(us):
                break
        with self.session.clock.part("compare"):
            self.checker.compare_spot_checks(readings, self.case)
        self.blocks[side].append(tuple(block))

    def verify(self, side: str) -> None:
        """Compare all of one execution's results, timed like a block but not kept among `blocks`.

        Raises:
            CandidateRejected: The contender failed, or its results are wrong.
        """
        self.sample(side, 1, verify=True)
        self.blocks[side].pop()

    def check(self, side: str, case: Case, slack: float) -> None:
        """Run the timed plan once on inputs of another distribution.

        Args:
            side: The contender.
            case: A case of the same shapes, with the other distribution.
            slack: Factor on the task's tolerance.

        Raises:
            CandidateRejected: The contender failed, or its results are wrong.
        """
        self.side = side
        placement = random.SystemRandom().choice(self._placements[side])
        with self.session.clock.part("inputs"):
            input_set = self.checker.sampler.fresh(case)
            stale = self.checker.sampler.stale(self.case)
            with self.session.paused():
                placement.write(input_set, stale)
        self.session.run(placement, self.case.name)
        with self.session.clock.part("compare"), self.session.paused():
            self.checker.reject_tampering(placement, self.case, Stage.MEASURE)
            self.checker.compare(
                placement.outputs(), input_set, Stage.MEASURE, typical=True, slack=slack
            )

    def wall_us(self, side: str, count: int) -> float | None:
        """µs per execution by the judge's own clock, on the side's last inputs; None where samples
        are on it, too.
        """
        self.side = side
        return self.session.wall_us(self._now(side), count, self.case.name)

    def _now(self, side: str) -> list[PlanPlacement]:
        """A side's places for its next block.

        On a GPU every block moves on by as many as it takes. On a CPU it takes all of them, unless
        a few are ample by the times of everyone's block before: a slow kernel or a busy host.
        """
        placements, turn = self._placements[side], len(self.blocks[side])
        if self.at_once is not None:
            first = turn * self.at_once
            return [placements[(first + i) % len(placements)] for i in range(self.at_once)]
        if turn:
            before = [
                statistics.median(b[turn - 1]) for b in self.blocks.values() if len(b) >= turn
            ]
            placements = placements[: _for_span(min(before), len(placements))]
        first = random.randrange(len(placements))  # noqa: S311 - none is always the first
        return [*placements[first:], *placements[:first]]

    def _write(self, placements: Sequence[PlanPlacement]) -> list[InputSet]:
        """Inputs that nobody at the table has seen for a side's placements, another draw in each;
        whatever the others left there is gone.
        """
        with self.session.clock.part("inputs"):
            input_sets = self._unseen.take(len(placements))
            stale = self.checker.sampler.stale(self.case)
            with self.session.paused():
                for placement, input_set in zip(placements, input_sets, strict=True):
                    placement.write(input_set, stale)
        return input_sets

    def _compare(self, placements: Sequence[PlanPlacement], input_sets: Sequence[InputSet]) -> None:
        """All of one placement's results, and that nothing else was written in any of them."""
        with self.session.clock.part("compare"), self.session.paused():
            for placement in placements:
                self.checker.reject_tampering(placement, self.case, Stage.MEASURE)
            placement, input_set = random.SystemRandom().choice(
                list(zip(placements, input_sets, strict=True))
            )
            self.checker.compare(placement.outputs(), input_set, Stage.MEASURE, typical=True)
            # Its places are kept, and it will not be asked for again soon.
            input_set.known_results = None
