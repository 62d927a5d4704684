"""How fast is a candidate? Configurations first, then ABBA blocks beside the incumbent."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kagent_sandbox import figures, timing
from kagent_sandbox.blocks import PACES, Table, placements
from kagent_sandbox.check import Checker, pitch_of
from kagent_sandbox.errors import MachineError
from kagent_sandbox.figures import Contender
from kagent_sandbox.kept import refuse_if_noise_is_its_own, refuse_kept_results
from kagent_sandbox.session import Disqualified, Session
from kagent_sandbox.sweep import Sweeper, distinct
from kagent_sandbox.verdict import (
    CaseError,
    Comparison,
    Passed,
    Rejected,
    Stage,
    Status,
)

if TYPE_CHECKING:
    import random

    from kagent_sandbox.build.request import Built
    from kagent_sandbox.launch.base import Backend, Ceilings
    from kagent_sandbox.task import Case, Kind, Task

SURE_SAMPLES = 10  # a side
LOSING_RATIO = 0.985
"""A candidate whose interval ends below this is not timed further, ..."""
FAR_RATIO = 0.9
"""... and below this while a side has fewer samples than `SURE_SAMPLES`."""
WALL_BUDGET_US = 3000.0
ALARM_TRIES = 8
"""How often a suspicion is looked into before it is believed: a busy host raises some."""
ALARM_PAUSE_S = 0.02
NOISE_TRIES = 3


def _is_noise(blocks: Sequence[Sequence[float]]) -> bool:
    return timing.is_noise([us for block in blocks for us in block])


@dataclass(frozen=True)
class Meter:
    """Times candidates of one task on one device."""

    task: Task
    backend: Backend
    checker: Checker
    ceilings: Ceilings
    baselines_us: Mapping[str, float]
    kind: Kind
    rng: random.Random

    def measure(
        self,
        session: Session,
        built: Built,
        errors: Sequence[CaseError],
        check_cases: Sequence[Case],
        incumbent: Contender | None,
        sweep_s: float,
    ) -> Passed:
        """Time a checked candidate on every benchmark case, in a session that has its binaries
        and the incumbent's, over an arena of at least `arena_bytes`.

        Raises:
            Disqualified: It failed, was wrong in a timed block, or its times cannot be true.
        """
        cases = self.task.cases(self.kind).bench
        choice = self._sweep(session, built, cases, check_cases, incumbent, sweep_s)
        candidate = Contender("candidate", built, choice)
        sides = {"a": candidate} | ({"b": incumbent} if incumbent else {})
        tables = {c.name: self._table(session, c, sides) for c in cases}
        complete = self._take_turns(session, tables)
        blocks = {name: table.blocks["a"] for name, table in tables.items()}
        passed = self._passed(candidate, errors, cases, blocks)
        versus = None if incumbent is None else self._compare(incumbent.id, tables)
        return replace(passed, versus=versus, screened=not complete)

    def arena_bytes(
        self, built: Built, check_cases: Sequence[Case], incumbent: Contender | None
    ) -> int:
        """Memory for checking a candidate and timing it and the incumbent in turns."""
        bench = self.task.cases(self.kind).bench
        most = 0
        for case in (*bench, *check_cases):
            plans = [p for (_, name), p in built.plans.items() if name == case.name]
            if incumbent is not None and case in bench:
                plans.append(incumbent.plan(case.name))
            most = max(most, self._count(case) * pitch_of(plans))
        return most

    def _count(self, case: Case) -> int:
        return placements(self.task, case, self.kind, self.ceilings)

    def _table(self, session: Session, case: Case, sides: Mapping[str, Contender]) -> Table:
        at_once = PACES[self.kind].seats
        table = Table(session, self.checker, case, sides, self._count(case), at_once)
        table.prepare()
        return table

    # -- configurations --------------------------------------------------------------------------

    def _sweep(
        self,
        session: Session,
        built: Built,
        cases: Sequence[Case],
        check_cases: Sequence[Case],
        incumbent: Contender | None,
        sweep_s: float,
    ) -> dict[str, int]:
        """The fastest configuration of each case that has several; the winners are checked like
        the declared one was.
        """
        sweeper = Sweeper(self.task, self.checker.draws, sweep_s)
        choice: dict[str, int] = {}
        good, bad = {0}, set[int]()
        for case in cases:
            order: Sequence[int] = distinct(built, case)
            if len(order) > 1:
                session.hush()
                plan = incumbent.plan(case.name) if incumbent else None
                count = self._count(case)
                order = sweeper.rank(session, built, case, order, plan, count)
            for config in order:
                if config not in good | bad:
                    right = self._right(session, built, check_cases, config)
                    (good if right else bad).add(config)
                if config in good:
                    choice[case.name] = config
                    break
        return choice

    def _right(
        self, session: Session, built: Built, check_cases: Sequence[Case], config: int
    ) -> bool:
        """Whether a further configuration is right on all check cases that it was built for."""
        try:
            for case in check_cases:
                plan = built.plans.get((config, case.name))
                if plan is not None and plan != built.plans[0, case.name]:
                    self.checker.check(session, built, case, config=config, thorough=False)
        except Disqualified:
            session.restart()
            return False
        return True

    # -- against the incumbent -------------------------------------------------------------------

    def _take_turns(self, session: Session, tables: Mapping[str, Table]) -> bool:
        """Blocks in ABBA order on every case; whether all were timed.

        A candidate that clearly loses is let go early. Of every case one block's results are
        checked; which one is secret.
        """
        pace = PACES[self.kind]
        total = sum(pace.phases)
        alone = all(len(t.contenders) == 1 for t in tables.values())
        order = timing.abba(total).lower()
        secret = {name: self.rng.randrange(total) for name in tables}
        session.hush()
        done = 0
        for pairs in (total,) if alone else pace.phases:
            turns = order[2 * done : 2 * (done + pairs)]
            done += pairs
            for name, table in tables.items():
                for side in turns:
                    if side in table.contenders:
                        checked = side == "a" and len(table.blocks["a"]) == secret[name]
                        table.sample(side, pace.samples, verify=checked)
                if done == total:
                    self._repeat_noise(table, order)
                    self._refuse_suspicion(table)
            if done < total and self._loses(tables):
                for name, table in tables.items():
                    if secret[name] >= done:
                        table.verify("a")
                return False
        return True

    def _repeat_noise(self, table: Table, order: str) -> None:
        """Take all turns of a case once more while its samples are no measurement.

        Raises:
            Disqualified: The candidate's stay so, and the incumbent's beside them do not.
            MachineError: Everybody's stay so.
        """
        for _ in range(NOISE_TRIES):
            if not any(map(_is_noise, table.blocks.values())):
                return
            time.sleep(ALARM_PAUSE_S)  # what disturbed may be over
            for blocks in table.blocks.values():
                blocks.clear()
            secret = self.rng.randrange(order.count("a"))
            for side in order:
                if side in table.contenders:
                    checked = side == "a" and len(table.blocks["a"]) == secret
                    table.sample(side, PACES[self.kind].samples, verify=checked)
        noisy = [side for side, blocks in table.blocks.items() if _is_noise(blocks)]
        if not noisy:
            return
        us = sorted(x for b in table.blocks[noisy[0]] for x in b)
        spread = f"samples of one kernel lie between {us[0]:.1f} and {us[-1]:.1f} µs"
        if noisy == ["a"] and len(table.blocks) > 1:
            text = f"{spread}, while the incumbent's beside them agree"
            raise Disqualified(Rejected(Stage.MEASURE, Status.SUSPECT, text, table.case.name))
        refuse_if_noise_is_its_own(table, "a", self.kind)
        raise MachineError(
            f"{table.case.name} cannot be timed: {spread}. Something else keeps this machine busy: "
            "end it, then go on with the run"
        )

    def _loses(self, tables: Mapping[str, Table]) -> bool:
        """Whether a candidate is slower than the incumbent beyond the doubt that is left."""
        samples = min(sum(map(len, t.blocks["a"])) for t in tables.values())
        limit = FAR_RATIO if samples < SURE_SAMPLES else LOSING_RATIO
        return self._compare("", tables).high < limit

    def _refuse_suspicion(self, table: Table) -> None:
        """Look into a candidate's times on one case right after its last block.

        Raises:
            Disqualified: They cannot be true.
        """
        case, blocks = table.case, table.blocks["a"]
        us = timing.median_interval([x for b in blocks for x in b]).value
        runs = max(3, min(50, int(WALL_BUDGET_US / us)))
        for _ in range(ALARM_TRIES):
            wall_us = table.wall_us("a", runs)
            text = figures.suspicion(
                self.task, case, us, self.backend.facts, self.ceilings, wall_us
            )
            if text is None:
                break
            time.sleep(ALARM_PAUSE_S)  # what disturbed may be over
            us = max(us, table.now_us("a"))
        if text is not None:
            raise Disqualified(Rejected(Stage.MEASURE, Status.SUSPECT, text, case.name))
        refuse_kept_results(table, "a", self.kind)

    def _compare(self, against: str, tables: Mapping[str, Table]) -> Comparison:
        duels = {
            name: timing.Duel(tuple(t.blocks["a"]), tuple(t.blocks["b"]))
            for name, t in tables.items()
        }
        gpu = self.kind == "gpu"
        noise = {n: timing.systematic(statistics.median(d.a[0]), gpu=gpu) for n, d in duels.items()}
        rng = np.random.default_rng(len(duels))
        combined = timing.combine(duels, rng, noise)
        interval = combined.ratio
        return Comparison(
            against, interval.value, interval.low, interval.high, combined.p_faster, combined.cases
        )

    def _passed(
        self,
        candidate: Contender,
        errors: Sequence[CaseError],
        cases: Sequence[Case],
        blocks: Mapping[str, Sequence[Sequence[float]]],
    ) -> Passed:
        timings = [
            figures.case_timing(
                self.task,
                case,
                candidate.plan(case.name),
                [us for b in blocks[case.name] for us in b],
                self.ceilings,
                config=candidate.choice[case.name],
                baseline_us=self.baselines_us.get(case.name),
            )
            for case in cases
        ]
        value, stderr = figures.score(timings)
        plans = [candidate.plan(c.name) for c in cases]
        return Passed(
            timings=tuple(timings),
            errors=tuple(errors),
            score=value,
            score_stderr=stderr,
            configs=candidate.built.configs,
            resources=figures.resources(plans),
        )
