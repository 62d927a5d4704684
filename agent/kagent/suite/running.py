"""A suite's searches, one after the other. Whatever one problem does, the next one follows."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kagent_sandbox.data.task import Task
from kagent_sandbox.data.verdict import Rejected
from kagent_sandbox.device.cpu.facts import usable_cores
from kagent_sandbox.device.detect import VISIBLE
from kagent_sandbox.errors import KagentError, MachineError, RunError, TaskError
from kagent_sandbox.runtime.text import printable

from kagent.config.settings import Config
from kagent.evolve import session
from kagent.llm.chat import ModelError
from kagent.runs.events import Event, PhaseBegan, Started, Stop
from kagent.runs.lineage import Lineage
from kagent.suite.importing import ImportedProblem, ImportsAhead, import_problem
from kagent.suite.problems import Form, Problem
from kagent.suite.record import RUNS, TASKS, FailedStep, ProblemState, Suite, write_record
from kagent.tasks import find_task, seeds_of
from kagent.text import short
from kagent.ui.end_of_run import NO_FINALIST

MACHINE_FAILURES = 2
"""Problems in a row that the machine fails at, and that end the suite: the next would fail, too."""
MOST_AHEAD = 4
"""Problems that are imported while one is timed on a GPU: an import takes about as long."""
CORES_OF_IMPORT = 4
"""Cores of this machine for each of these."""
_MOST_REASON = 300  # characters

Say = Callable[[str], None]


@dataclass
class SuiteRunner:
    """Works on a suite's problems, and keeps its record.

    Attributes:
        folder: The suite's folder.
        suite: The suite, as it is in the folder.
        config: Settings of the runs.
        import_s: Most seconds that an import takes.
        say: Is told what is being done.
        finished: Is told when a problem is finished.
    """

    folder: Path
    suite: Suite
    config: Config
    import_s: float
    say: Say
    finished: Callable[[Problem], None]

    def run(self) -> None:
        """Work on every problem that is not finished.

        Raises:
            KeyboardInterrupt: Ctrl-C; all finished problems are kept, and the one in progress goes
                on where it was.
            MachineError: This machine failed at several problems in a row.
            ModelError: The model cannot be asked.
            RunError: The suite's folder cannot be written.
        """
        with contextlib.closing(self._imports_ahead()) as imports:
            self._run(imports)

    def _run(self, imports: ImportsAhead) -> None:
        failures = 0
        for problem in self.suite.left:
            began, before = time.monotonic(), self.suite.of(problem).seconds
            self._note(problem, state=ProblemState.BEGUN)
            try:
                found = self._work(problem, imports)
            finally:
                self._note(problem, seconds=before + time.monotonic() - began)
            self._note(problem, **found)
            self.finished(problem)
            failures = failures + 1 if found.get("step") is FailedStep.MACHINE else 0
            if failures == MACHINE_FAILURES:
                raise MachineError(
                    f"{failures} problems in a row failed on this machine, the last one with: "
                    f"{found['reason']}"
                )

    def _work(self, problem: Problem, imports: ImportsAhead) -> dict[str, Any]:
        """Fields of the problem's `Progress` once it is finished."""
        number = self.suite.problems.index(problem) + 1
        head = f"{number} of {len(self.suite.problems)}, {problem.name}"
        step = FailedStep.TASK
        try:
            task = find_task(self._task(problem, head, imports))
            self._note(problem, digest=task.digest)
            step = FailedStep.SEED
            if (no_seed := self.suite.of(problem).no_seed) and not seeds_of(task):
                return _failed(step, f"no seed: {no_seed}")
            session.choose_seeds(task, self.config)
            step = FailedStep.SEARCH
            return self._search(problem, task, head)
        except ModelError:
            raise
        except KagentError as e:
            if isinstance(e, MachineError):
                step = FailedStep.MACHINE
            elif isinstance(e, TaskError) and step is FailedStep.SEARCH:  # found when it is judged
                step = FailedStep.TASK
            return _failed(step, str(e))
        except Exception as e:  # noqa: BLE001 - a fault of kagent's own costs one problem, too
            return _failed(step, f"{type(e).__name__}: {e}")

    def _task(self, problem: Problem, head: str, imports: ImportsAhead) -> Path:
        """Folder of the problem's task: its own, or one that is made of it.

        Raises:
            UserError: It cannot become a task.
            MachineError: This machine lacks what is needed for that.
        """
        if problem.form is Form.TASK:
            return Path(problem.path)
        if not self.suite.of(problem).task:
            self.say(f"{head}: import")
            imported = imports.take(problem)
            place, notes, no_seed = Path(TASKS) / problem.name, imported.notes, imported.no_seed
            self._note(problem, task=str(place), notes=notes, no_seed=no_seed)
        return self.folder / self.suite.of(problem).task

    def _imports_ahead(self) -> ImportsAhead:
        """Imports of the problems that are not tasks yet."""
        left = [p for p in self.suite.left if p.form is not Form.TASK]
        cores, environment = usable_cores(), {}
        at_once = min(MOST_AHEAD, cores // CORES_OF_IMPORT) if self.suite.kind == "gpu" else 0
        if at_once:  # they leave the GPU to what is timed: their seeds are interpreted
            threads = max(1, cores // (2 * at_once))
            environment = {VISIBLE: "", "OMP_NUM_THREADS": str(threads)}

        def make(problem: Problem, unwanted: threading.Event) -> ImportedProblem:
            return import_problem(
                problem,
                self.folder / TASKS / problem.name,
                self.suite.kind,
                limit_s=self.import_s,
                jobs=self.config.jobs,
                isolation=self.config.isolation,
                environment=environment,
                unwanted=unwanted,
            )

        return ImportsAhead(make, [p for p in left if not self.suite.of(p).task], at_once)

    def _search(self, problem: Problem, task: Task, head: str) -> dict[str, Any]:
        def observe(event: Event) -> None:
            if isinstance(event, Started):
                self._note(problem, run=event.run)
            elif isinstance(event, PhaseBegan):
                self.say(f"{head}: {event.phase}")

        begun = self.suite.of(problem).run
        folder = self.folder / RUNS / begun
        resumed = folder if begun and (folder / "run.json").is_file() else None
        try:
            outcome = session.evolve(str(task.folder), self.config, observe, resumed)
        except RunError as e:
            if resumed is None:
                raise
            text = short(printable(f"{begun} could not go on: {e}"), _MOST_REASON)
            notes = (*self.suite.of(problem).notes, text)
            self._note(problem, run="", notes=notes)
            outcome = session.evolve(str(task.folder), self.config, observe)
        race = outcome.history.race
        if outcome.stop is Stop.INTERRUPTED:
            raise KeyboardInterrupt
        if outcome.stop is Stop.NO_SEED:
            return _failed(FailedStep.SEED, _why_no_seed_passed(outcome.history.lineage))
        if race is None:
            text = _why_no_race(outcome.stop, outcome.history.lineage)
            return _failed(FailedStep.SEARCH, text)
        if race.winner is None:
            return _failed(FailedStep.SEARCH, NO_FINALIST)
        return {"state": ProblemState.DONE}

    def _note(self, problem: Problem, **changes: Any) -> None:
        self.suite = self.suite.noted(problem, **changes)
        write_record(self.folder, self.suite)


def _failed(step: FailedStep, reason: str) -> dict[str, Any]:
    return {
        "state": ProblemState.FAILED,
        "step": step,
        "reason": short(printable(reason), _MOST_REASON),
    }


def _why_no_race(stop: Stop, lineage: Lineage) -> str:
    if stop is Stop.TIME and lineage.incumbent is None:
        return (
            "--max-time ended the search before a kernel was right: it counts from the start, "
            "with baselines and seeds"
        )
    return f"there was no final race; the search ended: {stop}"


def _why_no_seed_passed(lineage: Lineage) -> str:
    """The first seed's verdict, and how many there are."""
    rejected = [(c, c.verdict) for c in lineage if isinstance(c.verdict, Rejected)]
    if not rejected:
        return "no seed passed"
    first, verdict = rejected[0]
    where = f" in case {verdict.case}" if verdict.case else ""
    text = f"{first.proposal.name}: {verdict.status} ({verdict.stage}){where}: {verdict.message}"
    return f"no seed of {len(rejected)} passed; {text}"
