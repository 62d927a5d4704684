"""Which configuration of a candidate's tunables suits a case: successive halving, a few samples
each.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kagent_sandbox.check import seats_for
from kagent_sandbox.plan_json import plan_identity
from kagent_sandbox.session import Disqualified

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kagent_sandbox.build.request import Built
    from kagent_sandbox.draws import Draws
    from kagent_sandbox.plan import Plan
    from kagent_sandbox.seat import Seat
    from kagent_sandbox.session import Session
    from kagent_sandbox.task import Case, Task

FIRST_SAMPLES = 3
MOST_SAMPLES = 12  # per round and configuration
HOPELESS = 3.0
"""The sweep ends after its first round when nothing is within this factor of the incumbent."""
RUN_LIMIT_S = 2.0  # a configuration that hangs costs the lane no more


@dataclass(frozen=True)
class Ranking:
    """Configurations of one case, best first, with their samples in µs; and the incumbent's."""

    order: tuple[int, ...]
    samples: Mapping[int, Sequence[float]]
    incumbent: Sequence[float]


@dataclass(frozen=True)
class Sweeper:
    """Ranks configurations case by case."""

    task: Task
    draws: Draws
    cap_s: float

    def rank(
        self,
        session: Session,
        built: Built,
        case: Case,
        configs: Sequence[int],
        incumbent: Plan | None,
        count: int,
    ) -> Ranking:
        """Time `configs` (the declared one, 0, among them) on one case until one is left or time
        is up.

        Configurations with the same plan are timed once. One that fails is dropped; the declared
        one may not.

        Raises:
            Disqualified: The declared configuration failed.
        """
        began = time.monotonic()
        configs = _distinct(built, case, configs)
        seats: dict[int, list[Seat]] = {}
        region = 0
        arena = session.arena
        for i in configs:
            plan = built.plans[i, case.name]
            seats[i], stop = seats_for(self.task, case, plan, arena, count=count, prefix=f"s{i}")
            region = max(region, stop)
        rival: list[Seat] = []
        if incumbent is not None:
            rival, _ = seats_for(
                self.task, case, incumbent, arena, count=count, start=region, prefix="si"
            )
        session.prepare(rival, case.name)
        self._write(session, case, [s for i in configs for s in seats[i]], rival)

        samples: dict[int, list[float]] = {}
        number = FIRST_SAMPLES
        alive = list(configs)
        rival_us = session.samples(rival, number, case.name) if rival else []
        while True:
            for i in list(alive):
                late = time.monotonic() - began > self.cap_s
                if late and i not in samples and samples:
                    alive.remove(i)
                elif not self._time(session, case, seats[i], number, samples, i):
                    alive.remove(i)
                    for kept in [*(seats[j] for j in samples), rival]:
                        session.prepare(kept, case.name)
            alive.sort(key=lambda i: statistics.median(samples[i]))
            best = statistics.median(samples[alive[0]])
            hopeless = bool(rival_us) and best > HOPELESS * statistics.median(rival_us)
            late = time.monotonic() - began > self.cap_s
            if len(alive) == 1 or number >= MOST_SAMPLES or late or hopeless:
                break
            alive = alive[: math.ceil(len(alive) / 2)]
            number = min(MOST_SAMPLES, 2 * number)
        session.forget([s for i in samples for s in seats[i]] + rival)
        beaten = sorted(
            (i for i in samples if i not in alive), key=lambda i: statistics.median(samples[i])
        )
        return Ranking((*alive, *beaten), samples, rival_us)

    def _time(
        self,
        session: Session,
        case: Case,
        seats: Sequence[Seat],
        number: int,
        samples: dict[int, list[float]],
        config: int,
    ) -> bool:
        """Add samples of one configuration. False if it failed: the session was restarted."""
        try:
            if config not in samples:
                session.prepare(seats, case.name)
            more = session.samples(seats, number, case.name, limit_s=RUN_LIMIT_S)
        except Disqualified:
            if config == 0:
                raise
            samples.pop(config, None)
            session.restart()
            return False
        samples.setdefault(config, []).extend(more)
        return True

    def _write(
        self, session: Session, case: Case, seats: Sequence[Seat], rival: Sequence[Seat]
    ) -> None:
        """Inputs for all seats; plans of one candidate have theirs in the same place, nearly
        always.
        """
        draw = self.draws.draw(case)
        with session.quiet():
            seen = set()
            for seat in seats:
                places = seat.input_places
                if places not in seen:
                    seat.write_inputs(draw)
                seen.add(places)
            for seat in rival:
                seat.write_inputs(self.draws.draw(case, other_than=draw))


def _distinct(built: Built, case: Case, configs: Sequence[int]) -> list[int]:
    """Configurations that exist for the case, without those that make the same plan as an earlier
    one.
    """
    kept: dict[str, int] = {}
    for i in configs:
        plan = built.plans.get((i, case.name))
        if plan is not None:
            kept.setdefault(plan_identity(plan), i)
    return list(kept.values())
