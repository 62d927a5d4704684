"""Timed blocks: a few samples, each on inputs that nothing of its process has seen."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kagent_sandbox.data.verdict import Stage
from kagent_sandbox.judge.arena.layout import pitch_of
from kagent_sandbox.judge.check.checker import place_plan
from kagent_sandbox.judge.check.inputs import UnseenInputs
from kagent_sandbox.judge.check.spot_reading import SpotReading
from kagent_sandbox.judge.timing import metrics

if TYPE_CHECKING:
    from kagent_sandbox.data.build import Contender
    from kagent_sandbox.data.case import Case
    from kagent_sandbox.data.device import Ceilings
    from kagent_sandbox.data.task import Task
    from kagent_sandbox.device.traits import Placements, Traits
    from kagent_sandbox.judge.arena.placement import PlanPlacement
    from kagent_sandbox.judge.arena.session import LauncherSession
    from kagent_sandbox.judge.check.checker import Checker
    from kagent_sandbox.judge.check.inputs import InputSet


def placement_count(
    task: Task, case: Case, placements: Placements, ceilings: Ceilings, memory_bytes: int
) -> int:
    """Return the number of placements that each contender rotates over: where a sample runs all of
    them, more for short kernels; a single one where a case takes much of the device's memory.
    """
    if task.min_bytes(case) > placements.single_share * memory_bytes:
        return 1
    if placements.fixed:
        return placements.least
    return placements.lasting(metrics.attainable_us(task, case, ceilings))


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
    traits: Traits
    blocks: dict[str, list[tuple[float, ...]]] = field(init=False)
    side: str = field(init=False)  # the side that is or was timed, to blame unless another failed
    _placements: dict[str, list[PlanPlacement]] = field(init=False, default_factory=dict)
    _unseen: UnseenInputs = field(init=False)

    def __post_init__(self) -> None:
        self.side = next(iter(self.contenders))
        self.blocks = {side: [] for side in self.contenders}
        # Of all of them together: what one has seen, another could find in the arena.
        self._unseen = UnseenInputs(self.checker.sampler, self.case)

    @property
    def executions(self) -> int:
        """Most executions of one sample."""
        return self.traits.schedule.placements or self.count

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
            if not self.traits.judges_clock:
                self._run_once(self._placements[side])

    def sample(self, side: str, samples: int, *, verify: bool = False) -> None:
        """Time one block: so many samples (fewer where they are ample), each on
        inputs of its own, and verify their places.

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
        # Before its inputs are there: it goes on for that, and nobody else does until the end.
        self.session.populate(placements, self.case.name)
        for i in range(samples):
            self.side = side
            input_sets = self._write(placements)
            with self.session.clock.part("compare"):
                spot_checks = [self.checker.sampler.spot_checks(d) for d in input_sets]
                results = self.checker.task.compared
                reading = SpotReading(
                    self.session.arena, placements, spot_checks, results, input_sets
                )
            if self.traits.judges_clock:
                self.session.settle()
            us = self.session.sample(placements, self.case.name, observe=reading.read)
            block.append(us)
            readings.append(reading)
            if self.checker.task.accept:
                with self.session.clock.part("compare"), self.session.paused():
                    self.checker.accept_spot_checks(reading, placements, input_sets)
            if i == whole:
                self._compare(placements, input_sets)
            self._release(input_sets)
            if len(block) >= self.traits.enough(us):
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

    def check(
        self, side: str, input_set: InputSet, slack: float, again: InputSet | None = None
    ) -> None:
        """Run the timed plan once on inputs of another distribution.

        Args:
            side: The contender.
            input_set: Inputs of the same shapes that no candidate has seen.
            slack: Factor on the task's tolerance.
            again: Inputs of a second run in the same place, right after that.

        Raises:
            CandidateRejected: The contender failed, or its results are wrong.
        """
        self.side = side
        placement = random.SystemRandom().choice(self._placements[side])
        for inputs in (input_set, again):
            if inputs is None:
                continue
            with self.session.clock.part("inputs"):
                stale = self.checker.sampler.stale(self.case)
                with self.session.paused():
                    placement.write(inputs.tensors, stale)
            self.session.run(placement, self.case.name)
            with self.session.clock.part("compare"), self.session.paused():
                self.checker.reject_tampering(placement, self.case, Stage.MEASURE)
                self.checker.compare(
                    placement.outputs(), inputs, Stage.MEASURE, typical=True, slack=slack
                )
            self._release([inputs])

    def wall_us(self, side: str, count: int) -> float | None:
        """µs per execution by the judge's own clock, on the side's last inputs; None where samples
        are on it, too.
        """
        self.side = side
        return self.session.wall_us(self._now(side), count, self.case.name)

    def _now(self, side: str) -> list[PlanPlacement]:
        """A side's places for its next block.

        Every block moves on by as many as it takes. Where it takes all of them, it does so unless
        a few are ample by the times of everyone's block before: a slow kernel or a busy host.
        """
        at_once = self.traits.schedule.placements
        placements, turn = self._placements[side], len(self.blocks[side])
        if at_once is not None:
            first = turn * at_once
            return [placements[(first + i) % len(placements)] for i in range(at_once)]
        if turn:
            before = [
                statistics.median(b[turn - 1]) for b in self.blocks.values() if len(b) >= turn
            ]
            most = len(placements)
            placements = placements[: self.traits.placements.lasting(min(before), most=most)]
        first = random.randrange(len(placements))  # noqa: S311 - none is always the first
        return [*placements[first:], *placements[:first]]

    def _write(self, placements: Sequence[PlanPlacement]) -> list[InputSet]:
        """Inputs that nobody at the table has seen for a side's placements, another draw in each;
        whatever the others left there is gone.
        """
        with self.session.clock.part("inputs"):
            stale = self.checker.sampler.stale(self.case)
            input_sets = self._unseen.take(len(placements))
            with self.session.paused():
                for placement, input_set in zip(placements, input_sets, strict=True):
                    placement.write(input_set.tensors, stale)
        return input_sets

    def _run_once(self, placements: Sequence[PlanPlacement]) -> None:
        """The first run of a plan on a GPU loads its kernels, on the data that is there: the timed
        execution that follows must have others, and arguments that are written would be written
        twice.
        """
        input_sets = self._write(placements)
        for placement in placements:
            self.session.run(placement, self.case.name)
        self._release(input_sets)

    def _release(self, input_sets: Sequence[InputSet]) -> None:
        """Free draws that have been compared: placements hold the last ones that were written."""
        for input_set in input_sets:
            self.checker.sampler.release(input_set)

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
