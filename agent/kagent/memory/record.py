"""Record of a run in memory: its best kernels, and the gains of techniques.

Only what a search shows is read: the lineage's visible benchmark cases. A run's final race, whose
cases are hidden, is not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.language import language_of_source
from kagent_sandbox.data.task import Task

from kagent.memory.operation import form_of, operation_of
from kagent.runs.history import History
from kagent.runs.ideas import Effect, effects
from kagent.runs.lineage import Candidate, Lineage, Operator
from kagent.runs.manifest import Manifest, identity

MOST_KERNELS = 3
_LICENCE = re.compile(r"SPDX-License-Identifier:[ \t]*([\w.+() -]{1,80}\w)")
_FILES = ("LICENSE", "LICENCE", "COPYING")


@dataclass(frozen=True, slots=True)
class RememberedKernel:
    """One of a run's best kernels.

    Attributes:
        id: Its number in the run.
        name: Of its structure.
        language: Of its kernels: "triton".
        entry: Name of its function.
        source: Its file.
        hypothesis: What it changed.
        log_speed_up: Over the best of torch, on the visible cases, as the search measured it.
        models: Who wrote it and what it descends from; empty for the tuner's work.
        licences: SPDX identifiers in its text and in those it descends from; the path of the
            licence's file beside the task, where there is one. Empty: nothing says under which.
    """

    id: int
    name: str
    language: str
    entry: str
    source: str
    hypothesis: str
    log_speed_up: float
    models: tuple[str, ...] = ()
    licences: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Remembered:
    """A run, as later runs use it. `operation` and `form` are empty where the task is not known."""

    run: str  # its id
    folder: str  # its name
    task: str
    digest: str
    operation: str
    form: str
    kind: Kind
    target: str
    device: str
    started: str
    version: str
    evaluations: int
    kernels: tuple[RememberedKernel, ...]  # the best first
    effects: tuple[Effect, ...]


def remember(folder: Path, manifest: Manifest, history: History, task: Task) -> Remembered:
    """Record of a run.

    Args:
        folder: The run's.
        manifest: The run's.
        history: The run's.
        task: Its task, or what is now the task of that name.
    """
    lineage, recalled = history.lineage, history.recalled
    came_with = {s.kernel: s.licences for s in (recalled.seeds if recalled is not None else ())}
    known = task.digest == manifest.task_digest
    return Remembered(
        run=identity(folder, manifest),
        folder=folder.name,
        task=manifest.task,
        digest=manifest.task_digest,
        operation=operation_of(task) if known else "",
        form=form_of(task) if known else "",
        kind=manifest.kind,
        target=manifest.target,
        device=manifest.device,
        started=manifest.started,
        version=manifest.version,
        evaluations=lineage.counted,
        kernels=tuple(_kernels(lineage, task, came_with)),
        effects=effects(lineage),
    )


def _kernels(
    lineage: Lineage, task: Task, came_with: Mapping[str, Sequence[str]]
) -> Iterator[RememberedKernel]:
    """The best that are ahead of all seeds: those that the task ships are there anyway, and what
    came from memory is in it.
    """
    least = max((lineage.log_speed(s.id) for s in lineage.seeds), default=-math.inf)
    made = [
        c
        for c in lineage.elites()
        if c.proposal.operator is not Operator.SEED and lineage.log_speed(c.id) > least
    ]
    for candidate in made[:MOST_KERNELS]:
        p = candidate.proposal
        before = ancestors(lineage, candidate)
        models = [c.proposal.origin.model for c in before if c.proposal.origin is not None]
        yield RememberedKernel(
            id=p.id,
            name=p.name,
            language=language_of_source(p.source).name,
            entry=task.entry,
            source=p.source,
            hypothesis=p.hypothesis,
            log_speed_up=lineage.log_speed(p.id),
            models=tuple(dict.fromkeys(models)),
            licences=_licences(before, task.folder, came_with),
        )


def ancestors(lineage: Lineage, candidate: Candidate) -> list[Candidate]:
    """A candidate and all that it was made of, by any parent, in the order of ids."""
    found, left = set[int](), [candidate.id]
    while left:
        number = left.pop()
        if number not in found:
            found.add(number)
            left += lineage[number].proposal.parents
    return [lineage[i] for i in sorted(found)]


def _licences(
    before: Sequence[Candidate], task_folder: Path, came_with: Mapping[str, Sequence[str]]
) -> tuple[str, ...]:
    """Licences that a kernel's ancestors name or came with, and the licence file of their task."""
    found: list[str] = []
    for candidate in before:
        found += came_with.get(candidate.proposal.kernel, ())
        found += (m[1].strip() for m in _LICENCE.finditer(candidate.proposal.source))
    found += (str(p) for name in _FILES for p in sorted(task_folder.glob(f"{name}*")))
    return tuple(dict.fromkeys(found))
