"""Cases that a check of a task looks at, its own and hidden ones of some draws, and their sizes.

Trusted code: the task's formulas alone.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from kagent_sandbox.data.build_case import build_case
from kagent_sandbox.data.plan import ITEMSIZE
from kagent_sandbox.data.task import draw_hidden
from kagent_sandbox.errors import TaskError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kagent_sandbox.data.case import Case
    from kagent_sandbox.data.kind import Kind
    from kagent_sandbox.data.task import Task

SEEDS = 8
"""Draws of all hidden cases that are looked at. Each distribution and dtype is computed once."""
USUAL_WORK = 1e6
"""Elements, or operations, of the hidden cases that are computed, as far as there are such."""
MOST_WORK = 5e8
"""Elements, or operations, of a case that a CPU computes in a GPU's place, and of those that wrong
results are tried on.
"""


def _hidden(task: Task, kind: Kind, which: Literal["check", "bench"]) -> list[Case]:
    """Hidden cases of some draws: of each distribution and dtype the one nearest `USUAL_WORK`."""
    found: dict[tuple[str, str], Case] = {}

    def distance(case: Case) -> float:
        return abs(math.log(max(1.0, work_of(task, case)) / USUAL_WORK))

    for seed in range(SEEDS):
        for case in draw_hidden(task, kind, which, seed):
            build_case(task, case)
            best = found.setdefault((case.inputs, case.dtype), case)
            found[case.inputs, case.dtype] = min(best, case, key=distance)
    return [
        c.model_copy(update={"name": f"hidden_{which}_{i}_{c.inputs}"})
        for i, c in enumerate(found.values())
    ]


def checked_cases(task: Task, kind: Kind) -> list[Case]:
    """Check cases, and hidden ones."""
    return [*task.cases(kind).check, *_hidden(task, kind, "check")]


def timed_cases(task: Task, kind: Kind) -> list[Case]:
    """Benchmark cases, and hidden ones."""
    return [*task.cases(kind).bench, *_hidden(task, kind, "bench")]


def sizes_of(task: Task, case: Case) -> Iterator[tuple[int, int, bool, bool]]:
    """Sizes of each tensor: elements, bytes, whether it is read, whether it is written."""
    spec = build_case(task, case)
    for tensor in spec.tensors:
        count = math.prod(tensor.shape)
        yield count, count * ITEMSIZE[tensor.dtype], True, tensor.name in task.mutates
    for tensor in spec.results:
        count = math.prod(tensor.shape)
        yield count, count * ITEMSIZE[tensor.dtype], False, True


def elements_of(task: Task, case: Case) -> int:
    """Elements of all arguments and results."""
    return sum(count for count, *_ in sizes_of(task, case))


def work_of(task: Task, case: Case) -> float:
    """Elements, or operations if these are more."""
    return max(elements_of(task, case), task.flop_count(case))


def toml_error(task: Task, key: str, text: str) -> TaskError:
    """A fault of task.toml at one of its keys."""
    return TaskError(f"{task.folder / 'task.toml'}: {key}: {text}")
