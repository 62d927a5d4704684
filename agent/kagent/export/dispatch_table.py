"""The table that an operator's dispatch reads: which kernel is used where, on which device."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path

from kagent_sandbox.data.case import Case
from kagent_sandbox.data.race import EAGER
from kagent_sandbox.data.task import Task
from kagent_sandbox.data.verdict import SpeedVerdict

from kagent.export.generic import dtype_source
from kagent.export.library._portfolio import FORMAT
from kagent.export.record import (
    TORCH,
    DeviceRecord,
    KernelRecord,
    OperatorRecord,
    PointRecord,
    RegionRecord,
    Timing,
)

_UNORDERED = re.compile(
    r"atomic|\batom\.|\bred\.|\bcp\.reduce\b|\bmultimem\b|reduce_add"
    r"|(?<!\bdeclare )\breduction\s*\(",
    re.IGNORECASE,
)
"""Atomic operations of Triton, Gluon, CUDA, PTX, CuTe and C++, and reductions of OpenMP."""

_OF_ONE_THREAD = re.compile(
    r"\bomp\s+simd(?:(?:[ \t]|\\\n)*"
    r"(?:aligned|collapse|lastprivate|linear|private|reduction|safelen|simdlen)\s*\([^()]*\))+"
)
"""A directive of OpenMP that shares nothing among threads, with its clauses and no more: what else
is on its line may be code behind a comment."""


def portfolio_json(operator: OperatorRecord) -> str:
    """portfolio/TASK.json of a library."""
    table = {
        "format": FORMAT,
        "task": operator.task,
        "entry": operator.entry,
        "dims": list(operator.dims),
        "dtype_from": dtype_source(task_of(operator)),
        "least": least(operator),
        "kernels": {k.id: _kernel(k, operator) for k in operator.kernels},
        "devices": {d.name: _device(d) for d in operator.devices},
    }
    return json.dumps(table, indent=1, allow_nan=False) + "\n"


def least(operator: OperatorRecord) -> int:
    """Elements of all tensors together in the smallest call that was measured on any device."""
    task = task_of(operator)
    shapes = [a.shape for a in task.arguments if a.shape is not None]
    found = []
    for point in (p for d in operator.devices for p in d.points):
        case = Case(name="point", dtype=point.dtype, **dict(point.dims))  # type: ignore[arg-type]
        sizes = (math.prod(int(task.formula(s, case)) for s in shape) for shape in shapes)
        found.append(sum(sizes))
    return min(found, default=0)


def task_of(operator: OperatorRecord) -> Task:
    """The task of an operator, from the text that the library keeps."""
    return Task(**tomllib.loads(operator.task_toml), folder=Path(operator.task))


def _kernel(kernel: KernelRecord, operator: OperatorRecord) -> dict[str, object]:
    used = [d for d in operator.devices if any(kernel.id in p.times for p in d.points)]
    return {
        "language": kernel.language,
        "capabilities": sorted({d.capability for d in used}),
        "pitched": kernel.pitched,
        "repeats": repeats(kernel),
        "configs": [dict(c) for c in kernel.configs],
        "regions": [_region(r) for r in kernel.regions],
    }


def repeats(kernel: KernelRecord) -> bool:
    """Whether equal calls have equal bits: nothing in its text may be in another order each time.

    Atomic operations may, also those that only hand out work.
    """
    texts = [_OF_ONE_THREAD.sub("", t) for t in (kernel.source, *(c.text for c in kernel.compiled))]
    return not any(_UNORDERED.search(text) for text in texts)


def _region(region: RegionRecord) -> dict[str, object]:
    return {
        "dtype": region.dtype,
        "low": dict(region.low),
        "high": dict(region.high),
        "flags": {n: list(v) for n, v in region.flags.items()},
        "volume": region.volume,
    }


def _device(device: DeviceRecord) -> dict[str, object]:
    return {
        "kind": device.kind,
        "capability": device.capability,
        "points": [_point(p) for p in device.points],
    }


def _point(point: PointRecord) -> dict[str, object]:
    kernels = {n: t.us for n, t in point.times.items() if n in point.config}
    eager = {TORCH: point.times[EAGER].us} if EAGER in point.times else {}
    return {
        "dtype": point.dtype,
        "dims": dict(point.dims),
        "best": point.best,
        "config": dict(point.config),
        "us": {n: round(us, 3) for n, us in {**kernels, **eager}.items()},
    }


def best_of(
    times: Mapping[str, Timing],
    kernels: Collection[str],
    beside_eager: Mapping[str, SpeedVerdict] | None,
) -> str:
    """Choose the kernel to use at a point.

    An operator that uses no kernel calls torch's eager implementation, so that is what a kernel has
    to beat here, however fast torch.compile may be.

    Args:
        times: Of everyone at the point.
        kernels: The kernels among them.
        beside_eager: Verdicts of kernels beside eager torch. A kernel that has one must be FASTER
            to be used. None: the fastest kernel is used whatever torch takes.

    Returns:
        A kernel's id, or TORCH.
    """
    known = beside_eager or {}
    able = [n for n in kernels if known.get(n, SpeedVerdict.FASTER) is SpeedVerdict.FASTER]
    return min(able, key=lambda n: times[n].us, default=TORCH)


def used(point: PointRecord) -> str:
    """Whose time it is that an operator takes there."""
    return EAGER if point.best == TORCH else point.best


def gain(point: PointRecord, name: str) -> float | None:
    """Time of the fastest of torch / time of a kernel or a baseline."""
    torch = point.times.get(TORCH)
    return None if torch is None else torch.us / point.times[name].us


def mean_gain(device: DeviceRecord) -> float | None:
    """Geometric mean of the gains of whoever is used, over a device's points."""
    found = [g for p in device.points if (g := gain(p, used(p))) is not None]
    return math.exp(sum(map(math.log, found)) / len(found)) if found else None
