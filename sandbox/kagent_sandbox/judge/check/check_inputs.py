"""Inputs of a candidate's check, case by case, with what its results are compared with.

While a launcher prepares and executes one case, a thread draws the next one's inputs and computes
the reference on them: a check is not timed, and on a GPU both take the host as long as the
candidate's own runs. Where draws are kept there is little to gain.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kagent_sandbox.data.case import Case
    from kagent_sandbox.judge.check.inputs import InputSampler, InputSet


def draw_pair(sampler: InputSampler, case: Case) -> tuple[InputSet, InputSet]:
    """Two sets of inputs of a check case, the reference's results on both, and torch's errors.

    Raises:
        TaskError: The task's reference.py fails.
    """
    first = sampler.draw(case)
    other = sampler.draw(case, other_than=first)
    for input_set in (first, other):
        sampler.expected(input_set)
    sampler.usual_errors(first)
    return first, other


@contextlib.contextmanager
def drawn_pairs(
    sampler: InputSampler, cases: Sequence[Case]
) -> Iterator[Iterator[tuple[Case, tuple[InputSet, InputSet]]]]:
    """The cases with a pair each (`draw_pair`); no thread is left at the end.

    Raises:
        TaskError: The task's reference.py fails; raised at its case.
    """
    if sampler.keeps_draws:
        yield ((case, draw_pair(sampler, case)) for case in cases)
        return
    with ThreadPoolExecutor(1, "draws") as thread:

        def pairs() -> Iterator[tuple[Case, tuple[InputSet, InputSet]]]:
            ahead = [thread.submit(draw_pair, sampler, case) for case in cases[:1]]
            for i, case in enumerate(cases):
                pair = ahead.pop().result()
                ahead += [thread.submit(draw_pair, sampler, c) for c in cases[i + 1 : i + 2]]
                yield case, pair

        yield pairs()
