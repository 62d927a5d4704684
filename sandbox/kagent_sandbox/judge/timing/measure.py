"""Measurement of a candidate: configurations first, then ABBA blocks beside the incumbent."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

from kagent_sandbox.data.build import Contender
from kagent_sandbox.data.verdict import CaseError, IncumbentWrong, Passed, Rejected, Stage, Status
from kagent_sandbox.device.interface import LaunchFailed
from kagent_sandbox.judge.arena.layout import pitch_of
from kagent_sandbox.judge.arena.session import CandidateRejected, LauncherSession
from kagent_sandbox.judge.check.checker import Checker
from kagent_sandbox.judge.timing import estimates, metrics
from kagent_sandbox.judge.timing.blocks import TimedBlocks, placement_count
from kagent_sandbox.judge.timing.config_sweep import Sweeper, distinct
from kagent_sandbox.judge.timing.hard_inputs import recheck_on_hard_inputs
from kagent_sandbox.judge.timing.versus_incumbent import IncumbentComparison, UntimeableError

if TYPE_CHECKING:
    import random

    from kagent_sandbox.data.build import Built
    from kagent_sandbox.data.case import Case
    from kagent_sandbox.data.device import Ceilings
    from kagent_sandbox.data.kind import Kind
    from kagent_sandbox.data.task import Task
    from kagent_sandbox.device.interface import Backend
    from kagent_sandbox.device.interference import Watch
    from kagent_sandbox.judge.timing.noise import Noise

CANDIDATE, INCUMBENT = "a", "b"
"""The sides of a comparison, as `IncumbentComparison` and the launchers' owners have them."""
WALL_BUDGET_US = 6000.0
"""Executions by the judge's clock last so long: what a request costs beside them is little."""
LIKELY = 0.5
"""P(faster) from which on timed plans are also checked on hard inputs, and as guests: who is slower
gains nothing by being wrong."""
ALARM_TRIES = 8
"""Times that the judge's clock is asked before a suspicion is believed: a busy host raises some."""
ALARM_PAUSE_S = 0.02


def promising(passed: Passed) -> bool:
    """Whether a candidate may be promoted by its times."""
    if passed.screened:
        return False
    return passed.versus is None or passed.versus.p_faster > LIKELY


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
    noise: Noise
    watch: Watch

    def measure(
        self,
        session: LauncherSession,
        built: Built,
        errors: Sequence[CaseError],
        check_cases: Sequence[Case],
        incumbent: Contender | None,
        sweep_s: float,
    ) -> Passed:
        """Time a checked candidate on every benchmark case.

        Args:
            session: Has the candidate's binaries and the incumbent's, over an arena of at least
                `arena_bytes`.
            built: The candidate.
            errors: Its errors on the check cases.
            check_cases: Check cases, for the configurations of the sweep and for hard inputs.
            incumbent: The best candidate so far; None if there is none.
            sweep_s: Seconds on the device per case to find the best configuration.

        Raises:
            CandidateRejected: It failed, was wrong in a timed block, or its times cannot be true.
            IncumbentWrong: The incumbent failed, or was wrong where it was timed.
        """
        try:
            return self._measure(session, built, errors, check_cases, incumbent, sweep_s)
        except CandidateRejected as e:
            if incumbent is not None and e.owner == INCUMBENT and e.blame == "kernel":
                raise IncumbentWrong(incumbent.id, e.verdict) from e
            raise

    def _measure(
        self,
        session: LauncherSession,
        built: Built,
        errors: Sequence[CaseError],
        check_cases: Sequence[Case],
        incumbent: Contender | None,
        sweep_s: float,
    ) -> Passed:
        """See `measure`."""
        cases = self.task.cases(self.kind).bench
        choice = self._sweep(session, built, cases, check_cases, incumbent, sweep_s)
        candidate = Contender("candidate", built, choice)
        sides = {CANDIDATE: candidate} | ({INCUMBENT: incumbent} if incumbent else {})
        timed_cases = {c.name: self._table(session, c, sides) for c in cases}
        comparison = IncumbentComparison(timed_cases, self.backend.traits, self.rng, self.noise)
        self.watch.begin()
        try:
            complete = self._taken(session, comparison)
        except CandidateRejected as e:
            e.owner = e.owner or comparison.side
            if e.owner == CANDIDATE:
                self._doubt(e)
            raise
        versus = None if incumbent is None else comparison.compare(incumbent.id)
        notes = (*self.watch.notes(), *comparison.notes)
        blocks = {name: timed.blocks[CANDIDATE] for name, timed in timed_cases.items()}
        passed = self._passed(candidate, errors, cases, blocks)
        passed = replace(passed, versus=versus, screened=not complete, notes=notes)
        if promising(passed):
            recheck_on_hard_inputs(timed_cases, CANDIDATE, check_cases, self.rng)
        return passed

    def _taken(self, session: LauncherSession, comparison: IncumbentComparison) -> bool:
        """Take the comparison's blocks; whether all were taken.

        A candidate without an incumbent beside it has the machine's own readings for a witness: it
        is its own doing that its times say nothing where nobody else used the machine.

        Raises:
            CandidateRejected: It is wrong, or its times are no measurement.
            UntimeableError: The machine's doing, as far as can be told.
        """
        try:
            return comparison.take(session, self._refuse_suspicion)
        except UntimeableError as e:
            if not comparison.alone or self.watch.crowded():
                raise
            text = f"{e.spread}, and nothing else kept this machine busy"
            self._unclear(Rejected(Stage.MEASURE, Status.SUSPECT, text, e.case))

    def arena_bytes(
        self, built: Built, check_cases: Sequence[Case], incumbent: Contender | None
    ) -> int:
        """Return the bytes of memory for checking a candidate and timing it beside the incumbent.

        Only the cases that it was built for count, which may be the check cases alone.
        """
        bench = self.task.cases(self.kind).bench
        most = 0
        for case in (*bench, *check_cases):
            plans = [p for (_, name), p in built.plans.items() if name == case.name]
            if incumbent is not None and case in bench:
                plans.append(incumbent.plan(case.name))
            if plans:
                most = max(most, self._count(case) * pitch_of(plans))
        return most

    def _count(self, case: Case) -> int:
        places, memory = self.backend.traits.placements, self.backend.facts.memory_bytes
        return placement_count(self.task, case, places, self.ceilings, memory)

    def _table(
        self, session: LauncherSession, case: Case, sides: Mapping[str, Contender]
    ) -> TimedBlocks:
        count, traits = self._count(case), self.backend.traits
        timed = TimedBlocks(session, self.checker, case, sides, count, traits)
        timed.prepare()
        return timed

    # -- configurations --------------------------------------------------------------------------

    def sweep(
        self, session: LauncherSession, built: Built, sweep_s: float
    ) -> tuple[dict[str, float], ...]:
        """Time configurations that nobody has checked, with a few samples each.

        Args:
            session: Has the binaries of all of them.
            built: The candidate, for the benchmark cases at least.
            sweep_s: Seconds on the device per case, beyond the first samples of each.

        Returns:
            Median µs by case of each configuration; a case is missing where it failed.

        Raises:
            CandidateRejected: The declared configuration failed.
        """
        sweeper = Sweeper(self.task, self.checker.sampler, sweep_s)
        found: tuple[dict[str, float], ...] = tuple({} for _ in built.configs)
        for case in self.task.cases(self.kind).bench:
            configs = [i for i in range(len(found)) if (i, case.name) in built.plans]
            session.wait_until_idle()
            times = sweeper.times(session, built, case, configs, self._count(case))
            for i, us in times.items():
                found[i][case.name] = us
        return found

    def _sweep(
        self,
        session: LauncherSession,
        built: Built,
        cases: Sequence[Case],
        check_cases: Sequence[Case],
        incumbent: Contender | None,
        sweep_s: float,
    ) -> dict[str, int]:
        """The fastest configuration of each case that has several; the winners are checked like
        the declared one was.
        """
        sweeper = Sweeper(self.task, self.checker.sampler, sweep_s)
        choice: dict[str, int] = {}
        good, bad = {0}, set[int]()
        for case in cases:
            order: Sequence[int] = distinct(built, case)
            if len(order) > 1:
                session.wait_until_idle()
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
        self, session: LauncherSession, built: Built, check_cases: Sequence[Case], config: int
    ) -> bool:
        """Whether a further configuration is right on all check cases that it was built for."""
        try:
            for case in check_cases:
                plan = built.plans.get((config, case.name))
                if plan is not None and plan != built.plans[0, case.name]:
                    draws = [self.checker.sampler.draw(case)]
                    self.checker.check(session, built, case, draws, config=config)
        except CandidateRejected:
            session.restart()
            return False
        return True

    # -- what the times say ----------------------------------------------------------------------

    def _doubt(self, found: CandidateRejected) -> None:
        """Times that cannot be true may be the machine's doing where others use most of it.

        Raises:
            CandidateRejected: The same, told as unclear: it is tried once more.
        """
        if found.verdict.status is not Status.SUSPECT or not self.watch.crowded():
            return
        text = f"{found}. Perhaps the machine's doing: {'; '.join(self.watch.notes())}"
        self._unclear(replace(found.verdict, message=text))

    @staticmethod
    def _unclear(verdict: Rejected) -> NoReturn:
        """Refuse a candidate, which is tried once more: it may be the machine's doing."""
        unclear = LaunchFailed(verdict.status, verdict.message, blame="unclear")
        raise CandidateRejected(verdict) from unclear

    def _refuse_suspicion(self, timed: TimedBlocks) -> None:
        """Look into a candidate's times on one case right after its last block.

        Raises:
            CandidateRejected: They cannot be true.
        """
        case, blocks = timed.case, timed.blocks["a"]
        us = estimates.median_interval([x for b in blocks for x in b]).value
        text = self._over_the_limit(timed, us)
        if text is None:
            text = self._disagreement(timed, us)
        if text is not None:
            raise CandidateRejected(Rejected(Stage.MEASURE, Status.SUSPECT, text, case.name))

    def _disagreement(self, timed: TimedBlocks, us: float) -> str | None:
        """Return why a GPU's own times cannot be true, or None.

        Each answer of the judge's clock is at least the time of the executions in it: a busy host,
        or a kernel that wastes time, makes it longer and nothing makes it shorter. So the least of
        a fixed number of answers is the closest bound, and whoever's events tell less than it
        allows is found however often the clock is asked. Once one answer is low enough, the least
        of all is, too: the others are not waited for.
        """
        runs = max(6, min(100, int(WALL_BUDGET_US / us)))
        least_us = math.inf
        for _ in range(ALARM_TRIES):
            wall_us = timed.wall_us("a", runs)
            if wall_us is None:
                return None
            least_us = min(least_us, wall_us)
            if metrics.disagreement(us, least_us) is None:
                return None
            time.sleep(ALARM_PAUSE_S)
        return metrics.disagreement(us, least_us)

    def _over_the_limit(self, timed: TimedBlocks, us: float) -> str | None:
        """Return why a time is below the device's limit, or None.

        The ceilings may be of an hour in which the device was busier: they are measured once more
        before anybody is suspected.
        """
        case, facts, together = timed.case, self.backend.facts, timed.executions
        if metrics.suspicion(self.task, case, us, facts, self.ceilings, together) is None:
            return None
        now = self.backend.ceilings(again=True)
        return metrics.suspicion(self.task, case, us, facts, now, together)

    def _passed(
        self,
        candidate: Contender,
        errors: Sequence[CaseError],
        cases: Sequence[Case],
        blocks: Mapping[str, Sequence[Sequence[float]]],
    ) -> Passed:
        timings = [
            metrics.case_timing(
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
        value, stderr = metrics.score(timings)
        plans = [candidate.plan(c.name) for c in cases]
        return Passed(
            timings=tuple(timings),
            errors=tuple(errors),
            score=value,
            score_stderr=stderr,
            configs=candidate.built.configs,
            resources=metrics.resources(plans),
        )
