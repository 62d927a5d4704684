"""Tasks of problems, made in processes of their own with a limit; on a GPU ahead of time."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.records import to_json
from kagent_sandbox.errors import MachineError, UserError
from kagent_sandbox.process.ask_once import TookTooLong, Unwanted, ask_once

from kagent.runs.files import clear_errors
from kagent.suite.problems import Problem

_WORKER = ("-m", "kagent.suite.import_worker")
"""Module that imports one problem."""


@dataclass(frozen=True, slots=True)
class ImportedProblem:
    """A problem that became a task.

    Attributes:
        notes: What to know of its result.
        no_seed: Why no seed could be made; "" if there is one.
    """

    notes: tuple[str, ...]
    no_seed: str


def import_problem(
    problem: Problem,
    to: Path,
    kind: Kind,
    *,
    limit_s: float,
    jobs: int,
    isolation: str,
    nice: int = 0,
    environment: Mapping[str, str] | None = None,
    unwanted: threading.Event | None = None,
) -> ImportedProblem:
    """Make a task of a problem, and a seed for it.

    Args:
        problem: The problem.
        to: The task's folder; what is there already is removed.
        kind: Kind of device that a seed is for.
        limit_s: CPU time in seconds that it may take with all that it starts, so that a busy
            machine refuses nothing.
        jobs: Builds at once.
        isolation: Tier of isolation for builds.
        nice: Nice value of its process.
        environment: Of its process, beside that of this one.
        unwanted: Set where nobody waits for it any more.

    Raises:
        UserError: It cannot become a task; the text says why. Or it is unwanted.
        MachineError: This machine lacks what is needed.
    """
    place = to.with_name(f".{to.name}")  # the import gives the folder a name of its own
    with clear_errors(to):
        for folder in (to, place):
            shutil.rmtree(folder, ignore_errors=True)
        place.mkdir(parents=True)
    request = {
        "problem": to_json(problem),
        "to": str(place),
        "kind": kind,
        "jobs": jobs,
        "isolation": isolation,
        "nice": nice,
    }
    try:
        answer = ask_once(
            _WORKER,
            request,
            limit_s=limit_s,
            hint="--import-time gives it more",
            environment=environment,
            unwanted=(lambda: False) if unwanted is None else unwanted.is_set,
        )
    except TookTooLong as e:
        raise UserError(f"the import {e}") from None
    except Unwanted:
        raise UserError("the import was given up") from None
    try:
        found = json.loads(answer.out)
    except ValueError:
        text = f"the process that imports ended with status {answer.status}: {answer.tail}"
        raise UserError(text) from None
    if "error" in found:
        raise (MachineError if found["machine"] else UserError)(found["error"])
    with clear_errors(to):
        Path(found["folder"]).rename(to)
        place.rmdir()
    return ImportedProblem(tuple(found["notes"]), found["no_seed"])


class ImportsAhead:
    """Imports of a suite's problems in their order, some of them while earlier ones are timed.

    That is for GPUs alone: on a CPU, an import would take the cores of what is timed.
    """

    def __init__(
        self,
        make: Callable[[Problem, threading.Event], ImportedProblem],
        problems: Sequence[Problem],
        at_once: int,
    ) -> None:
        """Begin with the first ones.

        Args:
            make: Imports a problem, and gives up once the event is set.
            problems: Those that are to be imported.
            at_once: Imports side by side, ahead of their turn; 0: each at its turn.
        """
        self._make = make
        self._unwanted = threading.Event()
        self._threads = ThreadPoolExecutor(at_once, "import") if at_once else None
        self._begun: dict[str, Future[ImportedProblem]] = {}
        if self._threads is not None:
            for each in problems:
                self._begun[each.name] = self._threads.submit(make, each, self._unwanted)

    def take(self, problem: Problem) -> ImportedProblem:
        """Wait for a problem's import. Several threads may. Once more, it is imported again.

        Raises:
            UserError: It cannot become a task.
            MachineError: This machine lacks what is needed.
        """
        begun = self._begun.pop(problem.name, None)
        return self._make(problem, self._unwanted) if begun is None else begun.result()

    @property
    def given_up(self) -> bool:
        """Whether nobody waits for an import any more."""
        return self._unwanted.is_set()

    def give_up(self) -> None:
        """Have all imports end; whoever waits for one gets an error."""
        self._unwanted.set()

    def close(self) -> None:
        """Give up what was begun and not taken."""
        self.give_up()
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
