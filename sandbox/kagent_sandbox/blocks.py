"""Timed blocks: a few samples on inputs that were drawn for this block alone."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from kagent_sandbox import figures
from kagent_sandbox.check import seats_for
from kagent_sandbox.task import Kind
from kagent_sandbox.verdict import Stage

if TYPE_CHECKING:
    from collections.abc import Sequence

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


def arena_bytes(
    task: Task, case: Case, contenders: Sequence[Contender], count: int, start: int = 0
) -> int:
    """End of the memory that `count` placements of all contenders take from byte `start` on."""
    stop = start
    for contender in contenders:
        plan = contender.plan(case.name)
        _, stop = seats_for(task, case, plan, None, count=count, start=stop)
    return stop


@dataclass
class Table:
    """Contenders seated side by side for one case, each on inputs of its own seed. A context
    manager.
    """

    session: Session
    checker: Checker
    case: Case
    contenders: Mapping[str, Contender]
    count: int  # placements of each
    blocks: dict[str, list[tuple[float, ...]]] = field(init=False)
    _seats: dict[str, list[Seat]] = field(init=False)
    _last: Draw | None = field(init=False, default=None)

    def __enter__(self) -> Self:
        self.blocks = {side: [] for side in self.contenders}
        self._seats = {}
        stop = 0
        for side, contender in self.contenders.items():
            self._seats[side], stop = seats_for(
                self.checker.task,
                self.case,
                contender.plan(self.case.name),
                self.session.arena,
                count=self.count,
                start=stop,
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
        seats = self._seats[side]
        draw = self.checker.draws.draw(self.case, other_than=self._last)
        self._last = draw
        with self.session.quiet():
            for seat in seats:
                seat.write(draw)
        block = self.session.samples(seats, samples, self.case.name)
        self.blocks[side].append(tuple(block))
        if verify:
            self._verify(side, draw)

    def wall_us(self, side: str, count: int) -> float:
        """µs per execution by the judge's own clock."""
        return self.session.wall_us(self._seats[side], count, self.case.name)

    def now_us(self, side: str) -> float:
        """The slowest of a few more samples: what the device does at this moment."""
        return max(self.session.samples(self._seats[side], 3, self.case.name))

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
