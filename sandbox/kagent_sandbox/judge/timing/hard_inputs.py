"""Check of timed plans on hard inputs, at the shapes that are timed.

Host code chooses kernels by shape, as it should. Check cases are small and benchmark cases large,
so a candidate can tell them apart. Benchmark inputs are ordinary numbers. A candidate could
therefore leave out, where it is timed, the work that only large values, masks or constant rows
need. So could a configuration of tunables that was built for the benchmark cases alone. Timed plans
therefore run once more on inputs as check cases have them: on those that hold rows of every kind
always, where a task has such, since one kind in ten would mostly be missed. The choice of others is
secret.

The last run has the inputs of the one before it but for one element, in the same place, as in a
check (`altered_inputs`): by then a kernel may have been called for hundreds of times there.

Not covered: mistakes at a shape that is in no case at all.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from kagent_sandbox.judge.arena.session import CandidateRejected
from kagent_sandbox.judge.check.altered_inputs import altered
from kagent_sandbox.judge.check.check_inputs import MOST_AHEAD_BYTES, draw_new, drawn_new

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Mapping, Sequence

    from kagent_sandbox.data.case import Case
    from kagent_sandbox.judge.timing.blocks import TimedBlocks

OTHER_CHECKS = 3
"""Checks of one candidate over all of its timed cases, beside those with rows of every kind. Each
is one run, and one reference: about 20 ms for softmax on an H100."""
OF_EVERY_KIND = ("mixed", "nonfinite")
"""Distributions that hold rows of every kind, by their names (docs/tasks.md)."""
SLACK = 8.0
"""Factor on the task's tolerance, which was calibrated on the check cases. A chunked kernel that
passes all of those errs twice as much as allowed on 8192 classes with shifted inputs. Omissions are
off by orders of magnitude; lower precision shows on ordinary inputs, where nothing is granted.
"""


def hard_cases(case: Case, check_cases: Sequence[Case]) -> list[Case]:
    """The case with the distributions of inputs that check cases of its dtype have, but for its
    own.
    """
    same = [c for c in check_cases if c.dtype == case.dtype] or check_cases
    kinds = dict.fromkeys((c.inputs, c.scale) for c in same)
    kinds.pop((case.inputs, case.scale), None)
    return [
        case.model_copy(update={"name": f"{case.name}, {i} x{s:g}", "inputs": i, "scale": s})
        for i, s in kinds
    ]


def choose_hard_cases(
    bench_cases: Sequence[Case], check_cases: Sequence[Case], rng: random.Random
) -> list[tuple[Case, Case]]:
    """Choose the hard inputs on which timed plans are checked, at least one for each case where
    there are some.

    Args:
        bench_cases: The timed cases.
        check_cases: Cases whose distributions are used.
        rng: Source of the secret choice.

    Returns:
        Pairs of a timed case and the same with another distribution.
    """
    others = rng.sample(range(len(bench_cases)), min(len(bench_cases), OTHER_CHECKS))
    each = math.ceil(OTHER_CHECKS / max(1, len(others)))
    return [
        (case, hard)
        for i, case in enumerate(bench_cases)
        for hard in _chosen(case, check_cases, each if i in others else 0, rng)
    ]


def recheck_on_hard_inputs(
    timed_cases: Mapping[str, TimedBlocks],
    side: str,
    check_cases: Sequence[Case],
    rng: random.Random,
) -> None:
    """Run a contender's timed plans on hard inputs, at least once each where there are some.

    Args:
        timed_cases: The timed blocks of each case, all in one session.
        side: The contender.
        check_cases: Cases whose distributions are used.
        rng: Source of the secret choice.

    Raises:
        CandidateRejected: A result is wrong. The verdict's case is the timed one.
        TaskError: The task's reference.py fails.
    """
    some = next(iter(timed_cases.values()))
    chosen = choose_hard_cases([t.case for t in timed_cases.values()], check_cases, rng)
    with drawn_new(some.checker.sampler, [hard for _, hard in chosen]) as input_sets:
        for case, hard in chosen:
            with some.session.clock.part("inputs"):
                input_set = next(input_sets)
            try:
                timed_cases[case.name].check(side, input_set, SLACK)
            except CandidateRejected as e:
                text = f"on {hard.inputs} inputs of scale {hard.scale:g}: {e.verdict.message}"
                verdict = replace(e.verdict, message=text, case=case.name)
                raise CandidateRejected(verdict, e.owner) from e.__cause__
    _recheck_altered(list(timed_cases.values()), side, rng)


def _recheck_altered(timed: Sequence[TimedBlocks], side: str, rng: random.Random) -> None:
    """Run one of the timed plans on new inputs, and again with one element changed; none where all
    are so large that the reference has no room for both.
    """
    small = [t for t in timed if t.checker.task.min_bytes(t.case) <= MOST_AHEAD_BYTES]
    if not small:
        return
    one = rng.choice(small)
    sampler = one.checker.sampler
    with one.session.clock.part("inputs"):
        input_set = draw_new(sampler, one.case)
        again = altered(sampler, input_set)
    if again is not None:
        one.check(side, input_set, SLACK, again)


def _chosen(
    case: Case, check_cases: Sequence[Case], others: int, rng: random.Random
) -> Iterator[Case]:
    """Cases with rows of every kind, and `others` more; at least one case."""
    found = hard_cases(case, check_cases)
    of_every_kind = [w for n in OF_EVERY_KIND if (w := [c for c in found if c.inputs == n])]
    for whole in of_every_kind:
        yield rng.choice(whole)
    rest = [c for c in found if c.inputs not in OF_EVERY_KIND]
    yield from rng.sample(rest, min(len(rest), others if of_every_kind else max(1, others)))
