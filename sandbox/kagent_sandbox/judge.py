"""The judge: owns seeds, references, tolerances and the clock, and gives the verdict.

It never runs candidate code, and shares no address space with any: plans are executed by a
launcher over an arena of the judge's. `check` needs no exclusive device, `measure` and `race` do.
"""

from __future__ import annotations

import contextlib
import random
from typing import TYPE_CHECKING, cast

from kagent_sandbox.check import Checker, check_results, pitch_of
from kagent_sandbox.draws import Draws
from kagent_sandbox.errors import DeviceWedged
from kagent_sandbox.judge_wire import key_of
from kagent_sandbox.measure import Meter
from kagent_sandbox.race import Racer
from kagent_sandbox.session import Arenas, Disqualified, Session
from kagent_sandbox.task import draw_hidden
from kagent_sandbox.verdict import CaseError, Passed, Rejected, Stage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kagent_sandbox.build.request import Built
    from kagent_sandbox.figures import Contender
    from kagent_sandbox.launch.base import Backend, Ceilings
    from kagent_sandbox.race_result import Race
    from kagent_sandbox.rivals import Rivals
    from kagent_sandbox.task import Case, Kind, Task

SWEEP_S = 0.5
"""Lane seconds per case that finding the best configuration may take."""


def check_cases(task: Task, kind: Kind, run_seed: int) -> list[Case]:
    """Visible and hidden check cases of a run. A candidate is built for these and `bench_cases`."""
    return [*task.cases(kind).check, *draw_hidden(task, kind, "check", run_seed)]


def bench_cases(task: Task, kind: Kind) -> list[Case]:
    """Visible benchmark cases."""
    return list(task.cases(kind).bench)


def race_cases(task: Task, kind: Kind, run_seed: int) -> list[Case]:
    """Hidden benchmark cases of a run: finalists are built for these before the final race."""
    return draw_hidden(task, kind, "bench", run_seed)


class Judge:
    """Judges candidates of one task on one device."""

    def __init__(
        self,
        task: Task,
        backend: Backend,
        run_seed: int,
        baselines_us: Mapping[str, float] | None = None,
    ) -> None:
        self.task = task
        self.backend = backend
        self.kind = cast("Kind", backend.facts.kind)
        self.check_cases = check_cases(task, self.kind, run_seed)
        self.race_cases = race_cases(task, self.kind, run_seed)
        self.baselines_us = dict(baselines_us or {})
        self._checker = Checker(task, Draws(task, backend.device))
        self._arenas = Arenas(backend)
        self._ceilings: Ceilings | None = None
        self._rng = random.SystemRandom()
        # Starting a launcher costs a GPU's lane half a second: the one that checked a candidate
        # waits for its measurement. On a CPU native code that waits could not be trusted to.
        self._kept: tuple[str, Session] | None = None

    @property
    def ceilings(self) -> Ceilings:
        """What the device attains; measured at first use, then cached."""
        if self._ceilings is None:
            self._ceilings = self.backend.ceilings()
        return self._ceilings

    def check(self, built: Built) -> tuple[CaseError, ...] | Rejected:
        """Run a candidate on all check cases and compare with the reference.

        Raises:
            TaskError: The task's reference.py fails.
            MachineError: The device or the host does.
            KeyError: A case was not built.
        """
        try:
            return tuple(self._check(built))
        except Disqualified as e:
            return e.verdict

    def _check(self, built: Built) -> list[CaseError]:
        self._let_go()
        check_results(self.task, built, self.check_cases)
        nbytes = 2 * pitch_of(built.plans[0, c.name] for c in self.check_cases)
        keep = self.kind == "gpu"
        if keep:  # room for `measure` beside an incumbent of the same size
            roomy = self._meter().arena_bytes(built, self.check_cases, None)
            nbytes = max(nbytes, min(roomy, self._arenas.limit_bytes))
        arena = self._arenas.at_least(nbytes)
        errors: list[CaseError] = []
        with contextlib.ExitStack() as stack:
            session = stack.enter_context(Session(self.backend, arena, built.binaries, Stage.CHECK))
            for case in self.check_cases:
                errors += self._checker.check(session, built, case)
            if keep:
                stack.pop_all()
                self._kept = (key_of(built), session)
        return errors

    def _let_go(self) -> None:
        """End the session that was kept."""
        if self._kept is not None:
            self._kept[1].close()
            self._kept = None

    def _meter(self) -> Meter:
        return Meter(
            task=self.task,
            backend=self.backend,
            checker=self._checker,
            arenas=self._arenas,
            ceilings=self.ceilings,
            baselines_us=self.baselines_us,
            kind=self.kind,
            rng=self._rng,
        )

    def measure(
        self,
        built: Built,
        errors: Sequence[CaseError],
        incumbent: Contender | None = None,
        *,
        sweep_s: float = SWEEP_S,
    ) -> Passed | Rejected:
        """Time a candidate that `check` gave `errors` for, beside the incumbent where there is one.

        Raises:
            TaskError: The task's reference.py fails.
            MachineError: The device or the host does.
            ValueError: A benchmark case has no baseline.
        """
        if self._kept is not None and self._kept[0] != key_of(built):
            self._let_go()
        kept = self._kept[1] if self._kept else None
        try:
            return self._meter().measure(built, errors, self.check_cases, incumbent, sweep_s, kept)
        except Disqualified as e:
            return e.verdict
        finally:
            self._let_go()

    def race(
        self, contenders: Sequence[Contender], *, hidden: bool, rivals: Rivals | None = None
    ) -> Race:
        """Time contenders and baselines side by side in a fresh launcher.

        Raises:
            TaskError: The task's reference.py fails.
            MachineError: The device or the host does.
        """
        self._let_go()
        racer = Racer(
            task=self.task,
            backend=self.backend,
            checker=self._checker,
            arenas=self._arenas,
            ceilings=self.ceilings,
            kind=self.kind,
            rng=self._rng,
        )
        cases = self.race_cases if hidden else bench_cases(self.task, self.kind)
        return racer.race(contenders, cases, rivals)

    def health(self) -> None:
        """Make sure that the device still computes.

        Raises:
            DeviceWedged: It does not.
        """
        if not self.backend.healthy():
            raise DeviceWedged(f"{self.backend.facts.name} does not compute a known result")

    def close(self) -> None:
        """Give memory and processes back."""
        self._let_go()
        self._arenas.close()
        self.backend.close()
