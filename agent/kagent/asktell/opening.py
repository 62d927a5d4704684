"""Making a run that is answered from outside, and opening one wherever its folder is now."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
from dataclasses import replace
from pathlib import Path

from kagent_sandbox.build.targets import parse_target
from kagent_sandbox.errors import MachineError, RunError, UserError
from kagent_sandbox.task import Kind, Task, load_task

from kagent.config import Config
from kagent.evolve import SeedText
from kagent.lineage import Operator, Proposal
from kagent.propose import Nobody, Setting
from kagent.resources import resource
from kagent.runs import Manifest
from kagent.session import has_gpu, new_manifest, seeds_for, setting_of
from kagent.store import History, RunStore
from kagent.tasks import find_task

DEFAULT_TARGET = "sm_90a"
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


def new_run(task_name: str, config: Config, target: str | None) -> Path:
    """Make a run and accept the task's seeds into it. Needs no device.

    Raises:
        UserError: There is no such task or target, no seed for it, or the language is not its own.
        RunError: The folder cannot be written.
    """
    task = find_task(task_name)
    kind, target = device_for(config.lang, target)
    seeds = seeds_for(task, kind, config.lang)
    config = config.model_copy(update={"proposer": Nobody.name})
    with RunStore.create(config.runs, new_manifest(task, kind, target, config, {})) as store:
        _accept(store, seeds)
        return store.folder


def ready(store: RunStore, task: Task) -> None:
    """Make sure that a run can be asked and told.

    Raises:
        UserError: The run has a proposer of its own.
    """
    manifest, folder = store.manifest, store.folder
    if manifest.proposer != Nobody.name:
        raise UserError(
            f"{folder}: its proposals come from {manifest.proposer}, and kagent evolve "
            f"{manifest.task} --resume {folder.name} goes on with it; kagent ask {manifest.task} "
            "makes a run that is answered from outside"
        )
    history = store.history()
    if not history.lineage and not history.pending:  # the process that made it was killed
        _accept(store, seeds_for(task, kind_of(manifest), manifest.lang))


def _accept(store: RunStore, seeds: list[SeedText]) -> None:
    """All seeds in one commit: candidates 0, 1, ..."""
    store.propose(
        *(
            Proposal(
                id=number,
                parents=(),
                operator=Operator.SEED,
                name=seed.name,
                source=seed.source,
                hypothesis="one of the task's own kernels",
            )
            for number, seed in enumerate(seeds)
        )
    )


def device_for(lang: str, target: str | None) -> tuple[Kind, str]:
    """What to ask kernels for: a named target, else this machine's GPU, else its CPU.

    Raises:
        UserError: The target is unknown, or has no kernels in that language.
    """
    if target is None:
        if lang == "cpp" or (lang == "any" and not has_gpu()):
            return "cpu", "cpu"
        return "gpu", gpu_target() or DEFAULT_TARGET
    known = parse_target(target)
    if lang != "any" and known.is_cpu != (lang == "cpp"):
        fitting = "triton, cuda or any" if not known.is_cpu else "cpp or any"
        raise UserError(f"--lang {lang} has no kernels for {target}: expected {fitting}")
    return ("cpu", "cpu") if known.is_cpu else ("gpu", _of(known.major, known.minor))


def gpu_target() -> str | None:
    """What to compile for this machine's first GPU; None where there is none."""
    if not has_gpu():
        return None
    driver = ctypes.CDLL("libcuda.so.1")  # initialised by has_gpu
    device, major, minor = ctypes.c_int(0), ctypes.c_int(0), ctypes.c_int(0)
    failed = (
        driver.cuDeviceGet(ctypes.byref(device), 0)
        or driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
        or driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
    )
    return None if failed else _of(major.value, minor.value)


def _of(major: int, minor: int) -> str:
    """As devices say it: from Hopper on with the architecture's own instructions."""
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def kind_of(manifest: Manifest) -> Kind:
    """The kind of device that a run is for."""
    return "gpu" if manifest.kind == "gpu" else "cpu"


def setting_for(store: RunStore, task: Task, history: History, budget: int) -> Setting:
    """The setting of a run: its own budget, `budget` before its first session, and never less than
    what it was told.
    """
    waiting = sum(p.operator is not Operator.SEED for p in history.pending)
    most = max(history.budget or budget, history.lineage.counted + waiting)
    return replace(setting_of(store, task), budget=most)


def identity(folder: Path, manifest: Manifest) -> str:
    """What all copies of a run share, and no two runs."""
    if manifest.id:
        return manifest.id
    return hashlib.sha256((folder / "run.json").read_bytes()).hexdigest()[:16]


def task_of_run(folder: Path, manifest: Manifest) -> Task:
    """The task of a run, which may come from another machine: the one that it was made with, the
    one that ships with kagent, or one in a folder of its name beside the run.

    Raises:
        RunError: There is none, or it is not what it was.
        TaskError: Its files do not make sense.
    """
    runs = folder.resolve().parent
    places = [Path(manifest.task_folder), runs / manifest.task, runs.parent / manifest.task]
    with contextlib.suppress(MachineError):  # without them a user's own tasks work all the same
        places.append(resource("seeds") / manifest.task)
    changed: Path | None = None
    for place in places:
        if (place / "task.toml").is_file() and (place / "reference.py").is_file():
            task = load_task(place)
            if (task.name, task.digest) == (manifest.task, manifest.task_digest):
                return task
            changed = changed or place
    if changed is not None:
        raise RunError(
            f"{folder}: {changed} was changed since, and its figures would no longer compare: "
            f"put the task as it was into {runs / manifest.task}, or start a new run"
        )
    raise RunError(
        f"{folder}: no task {manifest.task} on this machine: copy its folder (task.toml and "
        f"reference.py) to {runs / manifest.task}"
    )
