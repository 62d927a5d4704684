"""suite.json: what a suite is, and how far each of its problems has come. What is common to all
records of several runs is here, too.

What races found is not in it: it stays in the problems' run folders.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.records import RecordError, from_json, to_json
from kagent_sandbox.errors import RunError, UserError

from kagent.config.settings import Config
from kagent.runs.files import clear_errors, read_regular, write_file
from kagent.suite.problems import Problem, require_inside

RUNS, TASKS = "runs", "tasks"
"""Folders of a suite: a run's folder for each problem, and the tasks made of files."""
FORMAT = 1
_MOST_BYTES = 64 << 20


class ProblemState(StrEnum):
    """State of a problem."""

    WAITING = "waiting"
    BEGUN = "begun"
    """Work on it has begun; a suite that goes on continues there."""
    DONE = "done"
    """The search is over, and a kernel passed all checks."""
    FAILED = "failed"
    """`ProblemProgress.step` failed; `ProblemProgress.reason` says why."""


class FailedStep(StrEnum):
    """The step at which a problem failed."""

    TASK = "task"
    """The problem was read or imported, and its task was checked."""
    SEED = "seed"
    """A kernel to start from was made, found or checked."""
    SEARCH = "search"
    MACHINE = "machine"
    """This machine failed, at whatever step: a suite that goes on tries it again."""


@dataclass(frozen=True, slots=True)
class ProblemProgress:
    """Progress of one problem.

    Attributes:
        state: How far.
        task: Folder of the task that was made of it, below the suite's; "" before, and of tasks.
        digest: Digest of its task; "" before there is one.
        no_seed: Why no seed could be made for that task; "" if there is one.
        run: Name of its run's folder in `runs/`; "" before there is one.
        step: The step that failed; None if none did.
        reason: Why it failed.
        notes: What to know of its result.
        seconds: Working time.
        phases: Seconds of each of its phases, by name: "import", "baselines", "search", ...
        device: The device that it was last worked on, as `--device` takes it; "": the first one.
        alone: Whether the machine failed at it beside others: it is tried alone, after these.
    """

    state: ProblemState = ProblemState.WAITING
    task: str = ""
    digest: str = ""
    no_seed: str = ""
    run: str = ""
    step: FailedStep | None = None
    reason: str = ""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)
    device: str = ""
    alone: bool = False

    def __post_init__(self) -> None:
        require_inside(self.task)
        require_inside(self.run)

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do."""
        return self.state in (ProblemState.DONE, ProblemState.FAILED)


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings that decide the course of all searches, by the names of a run's options."""

    budget: int
    lang: str
    proposer: str
    model: tuple[str, ...]
    max_time: float | None

    @classmethod
    def of(cls, config: Config) -> Settings:
        """Settings of a suite, from a configuration."""
        return cls(config.budget, config.lang, config.proposer, config.model, config.max_time)

    @property
    def options(self) -> Mapping[str, Any]:
        """As `load_config` takes them."""
        return {**asdict(self), "model": ",".join(self.model) or None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Searches as their folder has them, and how far each problem has come.

    Attributes:
        sources: What the problems were found by.
        settings: Settings of the searches.
        problems: The problems, in their order.
        progress: How far each has come, by name.
        version: Of kagent.
        started: Local time, ISO 8601.
    """

    FILE: ClassVar[str]
    """Name of the record's file in its folder."""
    WHAT: ClassVar[str]
    """Kind of such a folder: "suite"."""
    BEGIN: ClassVar[str]
    """The command that makes one."""
    ITEM: ClassVar[str] = "problem"
    """Word for each of its problems: "problem", "task"."""
    FAST: ClassVar[str] = "fast_{}"
    """Head of the share of problems that are so many times as fast."""

    sources: tuple[str, ...]
    settings: Settings
    problems: tuple[Problem, ...]
    version: str
    started: str
    progress: Mapping[str, ProblemProgress] = field(default_factory=dict)
    format: int = FORMAT

    def of(self, problem: Problem) -> ProblemProgress:
        """Progress of a problem."""
        return self.progress.get(problem.name, ProblemProgress())

    def noted(self, problem: Problem, **changes: Any) -> Self:
        """The record with changes to a problem's progress."""
        progress = replace(self.of(problem), **changes)
        return replace(self, progress={**self.progress, problem.name: progress})

    def again(self) -> Self:
        """The record as work goes on: what the machine failed at is not finished."""
        record = self
        for problem in self.problems:
            if self.of(problem).step is FailedStep.MACHINE:
                record = record.noted(problem, state=ProblemState.BEGUN, step=None, reason="")
        return record

    @property
    def left(self) -> tuple[Problem, ...]:
        """Problems that are not finished."""
        return tuple(p for p in self.problems if not self.of(p).finished)

    @property
    def budget_text(self) -> str:
        """Budget of the searches, in words."""
        raise NotImplementedError

    @property
    def device_text(self) -> str:
        """Name of the device, in words, before a race gives it."""
        raise NotImplementedError


R = TypeVar("R", bound=Record)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite(Record):
    """A suite as its folder has it. Problems are in the order in which they are worked on.

    Attributes:
        kind: Kind of device: "gpu" or "cpu".
    """

    FILE = "suite.json"
    WHAT = "suite"
    BEGIN = "kagent suite run"

    kind: Kind

    @property
    def budget_text(self) -> str:
        """'budget 4 a problem, 90 s at most'."""
        limit = self.settings.max_time
        return f"budget {self.settings.budget} a problem" + (
            "" if limit is None else f", {limit:g} s at most"
        )

    @property
    def device_text(self) -> str:
        """'CPU'."""
        return self.kind.upper()


def read_record(folder: Path, kind: type[R]) -> R:
    """The record of a folder.

    Args:
        folder: The folder.
        kind: Class of the record.

    Raises:
        RunError: There is none, it is damaged, or a newer kagent wrote it.
    """
    path = folder / kind.FILE
    try:
        data = json.loads(read_regular(path, _MOST_BYTES))
        version = data.get("format") if isinstance(data, dict) else None
        if isinstance(version, int) and version > FORMAT:
            raise RunError(f"{path}: written by a newer kagent: update kagent to read it")
        return from_json(kind, data)
    except (FileNotFoundError, NotADirectoryError):
        text = f"{folder}: no {kind.WHAT} there (no {kind.FILE}): {kind.BEGIN} begins one"
        raise RunError(text) from None
    except (OSError, ValueError, RecursionError, RecordError, UserError) as e:
        raise RunError(f"{path}: {e}") from None


def write_record(folder: Path, record: Record) -> None:
    """Write a record into its folder.

    Raises:
        RunError: The folder cannot be written.
    """
    with clear_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / record.FILE, json.dumps(to_json(record), indent=1) + "\n")
