"""A suite's searches: on each device one after the other, or several at once. Whatever one problem
does, the next one follows.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.task import Task
from kagent_sandbox.data.verdict import Rejected
from kagent_sandbox.device.detect import VISIBLE
from kagent_sandbox.errors import KagentError, MachineError, TaskError, UserError
from kagent_sandbox.process.cores import usable_cores
from kagent_sandbox.runtime.text import printable

from kagent.config.devices import kind_of_device
from kagent.config.settings import load_config
from kagent.evolve import session
from kagent.llm.chat import ModelError
from kagent.runs.events import Phase, Stop
from kagent.runs.files import is_inside
from kagent.runs.lineage import Lineage
from kagent.runs.store import read_history
from kagent.suite.importing import ImportedProblem, ImportsAhead, import_problem
from kagent.suite.problems import Form, Problem
from kagent.suite.record import RUNS, TASKS, FailedStep, ProblemState, Suite, write_record
from kagent.suite.workers import Answer, Workers
from kagent.tasks import find_task, seeds_of
from kagent.text import short
from kagent.ui.end_of_run import NO_FINALIST

MACHINE_FAILURES = 2
"""Problems in a row that the machine fails at, and that end the suite: the next would fail, too.
Beside others, as many more as there are others.
"""
MOST_IMPORTS = 4
"""Problems that are imported at once for each one at work on a GPU: it takes about as long."""
CORES_OF_IMPORT = 2
"""Cores of this machine for each of these, which use one for most of the time."""
NICE = 5
"""Nice value of an import beside problems that are timed on a GPU: their host code goes first."""
OVERLAP = 2
"""Cores of each of several problems at once, over its share: half of them wait for the device."""
_WORKER = ("-m", "kagent.suite.worker")
_MOST_REASON = 300  # characters
_IMPORT = "import"
_AFTER_BASELINES = Phase.SEEDS.name.lower()
_NO_MEMORY = re.compile(r"OutOfMemoryError|out of memory", re.IGNORECASE)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Slot:
    """Place of one problem among several at once.

    Attributes:
        device: As `--device` takes it; "" is the first one.
        cores: That its processes run on; empty: all.
    """

    device: str = ""
    cores: frozenset[int] = frozenset()


@dataclass
class SuiteRunner:
    """Works on a suite's problems, and keeps its record.

    Attributes:
        folder: The suite's folder.
        suite: The suite, as it is in the folder.
        options: Options of this session that all runs have: `jobs`, `isolation`.
        import_s: CPU time in seconds that an import may take.
        say: Is told what is being done.
        finished: Is told when a problem is finished.
        devices: As `--device` takes them; none: the first one.
        at_once: Problems of each device that are worked on at once.
    """

    folder: Path
    suite: Suite
    options: Mapping[str, object]
    import_s: float
    say: Say
    finished: Callable[[Problem], None]
    devices: tuple[str, ...] = ()
    at_once: int = 1
    _workers: Workers = field(default_factory=lambda: Workers(_WORKER))
    _lock: threading.RLock = field(default_factory=threading.RLock)  # of the record
    _failures: Counter[str] = field(default_factory=Counter)  # of the machine in a row, by device

    def __post_init__(self) -> None:
        runs = self.folder / RUNS
        self._config = load_config(**self.suite.settings.options, **self.options, runs=runs)

    def run(self) -> None:
        """Work on every problem that is not finished.

        What fails at the machine beside others, perhaps for lack of memory, is tried once more,
        alone on its device.

        Raises:
            KeyboardInterrupt: Ctrl-C; all finished problems are kept, and those in progress go on
                where they were.
            MachineError: This machine failed at several problems in a row.
            ModelError: The model cannot be asked.
            RunError: The suite's folder cannot be written.
        """
        slots = slots_of(self.devices, self.at_once)
        with contextlib.closing(self._imports_ahead(len(slots))) as imports:
            if len(slots) == 1:
                self._work_on(slots, self.suite.left, imports, MACHINE_FAILURES)
                return
            most = MACHINE_FAILURES + self.at_once - 1
            beside = [p for p in self.suite.left if not self.suite.of(p).alone]
            self._work_on(slots, beside, imports, most, beside=True)
            # All of these have failed before: several in a row say nothing about the machine.
            alone = [Slot(device) for device in self.devices or ("",)]
            self._work_on(alone, self.suite.left, imports, math.inf)

    def import_all(self, at_once: int, imported: Callable[[Problem], None]) -> None:
        """Make tasks of all problems that are none yet, and search for nothing.

        Args:
            at_once: Imports side by side.
            imported: Is told when a problem is a task, or has failed to become one.

        Raises:
            KeyboardInterrupt: Ctrl-C; all tasks are kept.
            MachineError: This machine failed at several problems in a row.
            RunError: The suite's folder cannot be written.
        """
        ahead = at_once if at_once > 1 else 0
        left = [p for p in self.suite.left if p.form is not Form.TASK and not self.suite.of(p).task]
        failures = 0
        with contextlib.closing(self._imports(left, ahead, 1)) as imports:
            for problem in left:
                self.say(f"{self._head(problem)}: import")
                try:
                    imports.take(problem)
                    failures = 0
                except KagentError as e:
                    machine = isinstance(e, MachineError)
                    step = FailedStep.MACHINE if machine else FailedStep.TASK
                    self._note(problem, **_failed(step, str(e)))
                    failures = (failures + 1) * machine
                    self._require_machine(failures, MACHINE_FAILURES, str(e))
                imported(problem)

    def _head(self, problem: Problem) -> str:
        """A problem's number and name."""
        number = self.suite.problems.index(problem) + 1
        return f"{number} of {len(self.suite.problems)}, {problem.name}"

    @staticmethod
    def _require_machine(failures: int, most: float, reason: str) -> None:
        """Make sure that a machine has not failed at too many problems in a row.

        Raises:
            MachineError: It has.
        """
        if failures == most:
            raise MachineError(
                f"{most} problems in a row failed on this machine, the last one with: {reason}"
            )

    def _work_on(
        self,
        slots: Sequence[Slot],
        problems: Sequence[Problem],
        imports: ImportsAhead,
        most: float,
        *,
        beside: bool = False,
    ) -> None:
        """Work on problems, one in each slot.

        Args:
            slots: The slots.
            problems: The problems.
            imports: Their imports.
            most: Problems in a row, of one device, that the machine may fail at.
            beside: Whether they are beside each other, and so what fails at the machine is tried
                again.

        Raises:
            MachineError: It has failed at as many.
        """
        self._failures.clear()
        left = list(problems)
        pool = ThreadPoolExecutor(len(slots), "problem")
        try:
            work = [pool.submit(self._work_in, s, left, imports, most, beside) for s in slots]
            for each in as_completed(work):
                each.result()
        except BaseException:
            imports.give_up()
            self._workers.stop(self.say)
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def _work_in(
        self, slot: Slot, left: list[Problem], imports: ImportsAhead, most: float, beside: bool
    ) -> None:
        """Work in one slot until no problem is left for it."""
        if slot.cores:
            os.sched_setaffinity(0, slot.cores)  # of this thread, and of all that it starts
        while (problem := self._next(slot, left)) is not None:
            began, before = time.monotonic(), self.suite.of(problem).seconds
            self._note(problem, state=ProblemState.BEGUN, device=slot.device)
            try:
                found = self._work(problem, slot, imports)
            finally:
                self._note(problem, seconds=before + time.monotonic() - began)
            failed = found.get("step") is FailedStep.MACHINE
            with self._lock:
                if failed and beside:
                    self._note(problem, alone=True)
                    why = f"failed beside others, is tried alone later: {found['reason']}"
                    self.say(f"{self._head(problem)}: {why}")
                else:
                    self._note(problem, **found)
                    self.finished(problem)
                # Memory that others hold says nothing about the machine.
                if not (failed and beside and _NO_MEMORY.search(str(found["reason"]))):
                    self._failures[slot.device] = (self._failures[slot.device] + 1) * failed
                self._require_machine(self._failures[slot.device], most, found.get("reason", ""))

    def _next(self, slot: Slot, left: list[Problem]) -> Problem | None:
        """The next problem for a slot. One whose baselines are timed goes on where that was."""
        with self._lock:
            for problem in left:
                before = self.suite.of(problem)
                timed = _AFTER_BASELINES in before.phases
                if not timed or before.device == slot.device or before.device not in self.devices:
                    left.remove(problem)
                    return problem
        return None

    def _work(self, problem: Problem, slot: Slot, imports: ImportsAhead) -> dict[str, Any]:
        """Fields of the problem's `ProblemProgress` once it is finished."""
        head = self._head(problem)
        clock = _PhaseClock(self.suite.of(problem).phases)
        step = FailedStep.TASK
        try:
            task = find_task(self._task(problem, head, imports, clock))
            self._note(problem, digest=task.digest)
            step = FailedStep.SEED
            if (no_seed := self.suite.of(problem).no_seed) and not seeds_of(task):
                return _failed(step, f"no seed: {no_seed}")
            session.choose_seeds(task, self._config)
            step = FailedStep.SEARCH
            return self._search(problem, task, head, slot, clock)
        except ModelError:
            raise
        except KagentError as e:
            if imports.given_up:
                raise KeyboardInterrupt from None
            if isinstance(e, MachineError):
                step = FailedStep.MACHINE
            elif isinstance(e, TaskError) and step is FailedStep.SEARCH:  # found when it is judged
                step = FailedStep.TASK
            return _failed(step, str(e))
        except Exception as e:  # noqa: BLE001 - a fault of kagent's own costs one problem, too
            return _failed(step, f"{type(e).__name__}: {e}")
        finally:
            clock.end()
            self._note(problem, phases=clock.seconds)

    def _task(self, problem: Problem, head: str, imports: ImportsAhead, clock: _PhaseClock) -> Path:
        """Folder of the problem's task: its own, or one that is made of it.

        Raises:
            UserError: It cannot become a task.
            MachineError: This machine lacks what is needed for that.
        """
        if problem.form is Form.TASK:
            return Path(problem.path)
        if not self.suite.of(problem).task:
            self.say(f"{head}: import")
            clock.begin(_IMPORT)
            imports.take(problem)
        return self.folder / self.suite.of(problem).task

    def _imports_ahead(self, slots: int) -> ImportsAhead:
        """Imports of the problems that are not tasks yet; on a GPU while others are timed."""
        left = [p for p in self.suite.left if p.form is not Form.TASK]
        at_once = 0
        if self.suite.kind == "gpu":
            at_once = min(MOST_IMPORTS * slots, max(1, usable_cores() // CORES_OF_IMPORT))
        return self._imports([p for p in left if not self.suite.of(p).task], at_once, 2)

    def _imports(self, problems: Sequence[Problem], at_once: int, beside: int) -> ImportsAhead:
        """Imports, some at once (0: each at its turn), on one of `beside` parts of the cores."""
        environment = dict[str, str]()
        if self.suite.kind == "gpu":  # they leave the GPU alone: their seeds are interpreted
            threads = max(1, usable_cores() // (beside * max(1, at_once)))
            environment = {VISIBLE: "", "OMP_NUM_THREADS": str(threads)}

        def make(problem: Problem, unwanted: threading.Event) -> ImportedProblem:
            imported = import_problem(
                problem,
                self._task_place(problem),
                self.suite.kind,
                limit_s=self.import_s,
                jobs=max(1, self._config.jobs // max(1, at_once)),
                isolation=self._config.isolation,
                nice=NICE if self.suite.kind == "gpu" and beside > 1 else 0,
                environment=environment,
                unwanted=unwanted,
            )
            place, notes, no_seed = Path(TASKS) / problem.name, imported.notes, imported.no_seed
            self._note(problem, task=str(place), notes=notes, no_seed=no_seed)
            return imported

        return ImportsAhead(make, problems, at_once)

    def _task_place(self, problem: Problem) -> Path:
        """The folder of an imported problem's task. What is there is removed.

        Raises:
            UserError: A link leads out of the suite's folder, which may be somebody else's.
        """
        place = self.folder / TASKS / problem.name
        if not is_inside(place.parent, self.folder):
            raise UserError(f"{place}: a link there leads out of the suite's folder: remove it")
        return place

    def _search(
        self, problem: Problem, task: Task, head: str, slot: Slot, clock: _PhaseClock
    ) -> dict[str, Any]:
        def tell(line: Answer) -> None:
            if "run" in line:
                self._note(problem, run=line["run"])
            if "phase" in line:
                self.say(f"{head}: {line['phase']}")
                clock.begin(Phase(line["phase"]).name.lower())
                self._note(problem, phases=clock.seconds)
            if "lost" in line:
                text = f"{self.suite.of(problem).run} could not go on: {line['lost']}"
                notes = (*self.suite.of(problem).notes, short(printable(text), _MOST_REASON))
                self._note(problem, run="", notes=notes)

        begun = self.suite.of(problem).run
        folder = self.folder / RUNS / begun
        own: dict[str, Any] = {"runs": str(self.folder / RUNS)}
        if not self.suite.settings.model:  # no prompt has use for a profile of each incumbent
            own["profile"] = False
        request = {
            "task": str(task.folder),
            "device": slot.device or None,
            "config": {**self.suite.settings.options, **self.options, **own},
            "run": str(folder) if begun and (folder / "run.json").is_file() else "",
        }
        answer = self._workers.ask(request, tell)
        if "error" in answer:
            return _failed(FailedStep(answer["step"]), str(answer["error"]))
        stop = Stop(answer["stop"])
        if stop is Stop.INTERRUPTED:
            raise KeyboardInterrupt
        history = read_history(self.folder / RUNS / self.suite.of(problem).run)[1]
        race = history.race
        if stop is Stop.NO_SEED:
            return _failed(FailedStep.SEED, _why_no_seed_passed(history.lineage))
        if race is None:
            return _failed(FailedStep.SEARCH, _why_no_race(stop, history.lineage))
        if race.winner is None:
            return _failed(FailedStep.SEARCH, NO_FINALIST)
        return {"state": ProblemState.DONE}

    def _note(self, problem: Problem, **changes: Any) -> None:
        with self._lock:
            self.suite = self.suite.noted(problem, **changes)
            write_record(self.folder, self.suite)


class _PhaseClock:
    """Seconds of each phase of one problem, waits for the device included."""

    def __init__(self, before: Mapping[str, float]) -> None:
        self._seconds = dict(before)
        self._phase = ""
        self._began_s = 0.0

    def begin(self, phase: str) -> None:
        """A phase begins, and so the one before is over."""
        self.end()
        self._phase, self._began_s = phase, time.monotonic()

    def end(self) -> None:
        """The phase in progress is over."""
        if self._phase:
            took_s = time.monotonic() - self._began_s
            self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + took_s
        self._phase = ""

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase: of one in progress those of earlier sessions."""
        begun = {self._phase: 0.0} if self._phase else {}
        return {phase: round(s, 1) for phase, s in (begun | self._seconds).items()}


def slots_of(devices: Sequence[str], at_once: int) -> list[Slot]:
    """Slots of problems at once, those of different devices in turn.

    Each of several has `OVERLAP` shares of the cores, which the next one has a part of: what it
    starts counts these as all there are, and so has no more threads and compilers than they carry.
    """
    places = [device for _ in range(at_once) for device in (devices or ("",))]
    if len(places) == 1:
        return [Slot(places[0])]
    cores = sorted(os.sched_getaffinity(0))
    width = min(len(cores), math.ceil(OVERLAP * usable_cores() / len(places)))
    first = [i * len(cores) // len(places) for i in range(len(places))]
    return [
        Slot(device, frozenset(cores[(at + i) % len(cores)] for i in range(width)))
        for device, at in zip(places, first, strict=True)
    ]


def require_devices(kind: Kind, devices: Sequence[str], at_once: int) -> None:
    """Make sure that problems can be worked on at once on these devices.

    Raises:
        UserError: They cannot.
    """
    twice = [d for d, count in Counter(devices).items() if count > 1]
    if twice:
        raise UserError(f"device {twice[0]} is named twice: name each once")
    if at_once > 1 and kind == "cpu":
        raise UserError(
            f"--at-once {at_once}: on a CPU, a problem beside the one that is timed would disturb "
            "the clock: expected 1 there"
        )
    for device in devices:
        if kind_of_device(device) != kind or (kind == "cpu" and len(devices) > 1):
            raise UserError(
                f"device {device} among {', '.join(devices)}: expected one CPU, or GPUs alone"
            )


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
