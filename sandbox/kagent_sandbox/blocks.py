"""Timed blocks: a few samples on inputs that were drawn for this block alone."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from kagent_sandbox import figures
from kagent_sandbox.check import pitch_of, seats_for
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

BLOCK_SAMPLES: Mapping[Kind, int] = {"gpu": 5, "cpu": 10}
"""Samples per block. Fresh inputs cost a CPU more than a sample does."""
_CPU_SPAN_US = 300.0
_MOST_CPU_PLACEMENTS = 48


def placements(task: Task, case: Case, kind: Kind, ceilings: Ceilings) -> int:
    """How many buffer sets each contender rotates over.

    GPU: two, since addresses shift a 28 µs kernel by 0.7 %. CPU: three, for a slope of one run
    against two others, and more for short kernels, so that what is timed outlasts the noise of a
    wake-up.
    """
    if kind == "gpu":
        return 2
    us = figures.attainable_us(task, case, ceilings)
    return max(3, min(_MOST_CPU_PLACEMENTS, 3 * math.ceil(_CPU_SPAN_US / us)))


@dataclass
class Table:
    """Contenders that take turns on one case, each block on inputs of its own seed.

    All sit in the same places, so that none is favoured by its addresses. A context manager.
    """

    session: Session
    checker: Checker
    case: Case
    contenders: Mapping[str, Contender]
    count: int  # placements of each
    blocks: dict[str, list[tuple[float, ...]]] = field(init=False)
    _seats: dict[str, list[Seat]] = field(init=False)
    side: str = field(init=False)  # whose turn it is, or was: who is to blame for a failure
    _last: Draw | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.side = next(iter(self.contenders))

    def __enter__(self) -> Self:
        self.blocks = {side: [] for side in self.contenders}
        self._seats = {}
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
            )
            self.session.prepare(self._seats[side], self.case.name)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            for seats in self._seats.values():
                self.session.forget(seats)

    def sample(self, side: str, samples: int, *, verify: bool = False) -> None:
        """Time one block on fresh inputs and poisoned results; with `verify`, check what it left.

        Raises:
            Disqualified: The contender failed, or its results are wrong.
        """
        draw = self._write(side)
        block = self.session.samples(self._seats[side], samples, self.case.name)
        self.blocks[side].append(tuple(block))
        if verify:
            self._verify(side, draw)

    def wall_us(self, side: str, count: int) -> float:
        """µs per execution by the judge's own clock."""
        self._write(side)
        return self.session.wall_us(self._seats[side], count, self.case.name)

    def unseen(self, side: str, samples: int) -> tuple[float, ...]:
        """A block on inputs that no earlier one had, not kept among `blocks`."""
        self._write(side, self.checker.draws.fresh(self.case))
        return tuple(self.session.samples(self._seats[side], samples, self.case.name))

    def now_us(self, side: str) -> float:
        """The slowest of a few more samples: what the device does at this moment."""
        self._write(side)
        return max(self.session.samples(self._seats[side], 3, self.case.name))

    def _write(self, side: str, draw: Draw | None = None) -> Draw:
        """Fresh inputs and poison for a side's seats; whatever the others left there is gone."""
        self.side = side
        if draw is None:
            draw = self.checker.draws.draw(self.case, other_than=self._last)
        self._last = draw
        with self.session.quiet():
            for seat in self._seats[side]:
                seat.write(draw)
        return draw

    def _verify(self, side: str, draw: Draw) -> None:
        seats = self._seats[side]
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
