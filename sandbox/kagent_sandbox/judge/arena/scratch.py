"""Scratch memory of candidates that leaves too little of the device for the judge's own work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from kagent_sandbox.data.plan import Alloc, Plan
from kagent_sandbox.data.verdict import Rejected, Stage, Status
from kagent_sandbox.device.device_memory import MemoryUse, explain
from kagent_sandbox.errors import TaskError

if TYPE_CHECKING:
    from kagent_sandbox.data.build import Built


def blamed(
    error: Exception,
    blame: Callable[[Exception], Rejected | None],
    relieve: Callable[[Exception], bool],
) -> Rejected | None:
    """Verdict on an error of the judge's own work.

    A candidate whose scratch memory is decisive is out. The host computes for the device only where
    there is no such candidate, or any could have a reference take minutes.

    Args:
        error: The error.
        blame: The verdict on a candidate whose scratch memory is decisive; else None.
        relieve: Has the judge's own work take less of the device's memory; whether it does.

    Returns:
        The verdict; None to try once more, with less memory.

    Raises:
        TaskError: The work takes more memory than there is.
        Exception: The error itself.
    """
    try:
        verdict = blame(error)
    except TaskError:
        if not relieve(error):
            raise
        return None
    if verdict is None and not relieve(error):
        raise error
    return verdict


def refuse_scratch(
    error: Exception,
    use: MemoryUse | None,
    built: Built,
    arena_bytes: Callable[[Built], int],
    stage: Stage,
) -> Rejected | None:
    """The verdict where a candidate's scratch memory alone is why memory is not enough, while no
    other process works on the device; None where others hold what is missing.

    Args:
        error: What the judge's own work failed with.
        use: Memory of the device; None of one that has none of its own.
        built: The candidate.
        arena_bytes: Bytes of the arena that a candidate is judged in.
        stage: What it was in.

    Raises:
        TaskError: Memory would not be enough without any scratch memory.
    """
    least, own = arena_bytes(_without_scratch(built)), arena_bytes(built)
    of_task = explain(error, use, alone=True, arena_bytes=least)
    if isinstance(of_task, TaskError):
        raise of_task from error
    if not isinstance(explain(error, use, alone=True, arena_bytes=own), TaskError):
        return None
    text = (
        f"with its scratch memory it takes {own / 2**20:.0f} MiB of the device, where inputs and "
        f"results take {least / 2**20:.0f} MiB: too little is left for the reference"
    )
    return Rejected(stage, Status.RESOURCE_LIMIT, text)


def _without_scratch(built: Built) -> Built:
    """A candidate whose plans hold inputs and results alone."""
    return replace(built, plans={key: _bare(plan) for key, plan in built.plans.items()})


def _bare(plan: Plan) -> Plan:
    results = {t.buffer for t in plan.outputs}
    buffers = tuple(b for b in plan.buffers if b.kind == "input" or b.id in results)
    allocs = tuple(op for op in plan.ops if isinstance(op, Alloc) and op.buffer in results)
    return replace(plan, buffers=buffers, ops=allocs)
