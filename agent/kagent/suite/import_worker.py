"""Imports one problem, and looks for a seed: a request in JSON on stdin, the answer on stdout. In a
process of its own: a problem's code may run for ever, take all memory or end the process.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from kagent_sandbox.confine.policy import ask_for
from kagent_sandbox.data.records import from_json
from kagent_sandbox.data.task import load_task
from kagent_sandbox.errors import KagentError, MachineError
from kagent_sandbox.process.parent import end_with_parent

from kagent.authoring.importers.flashinfer.task import import_definition
from kagent.authoring.importers.kernelbench import read_problem
from kagent.authoring.importers.kernelbench_hard.task import import_problem
from kagent.authoring.new_task import make_task
from kagent.authoring.seeds import write_seeds
from kagent.config.settings import load_config
from kagent.suite.problems import Form, Problem
from kagent.tasks import seeds_of


def make(request: dict[str, Any]) -> dict[str, object]:
    """Make the task, and a seed for the kind of device.

    Raises:
        KagentError: The problem cannot become a task, or this machine lacks what is needed.
    """
    ask_for(load_config(isolation=request["isolation"]).isolation)
    folder, notes = _import(from_json(Problem, request["problem"]), Path(request["to"]))
    outcomes = write_seeds(folder, (request["kind"],), jobs=request["jobs"])
    missing = "" if seeds_of(load_task(folder)) else "; ".join(o.reason for o in outcomes)
    return {"folder": str(folder), "notes": notes, "no_seed": missing}


def _import(problem: Problem, to: Path) -> tuple[Path, list[str]]:
    """The task's folder, and what to know of it."""
    path = Path(problem.path)
    match problem.form:
        case Form.KERNELBENCH:
            operation = read_problem(path)
            made = make_task(operation, to / operation.name, seeds=False)
            count = f"{len(made.holes)} wrong result" + "s" * (len(made.holes) > 1)
            return made.folder, [f"{count} would pass: {made.holes[0]}"] if made.holes else []
        case Form.FLASHINFER:
            loads = Path(problem.workloads) if problem.workloads else None
            return import_definition(path, loads, to).folder, []
        case Form.KERNELBENCH_HARD:
            return import_problem(path, to), []
        case Form.TASK:
            raise ValueError("a task needs no import")


def main() -> None:
    """Answer one request."""
    request = json.load(sys.stdin)
    end_with_parent(request["parent"])  # a suite that was killed may begin the import again
    os.nice(request["nice"])
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the problem prints
    try:
        answer = make(request)
    except KagentError as e:
        answer = {"error": str(e), "machine": isinstance(e, MachineError)}
    with answers:
        json.dump(answer, answers)


if __name__ == "__main__":
    main()
