"""A task from an operation: traced, sized, tried, written, checked."""

from __future__ import annotations

import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from kagent_sandbox.data.calibration import FILE as CALIBRATION
from kagent_sandbox.data.calibration import Calibration, KindCalibration, write_calibration
from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.task import Task, load_task
from kagent_sandbox.device.cpu.facts import cpu_facts
from kagent_sandbox.errors import TaskError, UserError
from kagent_sandbox.judge.task_check import TaskCheck, check_kinds

from kagent.authoring.draft.cases import ROUNDED, NoCaseError, make_draft, with_dtype
from kagent.authoring.draft.draft import BLANK, DraftCase, TaskDraft
from kagent.authoring.draft.pointers import rounded_index, with_offsets, with_own_bounds
from kagent.authoring.draft.rooms import bare, find_rooms, narrowed, redrawn
from kagent.authoring.draft.trial import Trials, accepted, write, written
from kagent.authoring.errors import AuthoringError
from kagent.authoring.proofs import prove_holes
from kagent.authoring.seeds import SeedOutcome, write_seeds
from kagent.authoring.tracing.operation import Operation
from kagent.authoring.tracing.sizes import Room
from kagent.authoring.tracing.trace import TracedOperation
from kagent.runs.files import require_folder
from kagent.tasks import Seed, seeds_of
from kagent.text import local_time

Say = Callable[[str], None]
_SEEDS: Mapping[Kind, str] = {"gpu": "Triton", "cpu": "C++"}


@dataclass(frozen=True)
class Made:
    """A new task.

    Attributes:
        folder: Its folder.
        trace: What was found out about the operation.
        draft: What was written.
        checks: What the check of the task found, for each kind of device.
        derived: What became of the seeds that were derived, for each kind of device.
        seconds: Time that it took.
    """

    folder: Path
    trace: TracedOperation
    draft: TaskDraft
    checks: tuple[TaskCheck, ...]
    derived: tuple[SeedOutcome, ...]
    seconds: float

    @property
    def task(self) -> Task:
        """The task."""
        return load_task(self.folder)

    @property
    def seeds(self) -> tuple[Seed, ...]:
        """Kernels that a run starts from."""
        return tuple(seeds_of(self.task))

    @property
    def notes(self) -> tuple[str, ...]:
        """Changes and omissions, a line each."""
        none = (f"no {_SEEDS[d.kind]} seed: {d.reason}" for d in self.derived if d.path is None)
        return (*self.trace.operation.notes, *self.trace.notes, *self.draft.notes, *none)

    @property
    def holes(self) -> tuple[str, ...]:
        """Wrong results that would pass."""
        return tuple(dict.fromkeys(h for c in self.checks for h in c.holes))


def make_task(
    operation: Operation,
    folder: Path,
    *,
    vary: Mapping[tuple[str, int], str] | None = None,
    seeds: bool = True,
    force: bool = False,
    say: Say = lambda _: None,
) -> Made:
    """Make a task of an operation.

    Args:
        operation: The operation.
        folder: Folder that is written. It must not exist, or be empty.
        vary: Names of the dimensions that vary, by argument and dimension. By default all do that
            can, and that are not small.
        seeds: Whether seeds are derived, too (`write_seeds`).
        force: Whether files of a folder that is there are replaced, once the new ones are made.
            Its other files stay, but for calibration.json, which is of the task as it was.
        say: Is told what is being done.

    Raises:
        UserError: The folder is there already or cannot be written, or `vary` names no dimension.
        AuthoringError: The operation cannot become a task.
        TaskError: The task has a fault that could not be mended.
    """
    if force and folder.is_dir():
        with tempfile.TemporaryDirectory(prefix=".kagent-", dir=folder.parent) as name:
            fresh = Path(name) / folder.resolve().name
            try:
                made = make_task(operation, fresh, vary=vary, seeds=seeds, say=say)
            except TaskError as e:
                text = str(e).replace(str(fresh), str(folder))
                raise TaskError(f"{text}; the folder is as it was") from e
            (folder / CALIBRATION).unlink(missing_ok=True)  # of the task as it was
            for file in (p for p in fresh.iterdir() if p.is_file()):
                file.replace(folder / file.name)
        derived = tuple(
            replace(d, path=None if d.path is None else folder / d.path.name) for d in made.derived
        )
        return replace(made, folder=folder, derived=derived)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: it is there already: name another with --to, or remove it")
    require_folder(folder)
    began = time.perf_counter()
    say(f"running {operation.origin} on symbolic tensors")
    with warnings.catch_warnings(action="ignore"):  # of torch, at sizes such as 1
        try:
            room, draft = _tried_rooms(find_rooms(operation, vary), say, named=bool(vary))
        except AuthoringError as e:
            if not str(e).startswith("it "):
                raise
            raise AuthoringError(f"{operation.origin}: {e}") from e
    _write(draft, folder)
    try:
        load_task(folder)
        checks = _checked(folder, say)
        if any(c.holes for c in checks):
            draft, checks = _without_idle(draft, folder, checks, say)
        if any(c.holes for c in checks):
            draft, checks = _mended(draft, folder, checks, say)
    except TaskError as e:
        if why := rounded_index(room.trace.graph):
            raise TaskError(f"{e}; {why}") from e
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    derived = tuple(write_seeds(folder, say=say)) if seeds else ()
    return Made(folder, room.trace, draft, checks, derived, time.perf_counter() - began)


def _tried_rooms(rooms: Iterable[Room], say: Say, *, named: bool = False) -> tuple[Room, TaskDraft]:
    """The first room in which cases can be computed, and the draft with them. Where they cannot,
    numbers may be offsets, or point into a dimension that must stay as in the example, or be equal
    to another: that one alone is narrowed first, unless dimensions are `named` by the user.

    Raises:
        AuthoringError: There is none; or the first one has no case for another reason.
    """
    refusal: NoCaseError | None = None
    for each in rooms:
        room: Room | None = each
        while room is not None:
            blamed: NoCaseError | None = None
            drawn, own = bare(room.trace), room.trace.operation.examples
            for examples in dict.fromkeys(
                (own, with_offsets(drawn) or own, with_own_bounds(drawn))
            ):
                say("trying cases" if refusal is None else "trying other dimensions")
                tried = replace(room, trace=redrawn(room.trace, examples))
                try:
                    return tried, make_draft(tried)
                except NoCaseError as e:
                    if not e.failed:
                        raise refusal or e from None
                    refusal = refusal or e
                    blamed = blamed or (e if e.name and not named else None)
            room = narrowed(room, blamed.name, blamed.other) if blamed else None
    assert refusal is not None
    raise refusal


def _write(draft: TaskDraft, folder: Path) -> None:
    """Write the task's files: also calibration.json, where CPU cases have a tolerance of their own.

    Raises:
        UserError: The folder cannot be written.
    """
    write(draft, folder)
    if draft.on_cpu is None:
        return
    names = [r.name for r in draft.trace.compared if r.dtype.is_floating_point]
    known = KindCalibration(
        digest=load_task(folder, calibrated=False).digest,
        device=cpu_facts().name,
        torch=str(torch.__version__),
        made=local_time(),
        cases=len(draft.cpu.check),
        ways=(ROUNDED,),
        results=dict.fromkeys(names, draft.on_cpu),
        left_out={},
    )
    write_calibration(folder, Calibration({"cpu": known}))


def _checked(folder: Path, say: Say) -> tuple[TaskCheck, ...]:
    return tuple(check_kinds(load_task(folder), say=say))


def _without_idle(
    draft: TaskDraft, folder: Path, checks: Sequence[TaskCheck], say: Say
) -> tuple[TaskDraft, tuple[TaskCheck, ...]]:
    """The draft with operations declared that no case sees and that algebra shows to change
    nothing.
    """
    idle = prove_holes(folder, lambda: checks)
    if not idle:
        return draft, tuple(checks)
    draft = draft.with_(idle=tuple(idle))
    _write(draft, folder)
    return draft, _checked(folder, say)


def _mended(
    draft: TaskDraft, folder: Path, checks: Sequence[TaskCheck], say: Say
) -> tuple[TaskDraft, tuple[TaskCheck, ...]]:
    """The draft with further cases, if they close holes: inputs of other magnitudes, and all
    numbers 0, which a limit below a norm of them all needs.
    """
    first = draft.cpu.check[0]
    scales = (10.0, 100.0, 1000.0, -1.0, -30.0, 0.05) if draft.rows else ()
    plans = [DraftCase(first.sizes, first.dtype, scale=s, words=f"times_{s:g}") for s in scales]
    if any(e.shape and e.dtype.is_floating_point for e in draft.arguments):
        plans.append(DraftCase(first.sizes, first.dtype, inputs=BLANK, words="blank"))
    if not plans:
        return draft, tuple(checks)
    say("some wrong results would pass: trying cases of other magnitudes")
    tried = draft.with_(blank=True)
    with written(tried) as path:
        more = [c for c, _ in accepted(Trials(tried, path), plans)]
    if not more:
        return draft, tuple(checks)
    own = draft.gpu.check[0].dtype
    wider = draft.with_(
        cpu=replace(draft.cpu, check=(*draft.cpu.check, *more)),
        gpu=replace(draft.gpu, check=(*draft.gpu.check, *(with_dtype(c, own) for c in more))),
        blank=any(c.inputs == BLANK for c in more),
    )
    _write(wider, folder)
    try:
        found = _checked(folder, say)
    except TaskError:
        found = tuple(checks)
    if sum(len(c.holes) for c in found) < sum(len(c.holes) for c in checks):
        return wider, found
    _write(draft, folder)
    return draft, tuple(checks)
