"""The judge: owns seeds, references, tolerances and the clock, and gives the verdict.

It never runs candidate code, and shares no address space with any. A launcher executes plans over
an arena of the judge's. `check` needs no exclusive device; `measure` and `race` do.
"""

from __future__ import annotations

import contextlib
import functools
import random
import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from kagent_sandbox.data.build import Contender, key_of
from kagent_sandbox.data.verdict import CaseError, Examined, Passed, Rejected, Stage, Status
from kagent_sandbox.device import device_memory
from kagent_sandbox.errors import DeviceError, DeviceFull, DeviceWedged
from kagent_sandbox.judge.arena.layout import ALIGN, pitch_of
from kagent_sandbox.judge.arena.phase_timer import PhaseTimer
from kagent_sandbox.judge.arena.scratch import blamed, refuse_scratch
from kagent_sandbox.judge.arena.session import Arenas, CandidateRejected, LauncherSession
from kagent_sandbox.judge.check.cases import bench_cases, check_cases, race_cases
from kagent_sandbox.judge.check.check_inputs import draw_sets, drawn_sets
from kagent_sandbox.judge.check.checker import Checker, check_results
from kagent_sandbox.judge.check.guests import refuse_bad_guests
from kagent_sandbox.judge.check.inputs import InputSampler
from kagent_sandbox.judge.check.time_budget import TimeBudget
from kagent_sandbox.judge.timing.measure import CANDIDATE, INCUMBENT, Meter, promising
from kagent_sandbox.judge.timing.metrics import with_own_memory
from kagent_sandbox.judge.timing.noise import Noise, measure_noise
from kagent_sandbox.judge.timing.race import Racer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kagent_sandbox.data.build import Built
    from kagent_sandbox.data.case import Case
    from kagent_sandbox.data.device import Ceilings
    from kagent_sandbox.data.race import Race
    from kagent_sandbox.data.task import Task
    from kagent_sandbox.device.interface import Arena, Backend
    from kagent_sandbox.judge.timing.race_baselines import RaceBaselines

T = TypeVar("T")

SWEEP_S = 0.5
"""Lane seconds per case that finding the best configuration may take."""
REMEMBERED = 64
"""Checked candidates of which the judge knows what their check took."""


@dataclass
class _Checked:
    """State left of a candidate's check: its cost, and the launcher where those are kept."""

    seconds: float
    session: LauncherSession | None = None

    def let_go(self) -> None:
        """End the launcher, if there is one."""
        if self.session is not None:
            self.session.close()
            self.session = None


def _tried(
    evaluate: Callable[[], T],
    *,
    alone: bool = True,
    blame: Callable[[Exception], Rejected | None] = lambda _: None,
    relieve: Callable[[Exception], bool] = lambda _: False,
) -> T | Rejected:
    """Evaluate; once more in a fresh process where a failure may not be the kernel's, and where
    less memory of the device is enough.

    Args:
        evaluate: Evaluates a candidate.
        alone: Whether nobody else works on the device.
        blame: The verdict on a candidate without which memory would have been enough for the
            judge; None where it would not.
        relieve: Has the judge's own work take less of the device's memory; whether it does.

    Raises:
        TaskError: The judge's own work needs more memory than the device has.
        DeviceError: Twice in a row the machine failed in a way that no kernel can cause.
        DeviceFull: There was no memory left, and others work on the device: `alone` is false.
    """
    last = False
    while True:
        try:
            return evaluate()
        except CandidateRejected as e:
            no_memory = e.blame == "unclear" and e.verdict.status is Status.RESOURCE_LIMIT
            if no_memory and not alone:
                raise DeviceFull(f"a candidate's process: {e}") from e
            if last and e.blame == "machine":
                raise DeviceError(
                    f"twice in a row, in fresh processes: {e}; no kernel can cause that. What is "
                    "recorded is kept: see to the device, then resume the run"
                ) from e
            if last or e.blame == "kernel":
                return e.verdict
            last = True
        except (DeviceFull, RuntimeError) as e:  # torch's are among the latter
            verdict = blamed(e, blame, relieve)
            if verdict is not None:
                return verdict


class Judge:
    """Judges candidates of one task on one device."""

    def __init__(
        self,
        task: Task,
        backend: Backend,
        run_seed: int,
        baselines_us: Mapping[str, float] | None = None,
        *,
        race_s: float = 0.0,
    ) -> None:
        """`race_s`: see `JudgeClient`."""
        self.backend = backend
        self.kind = backend.facts.kind  # whose cases of the task
        self.task = task = task.calibrated(self.kind)
        self.check_cases = check_cases(task, self.kind, run_seed)
        self.race_cases = race_cases(task, self.kind, run_seed)
        self.baselines_us = dict(baselines_us or {})
        sampler = InputSampler(task, backend.device, backend.traits.inputs)
        self._checker = Checker(task, sampler, backend.traits.alignment_bytes % ALIGN)
        self._arenas = Arenas(backend)
        self.alone = True  # nobody else works on the device during this request
        self._ceilings: Ceilings | None = None
        self._noise: Noise | None = None
        self._watch = backend.watch()
        self._rng = random.SystemRandom()
        # Where launchers are kept, those that checked a candidate wait for its measurement, which
        # is not always the next one: checks come in any order.
        self._checked: OrderedDict[str, _Checked] = OrderedDict()
        goes_on = backend.traits.schedule.further is not None  # as searches do there
        self._race_s = race_s if goes_on else 0.0
        kept, memory = backend.traits.kept_launchers, backend.facts.memory_bytes
        self._most_kept = kept.of(memory)
        self._most_kept_bytes = int(kept.share * memory)

    @property
    def ceilings(self) -> Ceilings:
        """Ceilings of the device; measured at first use, then cached."""
        if self._ceilings is None:
            self._ceilings = self.backend.ceilings()
        return self._ceilings

    def find_noise(self) -> Noise:
        """Run the A/A test once: apparent ratio of a kernel timed against itself. Intervals are
        widened by it from then on.
        """
        if self._noise is None:
            self._noise = measure_noise(self.backend)
        return self._noise

    def check(self, built: Built) -> tuple[CaseError, ...] | Rejected:
        """Run a candidate on all check cases and compare with the reference.

        Args:
            built: The candidate's plans and binaries.

        Returns:
            An error per case and result, or the rejection.

        Raises:
            TaskError: The task's reference.py fails.
            MachineError: The device or the host does.
            KeyError: A case was not built.
        """
        blame = self._blame(Stage.CHECK, built, lambda b: self._checked_bytes(b, self.check_cases))
        return self._tried(lambda: tuple(self._check(built)), blame)

    def examine(self, built: Built, *, bench_shapes: bool) -> Examined:
        """Check a candidate in every case, also after one that fails.

        Args:
            built: The candidate's plans and binaries.
            bench_shapes: Whether the benchmark cases and the hidden ones of the final race are
                checked, too. The candidate was built for them.

        Raises:
            TaskError: The task's reference.py fails.
            MachineError: The device or the host does.
            KeyError: A case was not built.
        """
        more = [*bench_cases(self.task, self.kind), *self.race_cases] if bench_shapes else []
        found = self.check(built)
        if isinstance(found, Rejected) and (found.case is None or found.status is Status.TIMEOUT):
            return Examined((), (found,))  # nothing of one case, or every case would take as long
        errors: list[CaseError] = [] if isinstance(found, Rejected) else [*found]
        failed: list[Rejected] = []
        for case in (*self.check_cases, *more) if isinstance(found, Rejected) else more:
            blame = self._blame(
                Stage.CHECK, built, functools.partial(self._checked_bytes, cases=[case])
            )
            check = functools.partial(self._check_alone, built, case)
            each = self._tried(check, blame)
            if not isinstance(each, Rejected):
                errors += each
                continue
            failed.append(each)
            if each.status is Status.TIMEOUT:
                break
        # It may fail on some draws only, or on no case in particular.
        if isinstance(found, Rejected) and found.case not in {f.case for f in failed}:
            failed.insert(0, found)
            errors = [e for e in errors if e.case != found.case]
        return Examined(tuple(errors), tuple(failed))

    def _check_alone(self, built: Built, case: Case) -> list[CaseError]:
        """Check one case in a launcher of its own: one that failed leaves nothing behind."""
        check_results(self.task, built, [case])
        self._let_go()
        arena = self._arena(self._checked_bytes(built, [case]))
        with LauncherSession(
            self.backend, arena, built.binaries, Stage.CHECK, timed=False
        ) as session:
            sets = draw_sets(self._checker.sampler, case)
            return self._checker.check(session, built, case, sets)

    def _tried(
        self, evaluate: Callable[[], T], blame: Callable[[Exception], Rejected | None]
    ) -> T | Rejected:
        """See `_tried`. Whole references are computed on the host where the device lacks memory."""
        return _tried(evaluate, alone=self.alone, blame=blame, relieve=self._relieve)

    def _relieve(self, error: Exception) -> bool:
        return self.alone and self._checker.sampler.compute_on_host(error)

    def _blame(
        self, stage: Stage, built: Built, arena_bytes: Callable[[Built], int]
    ) -> Callable[[Exception], Rejected | None]:
        """See `refuse_scratch`: what `_tried` asks where the judge's own work fails."""

        def blame(error: Exception) -> Rejected | None:
            if not (self.alone and device_memory.lacks_memory(error)):
                return None
            use = device_memory.memory_use(self.backend.device, self.arena_bytes)
            return refuse_scratch(error, use, built, arena_bytes, stage)

        return blame

    def _checked_bytes(self, built: Built, cases: Sequence[Case]) -> int:
        """Bytes of an arena in which each of these cases can be checked."""
        plans = [built.plans[0, c.name] for c in cases]
        return 2 * pitch_of(plans, beyond=self._checker.beyond)

    def _check(self, built: Built) -> list[CaseError]:
        began = time.perf_counter()
        key = key_of(built)
        self._forget(key)
        check_results(self.task, built, self.check_cases)
        nbytes = self._checked_bytes(built, self.check_cases)
        if self._most_kept:  # room for `measure` beside an incumbent of the same size
            roomy = self._meter().arena_bytes(built, self.check_cases, None)
            nbytes = max(nbytes, roomy if roomy <= self._most_kept_bytes else 0)
        arena = self._arena(nbytes)
        errors: list[CaseError] = []
        budget = self._time_budget(self.check_cases, Stage.CHECK)
        with contextlib.ExitStack() as stack:
            session = stack.enter_context(
                LauncherSession(
                    self.backend,
                    arena,
                    built.binaries,
                    Stage.CHECK,
                    timed=bool(self._most_kept),
                )
            )
            with drawn_sets(self._checker.sampler, self.check_cases) as drawn:
                for case, sets in zip(self.check_cases, drawn, strict=True):
                    errors += self._checker.check(session, built, case, sets, budget=budget)
            self._checker.reject_decoys(session, built, self.check_cases)
            if self._most_kept:
                stack.pop_all()
        self._refuse_bad_guests(Contender("", built, {}), self.check_cases, budget)
        self._checked[key] = _Checked(
            time.perf_counter() - began, session if self._most_kept else None
        )
        self._trim()
        return errors

    def _arena(self, nbytes: int) -> Arena:
        """An arena of that size; launchers that are kept do not outlive the one they have mapped.

        Raises:
            CandidateRejected: More than the device can spare.
        """
        if not self._arenas.fits(nbytes):
            self._let_go()
        return self._arenas.at_least(nbytes)

    def _forget(self, key: str) -> _Checked:
        """Take what is left of a candidate's check out of the books."""
        return self._checked.pop(key, None) or _Checked(0.0)

    def _trim(self) -> None:
        """Keep what the newest checks have left."""
        while len(self._checked) > REMEMBERED:
            self._checked.popitem(last=False)[1].let_go()
        kept = [c for c in self._checked.values() if c.session is not None]
        for checked in kept[: max(0, len(kept) - self._most_kept)]:
            checked.let_go()

    def _let_go(self) -> None:
        """End all launchers that were kept."""
        for checked in self._checked.values():
            checked.let_go()

    def _meter(self) -> Meter:
        return Meter(
            task=self.task,
            backend=self.backend,
            checker=self._checker,
            ceilings=self.ceilings,
            baselines_us=self.baselines_us,
            kind=self.kind,
            rng=self._rng,
            noise=self._noise or Noise(),
            watch=self._watch,
        )

    def sweep(self, built: Built, sweep_s: float) -> Rejected | tuple[Mapping[str, float], ...]:
        """Time configurations that nobody has checked, with a few samples each.

        Args:
            built: The candidate, for the benchmark cases at least. It has passed `check` in its
                declared configuration, the first.
            sweep_s: Seconds on the device per case, beyond the first samples of each.

        Returns:
            Median µs by case of each configuration, a case missing where it failed; the rejection
            where the declared one failed.

        Raises:
            MachineError: The device or the host fails.
        """

        def timed() -> tuple[Mapping[str, float], ...]:
            meter = self._meter()
            arena = self._arena(meter.arena_bytes(built, (), None))
            with LauncherSession(self.backend, arena, built.binaries, Stage.MEASURE) as session:
                return meter.sweep(session, built, sweep_s)

        def arena_bytes(built: Built) -> int:
            return self._meter().arena_bytes(built, (), None)

        return self._tried(timed, self._blame(Stage.MEASURE, built, arena_bytes))

    def measure(
        self,
        built: Built,
        errors: Sequence[CaseError],
        incumbent: Contender | None = None,
        *,
        sweep_s: float = SWEEP_S,
    ) -> Passed | Rejected:
        """Time a candidate on all benchmark cases, beside the incumbent where there is one.

        Args:
            built: The candidate.
            errors: The result of `check` for it.
            incumbent: The best candidate so far.
            sweep_s: Seconds on the device per case to find the best configuration.

        Raises:
            TaskError: The task's reference.py fails.
            MachineError: The device or the host does.
            ValueError: A benchmark case has no baseline.
        """
        checked = self._forget(key_of(built))
        clock = PhaseTimer()

        def timed() -> Passed:
            with clock.part("other"):
                return self._measure(built, errors, incumbent, sweep_s, checked, clock)

        def arena_bytes(built: Built) -> int:  # the incumbent was judged in its own
            return self._meter().arena_bytes(built, self.check_cases, None)

        try:
            passed = self._tried(timed, self._blame(Stage.MEASURE, built, arena_bytes))
        finally:
            checked.let_go()
        if isinstance(passed, Rejected):
            return passed
        lane = {"check": checked.seconds, **clock.seconds}
        return replace(passed, lane_s=sum(lane.values()), lane=lane)

    def _measure(
        self,
        built: Built,
        errors: Sequence[CaseError],
        incumbent: Contender | None,
        sweep_s: float,
        checked: _Checked,
        clock: PhaseTimer,
    ) -> Passed:
        meter = self._meter()
        check_results(self.task, built, bench_cases(self.task, self.kind))
        nbytes = meter.arena_bytes(built, self.check_cases, incumbent)
        if not self._arenas.fits(nbytes):
            checked.let_go()  # it has mapped an arena that is too small
        arena = self._arena(nbytes)
        theirs = incumbent.built.binaries if incumbent else {}
        apart = {INCUMBENT: theirs} if incumbent and self.backend.traits.native else {}
        binaries = built.binaries if apart else {**theirs, **built.binaries}
        if checked.session is not None:
            session = checked.session.resume(binaries, Stage.MEASURE, clock)
        else:
            session = LauncherSession(
                self.backend,
                arena,
                binaries,
                Stage.MEASURE,
                clock=clock,
                apart=apart,
                rest=CANDIDATE if apart else None,
            )
        with session:
            passed = meter.measure(session, built, errors, self.check_cases, incumbent, sweep_s)
        if promising(passed):
            choice = {t.case: t.config for t in passed.timings}
            with clock.part("guest"):
                cases = bench_cases(self.task, self.kind)
                budget = self._time_budget(cases, Stage.MEASURE)
                own_bytes = self._refuse_bad_guests(Contender("", built, choice), cases, budget)
            passed = replace(passed, timings=with_own_memory(passed.timings, own_bytes))
        return passed

    def _time_budget(self, cases: Sequence[Case], stage: Stage) -> TimeBudget:
        """A full budget for the executions of these cases."""
        sampler = self._checker.sampler
        return TimeBudget(lambda: sum(map(sampler.eager_s, cases)), stage)

    def _refuse_bad_guests(
        self, contender: Contender, cases: Sequence[Case], budget: TimeBudget
    ) -> Mapping[str, int]:
        """See `guests.refuse_bad_guests`."""
        draws = self._checker.sampler
        return refuse_bad_guests(
            self.task, self.backend, self._arenas, draws, contender, cases, budget
        )

    def race(
        self,
        contenders: Sequence[Contender],
        *,
        hidden: bool,
        race_baselines: RaceBaselines | None = None,
    ) -> Race:
        """Time contenders and baselines side by side in a fresh launcher.

        Args:
            contenders: The candidates.
            hidden: Whether the cases are the hidden ones of the final race.
            race_baselines: Source of baselines; None for a race without them.

        Raises:
            TaskError: The task's reference.py fails.
            MachineError: The device or the host does.
        """
        self._let_go()
        clock = PhaseTimer()
        racer = Racer(
            task=self.task,
            backend=self.backend,
            checker=self._checker,
            arenas=self._arenas,
            ceilings=self.ceilings,
            kind=self.kind,
            rng=self._rng,
            clock=clock,
            noise=self._noise or Noise(),
            watch=self._watch,
            seconds=self._race_s,
        )
        cases = self.race_cases if hidden else bench_cases(self.task, self.kind)
        with clock.part("other"):
            race = racer.race(contenders, cases, race_baselines)
        return replace(race, seconds=clock.seconds)

    def health(self) -> None:
        """Make sure that the device still computes.

        Raises:
            DeviceWedged: It does not.
        """
        if not self.backend.healthy():
            raise DeviceWedged(f"{self.backend.facts.name} does not compute a known result")

    def begin_request(self, *, alone: bool) -> None:
        """A request begins, alone on the device or beside others."""
        self.alone = alone
        self._checker.sampler.on_host = False
        device_memory.begin_request(self.backend.device)

    def make_room(self) -> None:
        """Give back the memory that others need in their turns, unless it is little."""
        if self._arenas.nbytes > self._most_kept_bytes:
            self._let_go()
            self._arenas.close()
        self._checker.sampler.make_room()
        self.backend.free_unused()

    def give_back(self) -> None:
        """Give back all memory of the device that can be had again: others work on it next."""
        self._let_go()
        self._arenas.close()
        self._checker.sampler.make_room()
        self.backend.free_unused(shared=True)

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arenas that there are."""
        return self._arenas.nbytes

    def close(self) -> None:
        """Give memory and processes back."""
        self._let_go()
        self._arenas.close()
        self.backend.close()
