"""Timed blocks: a few samples on inputs that were drawn for this block alone."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kagent_sandbox import figures
from kagent_sandbox.check import pitch_of, seats_for
from kagent_sandbox.launch.cpu_baselines import MOST_SETS, SPAN_US, runs_for
from kagent_sandbox.task import Kind
from kagent_sandbox.verdict import Stage

if TYPE_CHECKING:
    from kagent_sandbox.check import Checker
    from kagent_sandbox.draws import Draw
    from kagent_sandbox.figures import Contender
    from kagent_sandbox.launch.base import Ceilings
    from kagent_sandbox.seat import Seat
    from kagent_sandbox.session import Session
    from kagent_sandbox.task import Case, Task


@dataclass(frozen=True, slots=True)
class Phase:
    """Pairs of blocks after which a candidate that clearly loses is let go."""

    pairs: int
    samples: int  # per block


@dataclass(frozen=True, slots=True)
class Pace:
    """How a candidate and the incumbent take turns on one kind of device."""

    phases: tuple[Phase, ...]  # of each case
    further: Phase | None  # while it may yet turn out to be faster; its pairs are of all cases
    looks: int  # how often that many follow, at most
    seats: int | None  # placements that one block rotates over; None: all

    def more(self, cases: int) -> Phase | None:
        """What follows for each case of so many."""
        if self.further is None:
            return None
        return Phase(math.ceil(self.further.pairs / cases), self.further.samples)

    def pairs(self, cases: int) -> int:
        """Pairs of blocks of one case of so many, at most."""
        more = self.more(cases)
        return sum(p.pairs for p in self.phases) + (self.looks * more.pairs if more else 0)


PACES: Mapping[Kind, Pace] = {
    # Every block costs fresh inputs, which cost more than its samples. Simulated over six cases,
    # with noise between and within blocks: four pairs of eight samples err as rarely, and find as
    # small a difference, as six pairs of five.
    "gpu": Pace((Phase(1, 8), Phase(1, 8), Phase(2, 8)), None, 0, 1),
    # A sample runs all placements. Four of them show who is far behind, from two pairs: one alone
    # is off by a third now and then, whatever its samples say. Thirty are the least that anybody
    # is promoted by. Pairs on shared cores differ by 7 to 20 %, and so 50 to 150 of them show a
    # kernel that is faster by 5 %.
    "cpu": Pace((Phase(2, 2), Phase(2, 4), Phase(2, 9)), Phase(16, 8), 9, None),
}
_ASLEEP_S = 0.02  # OpenMP's threads wait actively for less than that
_CALM_S = 0.001  # the judge's own threads spin for a while after inputs were written
_LONG_SPAN_US = 10_000.0  # of `long_us`
_MOST_LONG_RUNS = 200
_FRESH_SPAN_US = 2000.0  # of `fresh_us`: waking a stopped process costs up to 1.5 ms, once


def placements(task: Task, case: Case, kind: Kind, ceilings: Ceilings) -> int:
    """How many buffer sets each contender rotates over.

    GPU: two, since addresses shift a 28 µs kernel by 0.7 %. CPU: three, which caches do not hold
    together, and more for short kernels, since a sample runs all of them: it outlasts what waking
    up varies by.
    """
    if kind == "gpu":
        return 2
    return _for_span(figures.attainable_us(task, case, ceilings), MOST_SETS)


def _for_span(us: float, most: int) -> int:
    """Placements for a CPU's sample, each being executed in `us`."""
    return runs_for(SPAN_US, us, least=3, most=most)


@dataclass
class Table:
    """Contenders that take turns on one case, each block on inputs of its own seed.

    All sit in the same places, so that none is favoured by its addresses; from block to block a
    contender moves to its next places. It lasts as long as its session.
    """

    session: Session
    checker: Checker
    case: Case
    contenders: Mapping[str, Contender]
    count: int  # placements of each
    at_once: int | None  # placements that one block rotates over; None: all
    blocks: dict[str, list[tuple[float, ...]]] = field(init=False)
    side: str = field(init=False)  # whose turn it is, or was: who is to blame for a failure
    _seats: dict[str, list[Seat]] = field(init=False, default_factory=dict)
    _written: Sequence[Seat] = field(init=False, default=())  # where this side's inputs are
    _last: Draw | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.side = next(iter(self.contenders))
        self.blocks = {side: [] for side in self.contenders}

    def prepare(self) -> None:
        """Seat everyone.

        Raises:
            Disqualified: The plan of `side` cannot be had in the launcher.
        """
        plans = {side: c.plan(self.case.name) for side, c in self.contenders.items()}
        pitch = pitch_of(plans.values())
        for side, plan in plans.items():
            self.side = side
            self._seats[side] = seats_for(
                self.checker.task,
                self.case,
                plan,
                self.session.arena,
                count=self.count,
                pitch=pitch,
                prefix=f"t{side}",
                owner=side,
            )
            self.session.prepare(self._seats[side], self.case.name)

    def sample(self, side: str, samples: int, *, verify: bool = False) -> None:
        """Time one block on fresh inputs and poisoned results; with `verify`, check what it left.

        On a GPU, whose samples all execute the same place, what counts is what the first of them
        has left: else the work of one execution could be spread over a block.

        Raises:
            Disqualified: The contender failed, or its results are wrong.
        """
        seats, draw = self._write(side)
        first = 1 if verify and self.at_once == 1 else samples
        block = self.session.samples(seats, first, self.case.name)
        if verify:
            self._verify(seats, draw)
        if first < samples:
            block += self.session.samples(seats, samples - first, self.case.name)
        self.blocks[side].append(tuple(block))

    def verify(self, side: str) -> None:
        """Check one run on fresh inputs, timed like a block but not kept among `blocks`.

        Raises:
            Disqualified: The contender failed, or its results are wrong.
        """
        seats, draw = self._write(side)
        self.session.samples(seats, 1, self.case.name)
        self._verify(seats, draw)

    def check(self, side: str, case: Case, slack: float) -> None:
        """One run of the timed plan on inputs of another distribution; `case` has the same shapes.
        Results may err by `slack` times what the task allows.

        Raises:
            Disqualified: The contender failed, or its results are wrong.
        """
        self.side, self._written = side, ()
        seat = random.SystemRandom().choice(self._seats[side])
        with self.session.clock.part("inputs"):
            draw = self.checker.draws.fresh(case)
            with self.session.quiet():
                seat.write(draw)
        self.session.run(seat, self.case.name)
        with self.session.clock.part("compare"), self.session.quiet():
            self.checker.refuse_tampering(seat, self.case, Stage.MEASURE)
            self.checker.compare(seat.outputs(), draw, Stage.MEASURE, typical=True, slack=slack)

    def wall_us(self, side: str, count: int) -> float:
        """µs per execution by the judge's own clock, on the side's last inputs if they are there
        still.
        """
        seats = self._written if self.side == side and self._written else self._write(side)[0]
        return self.session.wall_us(seats, count, self.case.name)

    def fresh_us(self, side: str) -> tuple[float, int]:
        """µs per execution on inputs that nothing has seen before, others in each place, and of
        how many. One place's results are checked, and which one is secret.

        Raises:
            Disqualified: The contender failed, or its results are wrong.
        """
        seats = self._ample(side)
        self.side, self._written = side, ()
        with self.session.clock.part("inputs"):
            draws = [self.checker.draws.fresh(self.case) for _ in seats]
            with self.session.quiet():
                for seat, draw in zip(seats, draws, strict=True):
                    seat.write(draw)
        us = self._since_woken(seats)
        with self.session.clock.part("compare"), self.session.quiet():
            for seat in seats:
                self.checker.refuse_tampering(seat, self.case, Stage.MEASURE)
            seat, draw = random.SystemRandom().choice(list(zip(seats, draws, strict=True)))
            self.checker.compare(seat.outputs(), draw, Stage.MEASURE, typical=True)
        return us, len(seats)

    def known_us(self, side: str) -> float:
        """The same once more on the inputs that `fresh_us` has left there."""
        return self._since_woken(self._ample(side))

    def idle_us(self, side: str) -> float:
        """µs from when the launcher goes on until it has done nothing at all, as it was told."""
        with self.session.quiet():
            time.sleep(_CALM_S)
        return self.session.idle_us(self._seats[side][0], self.case.name)

    def calm_us(self, side: str) -> float:
        """What `known_us` is of a launcher that was not stopped before, only left alone until its
        threads sleep.
        """
        seats = self._ample(side)
        time.sleep(_ASLEEP_S)
        return self.session.wall_us(seats, len(seats), self.case.name)

    def long_us(self, side: str) -> float:
        """The same on known inputs for as long as makes the cost of asking and waking small."""
        seats = self._now(side)
        us = statistics.median(self.blocks[side][-1])
        runs = runs_for(_LONG_SPAN_US, us, least=1, most=_MOST_LONG_RUNS)
        return self._since_woken([seats[i % len(seats)] for i in range(runs)])

    def _since_woken(self, seats: Sequence[Seat]) -> float:
        """µs per execution; the clock starts when the launcher, which is stopped, goes on."""
        with self.session.quiet():
            time.sleep(_CALM_S)
        return self.session.fresh_us(seats, self.case.name)

    def _ample(self, side: str) -> list[Seat]:
        """As many places as `fresh_us` needs: drawing inputs takes longer than the runs. On a CPU
        these may be more than a block takes.
        """
        seats = self._seats[side] if self.at_once is None else self._now(side)
        us = statistics.median(self.blocks[side][-1])
        return seats[: runs_for(_FRESH_SPAN_US, us, least=1, most=len(seats))]

    def typical_us(self, side: str) -> float:
        """The median of a few more samples: what is timed at this moment."""
        seats, _ = self._write(side)
        return statistics.median(self.session.samples(seats, 5, self.case.name))

    def now_us(self, side: str) -> float:
        """The slowest of a few more samples: what the device does at this moment."""
        seats, _ = self._write(side)
        return max(self.session.samples(seats, 3, self.case.name))

    def _now(self, side: str) -> list[Seat]:
        """A side's places for its next block.

        On a GPU every block moves on by as many as it takes. On a CPU it takes all of them, unless
        a few are ample by the times of everyone's block before: a slow kernel or a busy host.
        """
        seats, turn = self._seats[side], len(self.blocks[side])
        if self.at_once is not None:
            first = turn * self.at_once
            return [seats[(first + i) % len(seats)] for i in range(self.at_once)]
        if turn == 0:
            return seats
        before = [statistics.median(b[turn - 1]) for b in self.blocks.values() if len(b) >= turn]
        return seats[: _for_span(min(before), len(seats))]

    def _write(self, side: str, draw: Draw | None = None) -> tuple[list[Seat], Draw]:
        """Fresh inputs and poison for a side's seats; whatever the others left there is gone."""
        self.side = side
        seats = self._now(side)
        with self.session.clock.part("inputs"):
            if draw is None:
                draw = self.checker.draws.draw(self.case, other_than=self._last)
            self._last = draw
            with self.session.quiet():
                for seat in seats:
                    seat.write(draw)
        self._written = seats
        return seats, draw

    def _verify(self, seats: Sequence[Seat], draw: Draw) -> None:
        with self.session.clock.part("compare"):
            if any(a.mutates for a in self.checker.task.arguments):
                # Repeated runs have changed their own inputs: what counts is one run on fresh ones.
                with self.session.quiet():
                    for seat in seats:
                        seat.write(draw)
                for seat in seats:
                    self.session.run(seat, self.case.name)
            with self.session.quiet():
                for seat in seats:
                    self.checker.refuse_tampering(seat, self.case, Stage.MEASURE)
                # Which of the placements is compared is as secret as which block is.
                chosen = random.SystemRandom().choice(seats)
                self.checker.compare(chosen.outputs(), draw, Stage.MEASURE, typical=True)
