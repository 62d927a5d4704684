"""How fast is a candidate? Sweep, screen, then ABBA blocks beside the incumbent."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kagent_sandbox import figures, timing
from kagent_sandbox.blocks import BLOCK_SAMPLES, Table, placements
from kagent_sandbox.check import Checker, check_results, pitch_of
from kagent_sandbox.figures import Contender
from kagent_sandbox.session import Arenas, Disqualified, Session
from kagent_sandbox.sweep import Sweeper
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
    from kagent_sandbox.sweep import Ranking
    from kagent_sandbox.task import Case, Kind, Task

LEAST_SAMPLES = 30  # a side
SCREEN_RATIO = 1.5
"""A candidate that is slower than the incumbent by more on every case is not timed further."""
LOSING_RATIO = 0.985
"""After the first blocks, a candidate whose interval ends below this is not timed further."""
WALL_BUDGET_US = 3000.0
ALARM_TRIES = 8
"""How often a suspicion is looked into before it is believed: a busy host raises some."""
ALARM_PAUSE_S = 0.02


@dataclass(frozen=True)
class Meter:
    """Times candidates of one task on one device."""

    task: Task
    backend: Backend
    checker: Checker
    arenas: Arenas
    ceilings: Ceilings
    baselines_us: Mapping[str, float]
    kind: Kind
    rng: random.Random

    def measure(
        self,
        built: Built,
        errors: Sequence[CaseError],
        check_cases: Sequence[Case],
        incumbent: Contender | None,
        sweep_s: float,
        kept: Session | None = None,
    ) -> Passed:
        """Time a checked candidate on every benchmark case, in the session `kept` if there is one.

        Raises:
            Disqualified: It failed, was wrong in a timed block, or its times cannot be true.
        """
        began = time.monotonic()
        cases = self.task.cases(self.kind).bench
        check_results(self.task, built, cases)
        nbytes = self.arena_bytes(built, check_cases, incumbent)
        if kept is not None and not self.arenas.fits(nbytes):
            kept.close()
            kept = None
        arena = self.arenas.at_least(nbytes)
        binaries = {**(incumbent.built.binaries if incumbent else {}), **built.binaries}
        session = Session(self.backend, arena, binaries, Stage.MEASURE)
        if kept is not None:
            session = kept.resume(binaries, Stage.MEASURE)
        with session:
            rankings = self._sweep(session, built, cases, check_cases, incumbent, sweep_s)
            choice = {name: r.order[0] for name, r in rankings.items()}
            candidate = Contender("candidate", built, choice)
            if self._hopeless(rankings):
                self._verify_once(session, cases, candidate)
                blocks = {n: [tuple(r.samples[r.order[0]])] for n, r in rankings.items()}
                passed = self._passed(candidate, errors, cases, blocks)
                duels = {
                    n: timing.Duel((tuple(r.samples[r.order[0]]),), (tuple(r.incumbent),))
                    for n, r in rankings.items()
                }
                complete = False
            else:
                complete, blocks, duels = self._duel(session, cases, candidate, incumbent)
                passed = self._passed(candidate, errors, cases, blocks)
        versus = None if incumbent is None else self._compare(incumbent.id, duels)
        lane_s = time.monotonic() - began
        return replace(passed, versus=versus, screened=not complete, lane_s=lane_s)

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

    # -- configurations --------------------------------------------------------------------------

    def _sweep(
        self,
        session: Session,
        built: Built,
        cases: Sequence[Case],
        check_cases: Sequence[Case],
        incumbent: Contender | None,
        sweep_s: float,
    ) -> dict[str, Ranking]:
        """Rank configurations per case; the winners are checked like the declared one was."""
        sweeper = Sweeper(self.task, self.checker.draws, sweep_s)
        configs = list(range(len(built.configs)))
        rankings: dict[str, Ranking] = {}
        for case in cases:
            plan = incumbent.plan(case.name) if incumbent else None
            rankings[case.name] = sweeper.rank(
                session, built, case, configs, plan, self._count(case)
            )
        good, bad = {0}, set[int]()
        for name, ranking in rankings.items():
            for config in ranking.order:
                if config not in good | bad:
                    right = self._right(session, built, check_cases, config)
                    (good if right else bad).add(config)
                if config in good:
                    break
            order = tuple(i for i in ranking.order if i not in bad)
            rankings[name] = replace(ranking, order=order)
        return rankings

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

    def _hopeless(self, rankings: Mapping[str, Ranking]) -> bool:
        return all(
            bool(r.incumbent)
            and statistics.median(r.samples[r.order[0]])
            > SCREEN_RATIO * statistics.median(r.incumbent)
            for r in rankings.values()
        )

    def _verify_once(self, session: Session, cases: Sequence[Case], candidate: Contender) -> None:
        for case in cases:
            sides = {"a": candidate}
            with Table(session, self.checker, case, sides, self._count(case)) as table:
                table.sample("a", 1, verify=True)

    # -- against the incumbent -------------------------------------------------------------------

    def _duel(
        self,
        session: Session,
        cases: Sequence[Case],
        candidate: Contender,
        incumbent: Contender | None,
    ) -> tuple[bool, dict[str, list[tuple[float, ...]]], dict[str, timing.Duel]]:
        """Blocks in ABBA order; after a few, candidates that clearly lose are let go.

        Returns whether all blocks were timed, the candidate's blocks per case, and the duels.
        """
        sides = {"a": candidate} | ({"b": incumbent} if incumbent else {})
        total = -(-LEAST_SAMPLES // BLOCK_SAMPLES[self.kind])
        first = -(-total // 3)
        secret = {c.name: self.rng.randrange(total) for c in cases}
        blocks: dict[str, list[tuple[float, ...]]] = {c.name: [] for c in cases}
        rivals: dict[str, list[tuple[float, ...]]] = {c.name: [] for c in cases}
        done = 0
        for pairs in (first, total - first) if incumbent else (total,):
            last = done + pairs == total
            for case in cases:
                with Table(session, self.checker, case, sides, self._count(case)) as table:
                    self._blocks(table, pairs, secret[case.name] - done)
                    blocks[case.name] += table.blocks["a"]
                    rivals[case.name] += table.blocks.get("b", [])
                    if last:
                        self._refuse_suspicion(table, case, blocks[case.name])
            done += pairs
            duels = {n: timing.Duel(tuple(blocks[n]), tuple(b)) for n, b in rivals.items() if b}
            if not last and self._compare("", duels).high < LOSING_RATIO:
                late = [c for c in cases if secret[c.name] >= done]
                self._verify_once(session, late, candidate)
                return False, blocks, duels
        return True, blocks, duels

    def _blocks(self, table: Table, pairs: int, secret: int) -> None:
        """Time `pairs` blocks of each side; the results of the candidate's block `secret` are
        checked.
        """
        order = timing.abba(pairs).lower()
        seen = 0
        for side in order:
            if side not in table.contenders:
                continue
            table.sample(side, BLOCK_SAMPLES[self.kind], verify=side == "a" and seen == secret)
            seen += side == "a"

    def _refuse_suspicion(
        self, table: Table, case: Case, blocks: Sequence[Sequence[float]]
    ) -> None:
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
        text = text or self._remembers(table, blocks)
        if text is not None:
            raise Disqualified(Rejected(Stage.MEASURE, Status.SUSPECT, text, case.name))

    def _remembers(self, table: Table, blocks: Sequence[Sequence[float]]) -> str | None:
        """Why results seem to be kept, if they still do on inputs that are new beyond doubt."""
        seen = list(blocks)
        for _ in range(ALARM_TRIES):
            if figures.remembers(seen) is None:
                return None
            time.sleep(ALARM_PAUSE_S)
            seen.append(table.unseen("a", 3))
        return figures.remembers(seen)

    def _compare(self, against: str, duels: Mapping[str, timing.Duel]) -> Comparison:
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
