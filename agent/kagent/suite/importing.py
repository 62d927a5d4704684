"""A problem's task, made in a process of its own with a time limit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.records import to_json
from kagent_sandbox.errors import MachineError, UserError
from kagent_sandbox.process.log_tail import log_tail
from kagent_sandbox.process.process_tree import kill_tree

from kagent.runs.files import clear_errors
from kagent.suite.problems import Problem

_WORKER = ("-m", "kagent.suite.import_worker")
"""Bytes of a process's output that an error repeats."""


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
    problem: Problem, to: Path, kind: Kind, *, limit_s: float, jobs: int, isolation: str
) -> ImportedProblem:
    """Make a task of a problem, and a seed for it.

    Args:
        problem: The problem.
        to: The task's folder; what is there already is removed.
        kind: Kind of device that a seed is for.
        limit_s: Most seconds that it may take.
        jobs: Builds at once.
        isolation: Tier of isolation for builds.

    Raises:
        UserError: It cannot become a task; the text says why.
        MachineError: This machine lacks what is needed.
    """
    place = to.with_name(f".{to.name}")  # the import gives the folder a name of its own
    with clear_errors(to):
        for folder in (to, place):
            shutil.rmtree(folder, ignore_errors=True)
        place.mkdir(parents=True)
    request = {
        "parent": os.getpid(),
        "problem": to_json(problem),
        "to": str(place),
        "kind": kind,
        "jobs": jobs,
        "isolation": isolation,
    }
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, *_WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,  # a Ctrl-C at the terminal is the suite's to handle
        )
        try:
            answer = process.communicate(json.dumps(request).encode(), timeout=limit_s)[0]
        except BaseException as e:
            kill_tree(process.pid)
            process.communicate()
            if not isinstance(e, subprocess.TimeoutExpired):
                raise
            text = f"the import took longer than {limit_s:g} s: --import-time gives it more"
            raise UserError(text) from None
        tail = log_tail(log)
    try:
        found = json.loads(answer)
    except ValueError:
        text = f"the process that imports ended with status {process.returncode}: {tail}"
        raise UserError(text) from None
    if "error" in found:
        raise (MachineError if found["machine"] else UserError)(found["error"])
    with clear_errors(to):
        Path(found["folder"]).rename(to)
        place.rmdir()
    return ImportedProblem(tuple(found["notes"]), found["no_seed"])
