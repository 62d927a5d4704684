"""The check of a task itself, before any kernel is held against it. Needs no torch.

It is done once per task (by its digest), kind of device and version of torch, in a process of its
own; what it found is kept in the cache. A task with a fault is not kept: it will be mended.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kagent_sandbox import cache
from kagent_sandbox.data.records import from_json
from kagent_sandbox.device.table import available, device_for, find_device
from kagent_sandbox.errors import DeviceFull, TaskError
from kagent_sandbox.process.ask_once import TookTooLong, ask_once
from kagent_sandbox.process.device_lock import DeviceLock
from kagent_sandbox.process.temporary_space import temporary_space

if TYPE_CHECKING:
    from kagent_sandbox.data.kind import Kind
    from kagent_sandbox.data.task import Task

VERSION = 4
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
        holes: What of them passes every check case, a line each.
        eager_eps: The largest error of `eager`, in machine epsilons of the result or the inputs,
            whichever are coarser.
        seconds: Time that the check took.
        without_effect: Operations that the task declares to change nothing, and that did not in
            any case, with the reason: a line each.
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


def check_task(
    task: Task, kind: Kind, say: Callable[[str], None] = lambda _: None, *, cached: bool = True
) -> TaskCheck:
    """Check a task for a kind of device, or recall what an earlier check found.

    A machine without a GPU checks the cases for one on its CPU, as far as they are small enough.

    Args:
        task: The task.
        kind: Whose cases: "gpu" or "cpu".
        say: Is told what is being done, and what it cost.
        cached: Whether an earlier check counts.

    Raises:
        TaskError: The task has a fault; one line that names its file and what in it.
    """
    on_gpu = kind == "gpu" and available("gpu")
    torch_version = importlib.metadata.version("torch")
    calibration = None if task.calibration is None else task.calibration.kinds.get(kind)
    parts = [task.digest, kind, on_gpu, torch_version, VERSION]
    parts += [] if calibration is None else [repr(calibration.results)]
    name = cache.named("task", *parts)
    known = cache.load(name, TaskCheck) if cached else None
    if known is not None:
        return known
    say(f"checking the task {task.name} itself, once")
    found = _check_on_gpu(task, say) if on_gpu else _run(task, kind, "cpu", alone=True)
    cache.save(name, found)
    say(f"the task was checked in {found.seconds:.1f} s; that is kept until it changes")
    return found


def _check_on_gpu(task: Task, say: Callable[[str], None]) -> TaskCheck:
    """Check while nobody times on the GPU, and once more alone where memory lacks beside others.

    Whoever wants to time on it waits for the check.
    """
    lock = DeviceLock(find_device(device_for("gpu")).unit_name(0), say)
    with contextlib.suppress(DeviceFull), lock.turn("work"):
        return _run(task, "gpu", "cuda", alone=False)
    with lock.turn("timing"):
        return _run(task, "gpu", "cuda", alone=True)


def _run(task: Task, kind: Kind, device: str, *, alone: bool) -> TaskCheck:
    request = {"task": str(task.folder), "kind": kind, "device": device, "alone": alone}
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
        text = f"{reference}: the process that checks the task {how}" + (
            f": {done.tail}" if done.tail else ""
        )
        raise TaskError(text) from None
    if "full" in answer:
        raise DeviceFull(answer["full"])
    if "error" in answer:
        raise TaskError(answer["error"])
    return from_json(TaskCheck, answer["ok"])
