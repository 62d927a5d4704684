"""The check of a task itself, before any kernel is held against it. Needs no torch.

It is done once per task (by its digest), kind of device and version of torch, in a process of its
own; what it found is kept in the cache. A task with a fault is not kept: it will be mended.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kagent_sandbox import cache
from kagent_sandbox.data.records import from_json, to_json
from kagent_sandbox.device.table import available, own_unit
from kagent_sandbox.errors import DeviceFull, TaskError
from kagent_sandbox.process.ask_once import TookTooLong, ask_once
from kagent_sandbox.process.device_lock import DeviceLock
from kagent_sandbox.process.temporary_space import temporary_space

if TYPE_CHECKING:
    from kagent_sandbox.data.kind import Kind
    from kagent_sandbox.data.task import Task

VERSION = 7
"""Version of what is checked: part of the cache's key."""
LIMIT_S = 3600.0
"""CPU time that a check may take: a quarter of an hour of four cores, or more of fewer."""
_WORKER: tuple[str, ...] = ("-m", "kagent_sandbox.judge.check.task_checker")
_FASTER = "make the check cases smaller, or the reference faster"
_LOG_TAIL = 1000


@dataclass(frozen=True)
class TaskCheck:
    """Findings about a task without a fault.

    Attributes:
        kind: Whose cases were checked.
        device: Where: "cpu" or "cuda".
        cases: Number of cases that were drawn and computed, visible and hidden.
        skipped: Names of check cases that are too large for the device that stands in.
        wrong: Number of wrong results that were held against the task's tolerance.
        holes: What of them passes every check case, a line each; but for `excused`.
        eager_eps: The largest error of `eager`, in machine epsilons of the result, the inputs or
            the TF32 that it may compute in, whichever are coarser.
        seconds: Time that the check took.
        without_effect: Operations that the task declares to change nothing, and that did not in
            any case, with the reason: a line each.
        excused: Holes that the task declares to have no effect.
    """

    kind: str
    device: str
    cases: int
    skipped: tuple[str, ...]
    wrong: int
    holes: tuple[str, ...]
    eager_eps: float
    seconds: float
    without_effect: tuple[str, ...] = ()
    excused: tuple[str, ...] = ()


def check_task(task: Task, kind: Kind, say: Callable[[str], None] = lambda _: None) -> TaskCheck:
    """Check a task for one kind of device: see `check_kinds`."""
    return check_kinds(task, (kind,), say)[0]


def check_kinds(
    task: Task,
    kinds: Sequence[Kind] = ("gpu", "cpu"),
    say: Callable[[str], None] = lambda _: None,
) -> list[TaskCheck]:
    """Check a task for kinds of device, or recall what an earlier check found.

    A machine without a GPU checks the cases for one on its CPU, as far as they are small enough.
    Where an earlier check was of the same task, but for `without_effect` and comments, only the
    declarations of that are checked.

    Args:
        task: The task.
        kinds: Whose cases.
        say: Is told what is being done, and what it cost.

    Raises:
        TaskError: The task has a fault; one line that names its file and what in it.
    """
    names = {kind: _cache_names(task, kind) for kind in kinds}
    recalled = {kind: cache.load(name, TaskCheck) for kind, (name, _) in names.items()}
    found = {kind: check for kind, check in recalled.items() if check is not None}
    left = [kind for kind in kinds if kind not in found]
    if left:
        say(f"checking the task {task.name} itself, once")
        known = {k: cache.load(names[k][1], TaskCheck) for k in left}
        on_gpu = {k: known.pop(k) for k in left if _on_gpu(k)}
        found |= _check_on_gpu(task, on_gpu, say) if on_gpu else {}
        found |= _run(task, known, "cpu", alone=True) if known else {}
        for kind in left:
            for name in names[kind]:
                cache.save(name, found[kind])
        seconds = sum(found[kind].seconds for kind in left)
        say(f"the task was checked in {seconds:.1f} s; that is kept until it changes")
    return [found[kind] for kind in kinds]


def _on_gpu(kind: Kind) -> bool:
    return kind == "gpu" and available("gpu")


def _cache_names(task: Task, kind: Kind) -> tuple[str, str]:
    """Names in the cache of a check, and of one of any declarations of what has no effect."""
    parts = [kind, _on_gpu(kind), importlib.metadata.version("torch"), VERSION]
    calibration = None if task.calibration is None else task.calibration.kinds.get(kind)
    parts += [] if calibration is None else [repr(calibration.results)]
    return (
        cache.named("task", task.digest, *parts),
        cache.named("task-undeclared", task.undeclared_digest, *parts),
    )


_Known = dict["Kind", TaskCheck | None]


class _NotChecked(TaskError):  # noqa: N818
    """The check ended before its end, and nothing says that it was the task's fault."""


def _check_on_gpu(task: Task, known: _Known, say: Callable[[str], None]) -> dict[Kind, TaskCheck]:
    """Check while nobody times on the GPU, and once more alone where it fails beside others: for
    lack of memory, which libraries and the system do not always call so.

    Whoever wants to time on it waits for the check.
    """
    lock = DeviceLock(own_unit("gpu"), say)
    with contextlib.suppress(DeviceFull, _NotChecked), lock.turn("work"):
        return _run(task, known, "cuda", alone=False)
    with lock.turn("timing"):
        return _run(task, known, "cuda", alone=True)


def _run(task: Task, known: _Known, device: str, *, alone: bool) -> dict[Kind, TaskCheck]:
    """Findings by kind of device, in one process. `known` is what each kind's check may use."""
    request = {
        "task": str(task.folder),
        "known": {kind: None if c is None else to_json(c) for kind, c in known.items()},
        "device": device,
        "alone": alone,
    }
    reference = task.folder / "reference.py"
    try:
        with temporary_space():
            done = ask_once(_WORKER, request, limit_s=LIMIT_S, hint=_FASTER, tail_bytes=_LOG_TAIL)
    except TookTooLong as e:
        raise TaskError(f"{reference}: the check of the task {e}") from None
    try:
        answer = json.loads(done.out)
    except ValueError:
        code = done.status
        how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        last = done.tail.strip().rpartition("\n")[2]  # of a traceback, the error
        text = f"{reference}: the process that checks the task {how}{f': {last}' if last else ''}"
        raise _NotChecked(text) from None
    if "full" in answer:
        raise DeviceFull(answer["full"])
    if "failed" in answer:
        raise _NotChecked(f"{reference}: the check of the task failed: {answer['failed']}")
    if "error" in answer:
        raise TaskError(answer["error"])
    checks = [from_json(TaskCheck, each) for each in answer["ok"]]
    return dict(zip(known, checks, strict=True))
