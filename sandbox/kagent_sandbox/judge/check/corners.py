"""Checks that a task's functions run at the ends of what its generators of hidden cases draw.

A check computes few hidden cases. Sizes that do not go together, such as the least width beside the
largest part of one, are in few draws, and would end a run of hours in its final race.

Trusted code: torch and the task's reference.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kagent_sandbox.data.case import Case
from kagent_sandbox.data.generator import draw_corners
from kagent_sandbox.judge.check.task_cases import work_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kagent_sandbox.data.generator import Generator
    from kagent_sandbox.data.kind import Kind
    from kagent_sandbox.data.task import Task
    from kagent_sandbox.judge.check.inputs import InputSampler

MOST_CORNERS_WORK = 1e7
"""Elements, or operations, of all corners of check cases together, and of benchmark cases: some
hundredths of a second on a CPU."""


def check_corners(task: Task, kind: Kind, sampler: InputSampler) -> None:
    """Run inputs, reference and eager at corners, the smallest first, as long as these are small.

    Raises:
        TaskError: A function fails.
    """
    of = task.cases(kind)
    for name, generators in (("hidden_check", of.hidden_check), ("hidden_bench", of.hidden_bench)):
        left = MOST_CORNERS_WORK
        for case in _corner_cases(task, name, generators):
            left -= work_of(task, case)
            if left < 0:
                break
            drawn = sampler.fresh(case, 1)
            for function in ("reference", "eager"):
                sampler.call(function, drawn)


def _corner_cases(task: Task, name: str, generators: Iterable[Generator]) -> list[Case]:
    """Cases at the ends of generators' dimensions, of each sizes one, the smallest first."""
    found: dict[object, Case] = {}
    for generator in generators:
        for fields in draw_corners(generator, task.unmet):
            sizes = ", ".join(f"{n} = {fields[n]}" for n in generator.dims)
            case = Case(name=f"{name} of {sizes or 'fixed sizes'}", **fields)
            found.setdefault((tuple(sorted(case.dims.items())), case.dtype), case)
    return sorted(found.values(), key=lambda case: work_of(task, case))
