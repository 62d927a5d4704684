"""Regions where a kernel was found correct: the checked cases of each dtype, as bounds.

A case shows that one shape works. Between two checked sizes of a dimension lie sizes that were not
checked; the check cases are chosen odd, prime and extreme so that what holds for them holds between
them, and the check of a task finds ranges of shapes that no case can lie in (`shape_gaps`). That is
not so for a dimension of which a task has two or three sizes: a kernel for heads of 64 and of 128
elements may not know 96.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import cast

from kagent_sandbox.data.build import Value
from kagent_sandbox.data.case import Case
from kagent_sandbox.data.task import Task
from kagent_sandbox.data.verdict import CaseError
from kagent_sandbox.judge.check.shape_gaps import ranged_dims

from kagent.export.record import RegionRecord


def regions_of(cases: Iterable[Case], errors: Iterable[CaseError] = ()) -> tuple[RegionRecord, ...]:
    """One region per dtype, in the order of their names.

    Args:
        cases: Those that a kernel was checked on.
        errors: Its errors in them, by the cases' names.
    """
    dtypes: dict[str, str] = {}
    by_dtype: dict[str, list[Mapping[str, Value]]] = defaultdict(list)
    for case in cases:
        by_dtype[case.dtype].append(case.dims)
        dtypes[case.name] = case.dtype
    worst: dict[str, float] = {}
    for error in errors:
        if (dtype := dtypes.get(error.case)) is not None:
            worst[dtype] = max(error.element, worst.get(dtype, 0.0))
    ranged = ranged_dims(dims for found in by_dtype.values() for dims in found)
    return tuple(
        replace(_region(d, by_dtype[d], ranged), element_error=worst.get(d))
        for d in sorted(by_dtype)
    )


def checked_padded(task: Task, checked: Iterable[Case], timed: Iterable[Case]) -> bool:
    """Whether rows further apart than they are long were checked in tensors as large as those that
    a library has a kernel for.

    Args:
        task: The task.
        checked: Cases that a kernel was checked on.
        timed: Cases that it is timed on: below the smallest of them a library calls torch.
    """
    least = min(map(task.min_bytes, timed), default=math.inf)
    return any(c.noncontiguous and task.min_bytes(c) >= least for c in checked)


def _region(dtype: str, cases: list[Mapping[str, Value]], ranged: list[str]) -> RegionRecord:
    low = {n: min(int(cast("int", c[n])) for c in cases) for n in ranged}
    high = {n: max(int(cast("int", c[n])) for c in cases) for n in ranged}
    others = [n for n in cases[0] if n not in ranged]
    flags = {n: tuple(sorted({_plain(c[n]) for c in cases})) for n in others}
    volume = max(math.prod(int(cast("int", c[n])) for n in ranged) for c in cases)
    return RegionRecord(dtype, low, high, flags, volume, len(cases))


def _plain(value: Value) -> int | bool:
    assert not isinstance(value, tuple | str), "such tasks are not exported"
    return value if isinstance(value, bool) else int(value)
