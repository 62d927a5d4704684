"""Choice of the configuration of a candidate's tunables for a case: successive halving with a few
samples each, all on the same inputs. The samples choose, and count for nothing else.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kagent_sandbox.data.plan_json import plan_identity
from kagent_sandbox.device.interface import SAMPLE_LIMIT_S
from kagent_sandbox.judge.arena.layout import pitch_of
from kagent_sandbox.judge.arena.session import CandidateRejected
from kagent_sandbox.judge.check.checker import place_plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kagent_sandbox.data.build import Built
    from kagent_sandbox.data.case import Case
    from kagent_sandbox.data.plan import Plan
    from kagent_sandbox.data.task import Task
    from kagent_sandbox.judge.arena.placement import PlanPlacement
    from kagent_sandbox.judge.arena.session import LauncherSession
    from kagent_sandbox.judge.check.inputs import InputSampler, InputSet

FIRST_SAMPLES = 3
MOST_SAMPLES = 12  # per round and configuration
HOPELESS = 3.0
"""The sweep ends after its first round when nothing is within this factor of the incumbent."""
RUN_LIMIT_S = 2.0
"""Seconds after which a configuration counts as hung. The declared one has passed the checks and
may take as long as that of a candidate that declares no others.
"""


@dataclass(frozen=True)
class Sweeper:
    """Ranks configurations case by case."""

    task: Task
    sampler: InputSampler
    cap_s: float

    def rank(
        self,
        session: LauncherSession,
        built: Built,
        case: Case,
        configs: Sequence[int],
        incumbent: Plan | None,
        count: int,
    ) -> tuple[int, ...]:
        """Order configurations by their speed on one case.

        They are timed until one is left or time is up. One that fails is dropped; the declared one
        may not fail.

        Args:
            session: The candidate's stay on the device.
            built: The candidate.
            case: The benchmark case.
            configs: Indices of configurations, the declared one, 0, among them.
            incumbent: The incumbent's plan, for comparison.
            count: Number of placements.

        Raises:
            CandidateRejected: The declared configuration failed.
        """
        began = time.monotonic()
        plans = {i: built.plans[i, case.name] for i in configs}
        race_baselines = [] if incumbent is None else [incumbent]
        pitch = pitch_of([*plans.values(), *race_baselines])

        def placements_of(plan: Plan, prefix: str, owner: str = "") -> list[PlanPlacement]:
            return place_plan(
                self.task,
                case,
                plan,
                session.arena,
                count=count,
                pitch=pitch,
                prefix=prefix,
                owner=owner,
            )

        number = FIRST_SAMPLES
        rival_us: list[float] = []
        for plan in race_baselines:
            placements = placements_of(plan, "rival", "b")
            session.prepare(placements, case.name)
            input_set = self.sampler.draw(case)
            self._write(session, placements, input_set)
            for _ in range(number):
                rival_us.append(session.sample(placements, case.name))
                self._restore(session, placements, input_set)
            session.forget(placements)

        placed = {i: placements_of(plan, f"s{i}") for i, plan in plans.items()}
        input_set = self.sampler.draw(case)
        places: list[tuple[int, ...]] | None = None  # where the inputs lie now
        samples: dict[int, list[float]] = {}
        alive = list(configs)
        while True:
            for i in list(alive):
                late = time.monotonic() - began > self.cap_s
                # Two at least: on a busy machine the first alone can take all of the time.
                if late and i not in samples and len(samples) > 1:
                    alive.remove(i)
                    continue
                wanted = [s.input_places for s in placed[i]]
                if wanted != places:
                    self._write(session, placed[i], input_set)
                    places = wanted
                if not self._time(session, case, placed[i], number, samples, i, input_set):
                    alive.remove(i)
                    for j in samples:
                        session.prepare(placed[j], case.name)
            alive.sort(key=lambda i: statistics.median(samples[i]))
            best = statistics.median(samples[alive[0]])
            hopeless = bool(rival_us) and best > HOPELESS * statistics.median(rival_us)
            late = time.monotonic() - began > self.cap_s
            if len(alive) == 1 or number >= MOST_SAMPLES or late or hopeless:
                break
            alive = alive[: math.ceil(len(alive) / 2)]
            number = min(MOST_SAMPLES, 2 * number)
        session.forget([s for i in samples for s in placed[i]])
        beaten = sorted(
            (i for i in samples if i not in alive), key=lambda i: statistics.median(samples[i])
        )
        return (*alive, *beaten)

    def times(
        self,
        session: LauncherSession,
        built: Built,
        case: Case,
        configs: Sequence[int],
        count: int,
    ) -> dict[int, float]:
        """Median µs of configurations on one case, by a few samples each, in two turns.

        Args:
            session: The candidate's stay on the device.
            built: The candidate.
            case: The benchmark case.
            configs: Indices of configurations, the declared one, 0, first.
            count: Number of placements.

        Returns:
            The configurations that did not fail.

        Raises:
            CandidateRejected: The declared configuration failed.
        """
        plans = {i: built.plans[i, case.name] for i in configs}
        pitch = pitch_of([*plans.values()])
        placed = {
            i: place_plan(
                self.task, case, plan, session.arena, count=count, pitch=pitch, prefix=f"s{i}"
            )
            for i, plan in plans.items()
        }
        input_set = self.sampler.draw(case)
        places: list[tuple[int, ...]] | None = None
        samples: dict[int, list[float]] = {}
        began = time.monotonic()
        for turn in range(2):
            for i in configs if not turn else [*samples]:
                if turn and time.monotonic() - began > self.cap_s:
                    break
                wanted = [s.input_places for s in placed[i]]
                if wanted != places:
                    self._write(session, placed[i], input_set)
                    places = wanted
                if not self._time(session, case, placed[i], FIRST_SAMPLES, samples, i, input_set):
                    for j in samples:
                        session.prepare(placed[j], case.name)
        session.forget([s for i in samples for s in placed[i]])
        return {i: statistics.median(us) for i, us in samples.items()}

    def _time(
        self,
        session: LauncherSession,
        case: Case,
        placements: Sequence[PlanPlacement],
        number: int,
        samples: dict[int, list[float]],
        config: int,
        input_set: InputSet,
    ) -> bool:
        """Add samples of one configuration. False if it failed: the session was restarted."""
        try:
            if config not in samples:
                session.prepare(placements, case.name)
            limit_s = SAMPLE_LIMIT_S if config == 0 else RUN_LIMIT_S
            more: list[float] = []
            for _ in range(number):
                more.append(session.sample(placements, case.name, limit_s=limit_s))
                self._restore(session, placements, input_set)
        except CandidateRejected:
            if config == 0:
                raise
            samples.pop(config, None)
            session.restart()
            return False
        samples.setdefault(config, []).extend(more)
        return True

    def _restore(
        self, session: LauncherSession, placements: Sequence[PlanPlacement], input_set: InputSet
    ) -> None:
        """Write the inputs again where the plan may have changed them."""
        if self.task.mutates:
            self._write(session, placements, input_set)

    def _write(
        self, session: LauncherSession, placements: Sequence[PlanPlacement], input_set: InputSet
    ) -> None:
        """Inputs for all placements. Plans of one candidate have theirs in the same places, nearly
        always, so that this is rarely done twice.
        """
        with session.clock.part("inputs"), session.paused():
            for placement in placements:
                placement.write_inputs(input_set.tensors)


def distinct(built: Built, case: Case) -> list[int]:
    """Configurations that exist for the case, without those that make the same plan as an earlier
    one. The declared one, 0, is the first.
    """
    kept: dict[str, int] = {}
    for i in range(len(built.configs)):
        plan = built.plans.get((i, case.name))
        if plan is not None:
            kept.setdefault(plan_identity(plan), i)
    return list(kept.values())
