"""Inputs that are drawn one case ahead, with what results on them are compared with.

While a launcher prepares and executes one case, a thread draws the next one's inputs and computes
the reference on them. That is for what is not timed: a candidate's check, and the check of its
timed plans on hard inputs. On a GPU both take the host as long as the candidate's own runs.
"""

from __future__ import annotations

import contextlib
import functools
import math
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from kagent_sandbox.judge.check.altered_inputs import altered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    from kagent_sandbox.data.case import Case
    from kagent_sandbox.data.task import Task
    from kagent_sandbox.judge.check.inputs import InputSampler, InputSet

T = TypeVar("T")

MOST_ALTERED = 4
"""Altered draws of one case, each the one before but for one element."""
MOST_AHEAD_BYTES = 512 << 20
"""Bytes that a call on a case moves, up to which its inputs are drawn ahead: of larger ones, with
the reference's results in float64, two sets may not fit beside each other, and the host waits for
the device anyway."""


def draw_sets(sampler: InputSampler, case: Case) -> tuple[InputSet, ...]:
    """Two sets of inputs of a check case, and the second one altered (`altered_inputs`), several
    times where the task has more arguments than check cases, the reference's results on all, and
    torch's errors; of a large case two sets, and the results on the
    first alone, as the other's have no room beside these.

    Raises:
        TaskError: The task's reference.py fails.
    """
    large = sampler.task.min_bytes(case) > MOST_AHEAD_BYTES
    if large:
        sampler.stale(case)  # it takes several times as much to make as to keep
    first = sampler.draw(case)
    sampler.expected(first)
    sampler.usual_errors(first)
    other = sampler.draw(case, other_than=first)
    if large:
        return first, other
    sampler.expected(other)
    if other.known_altered is None:
        # Arguments have their turns over the cases; where there are more of them, so has each case.
        cases = len(sampler.task.cases("gpu" if sampler.device.type == "cuda" else "cpu").check)
        turns = min(MOST_ALTERED, math.ceil(len(other.tensors) / max(1, cases)))
        found = [other]
        while len(found) <= turns and (further := altered(sampler, found[-1])) is not None:
            found.append(further)
        other.known_altered = tuple(found[1:])
    return first, other, *other.known_altered


def draw_new(sampler: InputSampler, case: Case) -> InputSet:
    """New inputs of a case, the reference's results, and torch's typical errors.

    Raises:
        TaskError: The task's reference.py fails.
    """
    input_set = sampler.fresh(case)
    sampler.expected(input_set)
    sampler.usual_errors(input_set, typical=True)
    return input_set


@contextlib.contextmanager
def drawn_sets(
    sampler: InputSampler, cases: Sequence[Case]
) -> Iterator[Iterator[tuple[InputSet, ...]]]:
    """The sets of each case (`draw_sets`); no thread is left at the end. Where draws are kept there
    is too little to gain for a thread.

    Raises:
        TaskError: The task's reference.py fails; raised at its case.
    """
    draw = functools.partial(draw_sets, sampler)
    if sampler.keeps_draws:
        yield map(draw, cases)
        return
    with _drawn_ahead(draw, sampler.task, cases) as sets:
        yield sets


@contextlib.contextmanager
def drawn_new(sampler: InputSampler, cases: Sequence[Case]) -> Iterator[Iterator[InputSet]]:
    """New inputs of each case (`draw_new`); no thread is left at the end.

    Raises:
        TaskError: The task's reference.py fails; raised at its case.
    """
    with _drawn_ahead(functools.partial(draw_new, sampler), sampler.task, cases) as input_sets:
        yield input_sets


@contextlib.contextmanager
def _drawn_ahead(
    draw: Callable[[Case], T], task: Task, cases: Sequence[Case]
) -> Iterator[Iterator[T]]:
    """Results of `draw` for each case, from a thread that is one case ahead."""
    with ThreadPoolExecutor(1, "draws") as thread:

        def begin(case: Case) -> Future[T] | None:
            if task.min_bytes(case) > MOST_AHEAD_BYTES:
                return None
            return thread.submit(draw, case)

        def drawn() -> Iterator[T]:
            ahead = None
            for case, following in zip(cases, [*cases[1:], None], strict=True):
                one = (ahead or thread.submit(draw, case)).result()
                ahead = following and begin(following)
                yield one

        yield drawn()
