"""Task and setting of a stored run that continues."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from kagent_sandbox.data.task import Task, load_task
from kagent_sandbox.errors import MachineError, RunError

from kagent.resources import resource
from kagent.runs.ask import Setting
from kagent.runs.history import History
from kagent.runs.manifest import Manifest
from kagent.runs.store import RunStore


def setting_for(store: RunStore, task: Task, history: History, budget: int) -> Setting:
    """The setting of a run: its own budget, `budget` before its first session, and never less than
    what it was told.
    """
    most = max(history.budget or budget, history.lineage.counted + history.waiting)
    return replace(setting_of(store, task), budget=most)


def task_of_run(folder: Path, manifest: Manifest) -> Task:
    """The task of a run as it was, for what continues the run: its figures must compare.

    Raises:
        RunError: There is none, or it is not what it was.
        TaskError: Its files do not make sense.
    """
    task = todays_task(folder, manifest)
    if not is_same_task(task, manifest):
        beside = folder.resolve().parent / manifest.task
        raise RunError(
            f"{folder}: {task.folder} was changed since, so new figures would not compare with "
            f"the run's: put the task as it was into {beside}, or start a new run (--proposer "
            f"replay:{folder.name} judges its proposals anew). kagent show, export and ablate take "
            "the run as it is"
        )
    return task


def is_same_task(task: Task, manifest: Manifest) -> bool:
    """Whether a task is the one that a run was made with, to the letter."""
    return (task.name, task.digest) == (manifest.task, manifest.task_digest)


def todays_task(folder: Path, manifest: Manifest) -> Task:
    """The task of a run as it is now, for what measures everything anew: as it was where it is
    still found so, else a later version.

    The run may come from another machine. The task is the one that it was made with, the one that
    ships with kagent, or one in a folder of its name beside the run.

    Raises:
        RunError: There is none.
        TaskError: Its files do not make sense.
    """
    runs = folder.resolve().parent
    made_with = Path(manifest.task_folder)  # relative: it ships with kagent
    places = [made_with] if made_with.is_absolute() else []
    places += [runs / manifest.task, runs.parent / manifest.task]
    with contextlib.suppress(MachineError):  # without them a user's own tasks work all the same
        places.append(resource("seeds") / manifest.task)
    changed: Task | None = None
    for place in places:
        if (place / "task.toml").is_file() and (place / "reference.py").is_file():
            task = load_task(place)
            if is_same_task(task, manifest):
                return task
            if task.name == manifest.task:
                changed = changed or task
    if changed is not None:
        return changed
    raise RunError(
        f"{folder}: no task {manifest.task} on this machine: copy its folder (task.toml and "
        f"reference.py) to {runs / manifest.task}"
    )


def setting_of(store: RunStore, task: Task) -> Setting:
    """The setting that a stored run's decisions were taken in."""
    history = store.history()
    return setting_from(task, store.manifest, history, history.budget)


def setting_from(task: Task, manifest: Manifest, history: History, budget: int) -> Setting:
    """The setting of a run that was read already, with another budget."""
    recalled = history.recalled
    return Setting(
        task=task,
        kind=manifest.kind,
        target=manifest.target,
        budget=budget,
        seed=manifest.seed,
        in_flight=manifest.in_flight,
        operators=manifest.operators,
        priors=recalled.effects if recalled is not None else (),
    )
