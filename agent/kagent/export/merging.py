"""An export into a library that exists: kernels are added, slower ones replaced, nothing else goes.

Old and new kernels of a task were raced together on this machine before they come here, so that
its measurements replace the old ones of the same device. Measurements of other devices stay as they
are. A kernel that no device uses any more, in any of its points, is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from kagent.export.record import (
    ChangeRecord,
    DeviceRecord,
    KernelRecord,
    LibraryRecord,
    OperatorRecord,
    PointRecord,
)


def merge_operator(
    old: OperatorRecord | None, new: OperatorRecord
) -> tuple[OperatorRecord, list[str]]:
    """The operator as it is to be, and what changed, in words.

    `new` has one device, this one, and every kernel that was measured on it: also old ones, where
    these were raced with the new ones.
    """
    (device,) = new.devices
    others = tuple(d for d in old.devices if d.name != device.name) if old else ()
    known = {k.id: k for k in (*(old.kernels if old else ()), *new.kernels)}
    used = {p.best for d in (*others, device) for p in d.points}
    kept = tuple(k for k in known.values() if k.id in used)
    gone = [i for i in known if i not in used]
    devices = tuple(_without(d, gone) for d in (*others, device))
    merged = replace(new, kernels=kept, devices=devices)
    return merged, list(_words(old, new, merged, gone))


def _without(device: DeviceRecord, gone: Sequence[str]) -> DeviceRecord:
    def left(point: PointRecord) -> PointRecord:
        times = {n: t for n, t in point.times.items() if n not in gone}
        return replace(
            point, times=times, config={n: i for n, i in point.config.items() if n not in gone}
        )

    return replace(device, points=tuple(map(left, device.points)))


def _words(
    old: OperatorRecord | None, new: OperatorRecord, merged: OperatorRecord, gone: Sequence[str]
) -> list[str]:
    before = {k.id for k in old.kernels} if old else set()
    measured = {k.id for k in new.kernels}
    lines = []
    for kernel in merged.kernels:
        where = _where(merged, kernel)
        if kernel.id not in before:
            lines.append(f"{merged.task}: added {kernel.id}, used for {where}")
    for name in gone:
        what = "replaced" if name in before else "left out"
        slower = "slower than others on every measured shape"
        why = slower if name in measured else "which was not measured again"
        lines.append(f"{merged.task}: {what} {name}, {why}")
    return lines


def _where(operator: OperatorRecord, kernel: KernelRecord) -> str:
    points = [(d, p) for d in operator.devices for p in d.points if p.best == kernel.id]
    names = ", ".join(dict.fromkeys(d.name for d, _ in points))
    return f"{len(points)} of {sum(len(d.points) for d in operator.devices)} shapes ({names})"


def merge_library(
    old: LibraryRecord | None,
    name: str,
    kagent: str,
    operators: Sequence[tuple[OperatorRecord, list[str]]],
) -> LibraryRecord:
    """The library with some operators replaced or added.

    The version is 1.0.0 at first. A new operator or kernel raises its second number, new
    measurements alone its third.
    """
    lines = [line for _, words in operators for line in words]
    if old is None:
        version = "1.0.0"
        lines = lines or ["first export"]
        kept: tuple[OperatorRecord, ...] = ()
    else:
        new_kernels = any(": added " in line for line in lines)
        version = _next(old.version, minor=new_kernels)
        lines = lines or ["measured again; no kernel changed"]
        replaced = {o.task for o, _ in operators}
        kept = tuple(o for o in old.operators if o.task not in replaced)
    change = ChangeRecord(version, time.strftime("%Y-%m-%d"), tuple(lines))
    everything = sorted((*kept, *(o for o, _ in operators)), key=lambda o: o.task)
    return LibraryRecord(
        name=name,
        version=version,
        kagent=kagent,
        operators=tuple(everything),
        history=(change, *(old.history if old else ())),
    )


def _next(version: str, *, minor: bool) -> str:
    first, second, third = (int(n) for n in version.split("."))
    return f"{first}.{second + 1}.0" if minor else f"{first}.{second}.{third + 1}"
