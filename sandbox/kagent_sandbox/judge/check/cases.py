"""Cases that a run is built for, checked and raced on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kagent_sandbox.data.task import draw_hidden

if TYPE_CHECKING:
    from kagent_sandbox.data.case import Case
    from kagent_sandbox.data.kind import Kind
    from kagent_sandbox.data.task import Task


def check_cases(task: Task, kind: Kind, run_seed: int) -> list[Case]:
    """Visible and hidden check cases of a run. A candidate is built for these and `bench_cases`."""
    return [*task.cases(kind).check, *draw_hidden(task, kind, "check", run_seed)]


def bench_cases(task: Task, kind: Kind) -> list[Case]:
    """Visible benchmark cases."""
    return list(task.cases(kind).bench)


def race_cases(task: Task, kind: Kind, run_seed: int) -> list[Case]:
    """Hidden benchmark cases of a run: finalists are built for these before the final race."""
    return draw_hidden(task, kind, "bench", run_seed)
