"""Wrong results that a task's tolerance must refuse: changes to its results, and what its reference
gives without one of its operations.

Each is held against the reference of the check cases, on the CPU, as a candidate's results are. A
wrong result that every case lets pass is a hole of the task. Operations that a task declares to
change nothing must change none of them.
"""

from __future__ import annotations

import difflib
import math
import sys
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kagent_sandbox.device.plan_ops import dtype_of
from kagent_sandbox.device.traits import InputPolicy
from kagent_sandbox.errors import TaskError
from kagent_sandbox.judge.check import numerics
from kagent_sandbox.judge.check.inputs import YARDSTICKS, InputSampler, NotAcceptable
from kagent_sandbox.judge.check.omissions import Omission, OmissionRecorder, Omitter
from kagent_sandbox.judge.check.task_cases import (
    MOST_WORK,
    checked_cases,
    timed_cases,
    toml_error,
    work_of,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from kagent_sandbox.data.case import Case
    from kagent_sandbox.data.kind import Kind
    from kagent_sandbox.data.task import Task
    from kagent_sandbox.judge.check.inputs import InputSet

SAME = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Relative differences that two orders of a reference's sums may make, by its dtype."""
Wrong = Omission | tuple[str, str]
"""A wrong result: of a reference without an operation, or of a change to the result of a name."""
_ZEROS, _SCALED, _MOVED = "zeros", "1.01 times the result", "rows in another order"
_COARSE = "1.25 times the result"
"""Change for results of 8 bits, where 1.01 times a number mostly is the number."""
_FACTORS = {_SCALED: 1.01, _COARSE: 1.25}
_KEPT = "the argument as it was"
_FAULTS = {
    _ZEROS: ("zeros pass", "every case's result is about zero"),
    _KEPT: ("the argument as it was passes", "no case's inputs need the write"),
}
"""Wrong results that no task may let pass: in words, and what else than the tolerance may be the
reason.
"""
_PASSES = "passes every check case"


@dataclass
class _Seen:
    """Evidence of the check cases against a wrong result so far."""

    found: bool = False
    largest: float = 0.0  # difference from the reference, over what sums in another order explain


def is_declared(task: Task, hole: str) -> bool:
    """Whether a hole is an operation that the task declares to have no effect."""
    words = hole.partition(": ")[2].removesuffix(f" {_PASSES}")
    return hole.startswith("reference.py:") and words in {e.operation for e in task.without_effect}


def find_holes(
    task: Task,
    sampler: InputSampler,
    cases: Sequence[Case],
    shown: Mapping[str, Sequence[Wrong]],
) -> tuple[int, list[str]]:
    """Hold wrong results against the task's tolerance, the smallest cases first.

    Args:
        task: The task.
        sampler: Of inputs on the CPU.
        cases: Cases to try them on.
        shown: By case, wrong results that it can show, as far as they are known. Where all of them
            have failed it is not computed again.

    Returns:
        The number of wrong results, and a line for each that passes every case.

    Raises:
        TaskError: Zeros pass, or a written argument as it was before.
    """
    seen: dict[Wrong, _Seen] = {}
    ran: Counter[Wrong | tuple[object, ...]] = (
        Counter()
    )  # cases with an operation; with an omission
    for case in sorted(cases, key=lambda c: work_of(task, c)):
        known = shown.get(case.name)
        if known is not None and all(w in seen and seen[w].found for w in known):
            _count(ran, [w for w in known if isinstance(w, Omission)])
            continue
        input_set = sampler.fresh(case, 1)
        for wrong, results in _wrong_results(task, sampler, input_set, seen, ran):
            _compare(task, sampler, input_set, results, seen.setdefault(wrong, _Seen()))
    holes = []
    for wrong, so_far in seen.items():
        if so_far.found:
            continue
        if isinstance(wrong, Omission):
            # Of no more than rounding, it is the same operation: a maximum that is subtracted
            # before exponentials, where float64 does not overflow.
            # Where shapes allow for it in some cases only, it does next to nothing there: a mean of
            # one column, a product of one number that has been divided by itself. In the others no
            # kernel could do the same.
            rare = ran[wrong] < ran[wrong.call_id]
            if not rare and not 0 < so_far.largest <= 1:
                holes.append(f"{wrong} {_PASSES}")
            continue
        name, change = wrong
        key = f"results.{name}" if name in {r.name for r in task.results} else f"arguments.{name}"
        if change in _FAULTS:
            passes, reason = _FAULTS[change]
            raise toml_error(
                task,
                key,
                f"{passes} every check case ({len(cases)}): k and floor allow for too much, or "
                f"{reason}",
            )
        holes.append(f"task.toml: {key}: {change} {_PASSES}")
    return len(seen), holes


def _count(ran: Counter[Wrong | tuple[object, ...]], omissions: Collection[Omission]) -> None:
    """Count a case with operations, by omission and by call."""
    ran.update(list(omissions))
    ran.update({o.call_id for o in omissions})


def check_idle(task: Task, kind: Kind) -> tuple[str, ...]:
    """Hold the operations that are declared to change nothing against all cases.

    Returns:
        A line for each place of each, with the reason that task.toml gives.

    Raises:
        TaskError: One is none of the reference's, or changes a result.
    """
    if not task.without_effect:
        return ()
    file = task.folder / "reference.py"
    found: dict[Omission, None] = {}  # calls with the same words are different ones
    seen: dict[str, None] = {}
    declared = {e.operation: e.reason for e in task.without_effect}
    sampler = InputSampler(task, torch.device("cpu"), InputPolicy(pool=YARDSTICKS))
    cases = [c for c in checked_cases(task, kind) if work_of(task, c) <= MOST_WORK]
    cases += [c for c in timed_cases(task, kind) if work_of(task, c) <= MOST_WORK / 8]
    for case in sorted(cases, key=lambda c: work_of(task, c)):
        input_set = sampler.fresh(case, 1)
        with OmissionRecorder(file) as recorder:
            expected = sampler.call("reference", input_set)
        seen |= {o.words: None for o in recorder.found}
        for omission in recorder.found:
            if omission.words not in declared:
                continue
            found[omission] = None
            try:
                with Omitter(file, omission, recorder.known):
                    results = sampler.call("reference", input_set)
            except TaskError:
                results = ()
            if not (results and all(map(_same_values, results, expected))):
                text = f"{omission} changes the results of case {case.name}: remove it there"
                raise toml_error(task, "without_effect", text)
    other: Kind = "cpu" if kind == "gpu" else "gpu"
    for case in task.cases(other).check:  # a flag of theirs may decide that it runs
        if declared.keys() <= seen.keys():
            break
        if work_of(task, case) <= MOST_WORK:
            with OmissionRecorder(file) as recorder:
                sampler.call("reference", sampler.fresh(case, 1))
            seen |= {o.words: None for o in recorder.found}
    for words in declared:
        if words not in seen:
            near = difflib.get_close_matches(words, seen, 3, 0.0)
            text = f"no case runs {words!r}; there are {'; '.join(map(repr, near))}"
            raise toml_error(task, "without_effect", text)
    return tuple(f"{o}: {declared[o.words]}" for o in found)


def _same_values(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors hold equal numbers: NaN equals NaN, and 0 is -0."""
    return bool(torch.equal(one, two) or ((one == two) | (one.isnan() & two.isnan())).all())


def _wrong_results(
    task: Task,
    sampler: InputSampler,
    input_set: InputSet,
    seen: Mapping[Wrong, _Seen],
    ran: Counter[Wrong | tuple[object, ...]],
) -> Iterator[tuple[Wrong, tuple[torch.Tensor, ...] | None]]:
    """Wrong results that no case has shown yet; None where the reference fails without that."""

    def open_(wrong: Wrong) -> bool:
        return wrong not in seen or not seen[wrong].found

    changes = [(i, w) for i, w in changes_of(task, input_set.case) if open_(w)]
    expected = sampler.expected(input_set) if changes else ()
    for i, (name, change) in changes:
        value = (
            input_set.tensors[name].to(expected[i].dtype)
            if change == _KEPT
            else _changed(expected[i], change, task.compared[i].row_dims)
        )
        if value is not None:
            yield (name, change), (*expected[:i], value, *expected[i + 1 :])
    file = task.folder / "reference.py"
    with OmissionRecorder(file) as recorder:
        sampler.call("reference", input_set)
    _count(ran, recorder.found)
    for omission in recorder.found:
        if not open_(omission):
            continue
        try:
            with Omitter(file, omission, recorder.known):
                results = sampler.call("reference", input_set)
        except TaskError:
            yield omission, None
        else:
            yield omission, results


def changes_of(task: Task, case: Case) -> Iterator[tuple[int, tuple[str, str]]]:
    """Changes to each result, with its number: wrong results, where `_changed` has some."""
    for i, result in enumerate(task.compared):
        small = dtype_of(task.dtype(result.dtype, case)).itemsize == 1
        kept = [_KEPT] if i >= len(task.results) else []
        for change in (_ZEROS, _COARSE if small else _SCALED, _MOVED, *kept):
            yield i, (result.name, change)


def can_change(ref: torch.Tensor, change: str, row_dims: int) -> bool:
    """Whether `_changed` has a wrong result."""
    if change in _FACTORS:
        return ref.dtype.is_floating_point
    return change != _MOVED or (_rows(ref, row_dims) > 1 and ref.numel() > 0)


def _rows(ref: torch.Tensor, row_dims: int) -> int:
    return math.prod(ref.shape[: ref.dim() - row_dims]) if row_dims else 1


def _changed(ref: torch.Tensor, change: str, row_dims: int) -> torch.Tensor | None:
    """A wrong result; None if there is no such."""
    if not can_change(ref, change, row_dims):
        return None
    if change == _ZEROS:
        return torch.zeros_like(ref)
    if change in _FACTORS:
        return ref * _FACTORS[change]
    return ref.reshape(_rows(ref, row_dims), -1).roll(1, 0).reshape(ref.shape)


def _compare(
    task: Task,
    sampler: InputSampler,
    input_set: InputSet,
    results: tuple[torch.Tensor, ...] | None,
    seen: _Seen,
) -> None:
    """Hold a wrong result against the reference, as a candidate's is."""
    if results is None:
        seen.found = True
        return
    case = input_set.case
    if task.accept:
        dtypes = [dtype_of(task.dtype(r.dtype, case)) for r in task.compared]
        own = [r.to(d) for r, d in zip(results, dtypes, strict=True)]
        try:
            accepted, _ = sampler.accepted(input_set, own)
        except NotAcceptable:
            seen.found = True
            return
        # In the declared dtype only where the rule changed something: rounding is no difference.
        results = tuple(
            wide if same_bits(taken, mine) else taken
            for wide, mine, taken in zip(results, own, accepted, strict=True)
        )
    parts, expected = sampler.valid_parts(input_set, results, sampler.expected(input_set))
    for result, wrong, ref, yardstick in zip(
        task.compared,
        parts,
        expected,
        sampler.torch_errors(input_set),
        strict=True,
    ):
        if same_bits(wrong, ref):  # the other caches of a model's step
            continue
        out = wrong.to(dtype_of(task.dtype(result.dtype, case)))
        errors = numerics.measure_errors(out, ref, result.row_dims)
        limit = numerics.allowed(yardstick, result, out.dtype)
        if not numerics.share(errors, limit) <= 1:
            seen.found = True
            return
        exact = numerics.measure_errors(wrong, ref, result.row_dims)
        difference = max(exact.row, exact.element) / SAME.get(ref.dtype, 1.0)
        seen.largest = max(seen.largest, difference, sys.float_info.min)


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors hold the same bytes: NaN equals NaN, and 0 is not -0."""
    pair = [t.contiguous().reshape(-1).view(torch.uint8) for t in (one, two) if t.numel()]
    return len(pair) < 2 or bool(torch.equal(*pair))
