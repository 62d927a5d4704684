"""Regions where a kernel was found correct: the checked cases of each dtype, as bounds.

A case shows that one shape works. Between two checked sizes of a dimension lie sizes that were not
checked; the check cases are chosen odd, prime and extreme so that what holds for them holds between
them. That is not so for a dimension of which a task has two or three sizes: a kernel for heads of
64 and of 128 elements may not know 96.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import cast

from kagent_sandbox.data.build import Value
from kagent_sandbox.data.task import Case
from kagent_sandbox.data.verdict import CaseError

from kagent.export.record import RegionRecord

FEW = 3
"""Distinct sizes up to which a dimension must be one of those that were checked."""


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
    sizes: dict[str, set[Value]] = defaultdict(set)
    for dims in (d for found in by_dtype.values() for d in found):
        for name, value in dims.items():
            sizes[name].add(value)
    ranged = [n for n, values in sizes.items() if _is_range(values)]
    return tuple(
        replace(_region(d, by_dtype[d], ranged), element_error=worst.get(d))
        for d in sorted(by_dtype)
    )


def _is_range(values: set[Value]) -> bool:
    whole = all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in values)
    return whole and len(values) > FEW


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
