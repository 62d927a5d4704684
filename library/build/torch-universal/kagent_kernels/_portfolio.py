"""Choice of a kernel for a call: the fastest of those measured at the nearest shape.

A table names for each device the shapes that were measured and who was the fastest there, and for
each kernel the shapes at which it was found correct. A call takes the answer of the nearest shape
whose kernel is correct at the call's own shape, and torch where there is none. A call that is
smaller than every measured shape takes torch, too: it costs what Python and a launch cost, and
nobody measured that a kernel's are less than torch's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Size = int | float | bool
FORMAT = 1
TORCH = "torch"
"""Stands for torch's own implementation, the reference."""


@dataclass(frozen=True, slots=True)
class CheckedRegion:
    """Shapes at which a kernel was found correct.

    Dimensions of `low` and `high` lie between them, those of `values` are among them, and the
    product of the former is at most `volume`.
    """

    dtype: str
    low: Mapping[str, Size]
    high: Mapping[str, Size]
    values: Mapping[str, tuple[Size, ...]]
    volume: float

    def covers(self, dtype: str, dims: Mapping[str, Size]) -> bool:
        """Whether a call lies in it."""
        if dtype != self.dtype or dims.keys() != self.low.keys() | self.values.keys():
            return False
        within = all(low <= dims[n] <= self.high[n] for n, low in self.low.items())
        among = all(any(_same(dims[n], v) for v in vs) for n, vs in self.values.items())
        return within and among and math.prod(dims[n] for n in self.low) <= self.volume


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel of a table. `repeats`: whether equal calls have equal bits; tables of before
    2026-11-30 do not say so.
    """

    id: str
    language: str
    capabilities: tuple[str, ...]
    pitched: bool
    repeats: bool
    configs: tuple[Mapping[str, object], ...]
    regions: tuple[CheckedRegion, ...]


@dataclass(frozen=True, slots=True)
class MeasuredPoint:
    """A measured shape, the fastest there, and the configuration each kernel had."""

    dtype: str
    dims: Mapping[str, Size]
    best: str
    config: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class DeviceEntry:
    """Measurements on one model of device."""

    name: str
    kind: str
    capability: str
    points: tuple[MeasuredPoint, ...]


@dataclass(frozen=True, slots=True)
class Chosen:
    """Use this kernel, with this configuration."""

    kernel: Kernel
    config: int


@dataclass(frozen=True, slots=True)
class ReferenceCall:
    """Use torch. `reason`: what a user should know about it; None where nothing is amiss."""

    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Portfolio:
    """portfolio/TASK.json."""

    task: str
    entry: str
    dims: tuple[str, ...]
    kernels: Mapping[str, Kernel]
    devices: Mapping[str, DeviceEntry]
    dtype_from: int | str | None = None
    """Position of the argument that has a call's dtype, or the dtype of all calls; None, in tables
    of before 2026-11-26: the first tensor has it.
    """

    def dtype_of(self, args: Sequence[Any]) -> str:
        """The dtype of a call, as regions and points name it: that of the task's cases."""
        return self.dtype_among([str(a.dtype) if hasattr(a, "dtype") else "" for a in args])

    def dtype_among(self, dtypes: Sequence[str]) -> str:
        """The same of the names of all arguments' dtypes, "" of those that are no tensors."""
        if isinstance(self.dtype_from, str):
            return self.dtype_from
        found = next(d for d in dtypes if d) if self.dtype_from is None else dtypes[self.dtype_from]
        return found.removeprefix("torch.")

    def lacks(self, device: DeviceEntry, dtype: str) -> str | None:
        """Say why no call of a dtype on a device has a kernel; None where some may. `device`: its
        points are not looked at.
        """
        able = self._able(device)
        if self._table(device) is None or not able:
            return self._unknown_device(device)
        dtypes = {r.dtype for k in able.values() for r in k.regions}
        if dtype in dtypes:
            return None
        return (
            f"its kernels for {device.name} were checked with {_listed(dtypes)}, not {dtype}. "
            f"Convert the tensors, or export a run of the task {self.task} with this dtype"
        )

    def choose(
        self,
        device: DeviceEntry,
        dtype: str,
        dims: Mapping[str, Size],
        failed: Collection[str] = (),
    ) -> Chosen | ReferenceCall:
        """Choose the kernel for a call.

        Args:
            device: The one it runs on; its points are not looked at.
            dtype: Of the call, by `dtype_of`.
            dims: Values of the task's dimensions and flags.
            failed: Kernels that did not run here.
        """
        if (reason := self.lacks(device, dtype)) is not None:
            return ReferenceCall(reason)
        table, able = self._table(device), self._able(device)
        assert table is not None
        points = _by_distance(table.points, dtype, dims)
        if elements(dims) < min((elements(p.dims) for p in points), default=0):
            return ReferenceCall()
        for point in points:
            kernel = able.get(point.best)
            if point.best == TORCH or point.best in failed:
                break
            if kernel is not None and any(r.covers(dtype, dims) for r in kernel.regions):
                return Chosen(kernel, point.config.get(kernel.id, 0))
        return ReferenceCall()

    def _able(self, device: DeviceEntry) -> Mapping[str, Kernel]:
        """Kernels that were compiled for a device."""
        return {i: k for i, k in self.kernels.items() if device.capability in k.capabilities}

    def _table(self, device: DeviceEntry) -> DeviceEntry | None:
        own = self.devices.get(device.name)
        if own is not None and own.kind == device.kind:
            return own
        alike = (device.kind, device.capability)
        return next((d for d in self.devices.values() if (d.kind, d.capability) == alike), None)

    def _unknown_device(self, device: DeviceEntry) -> str:
        known = _listed({f"{d.name} ({d.capability})" for d in self.devices.values()})
        return (
            f"nothing was measured on {device.name} ({device.capability}) or a similar device; "
            f"the library knows {known or 'no device'}. Run the task {self.task} on this machine "
            "and export the run into the library"
        )


def read_portfolio(path: Path) -> Portfolio:
    """Read a table.

    Raises:
        ValueError: Its format is of another version.
    """
    data = json.loads(path.read_text(encoding="utf-8"))
    if data["format"] != FORMAT:
        raise ValueError(f"{path}: format {data['format']}, this library reads {FORMAT}")
    kernels = {
        name: Kernel(
            id=name,
            language=k["language"],
            capabilities=tuple(k["capabilities"]),
            pitched=k["pitched"],
            repeats=k.get("repeats", False),
            configs=tuple(k["configs"]) or ({},),
            regions=tuple(map(_region, k["regions"])),
        )
        for name, k in data["kernels"].items()
    }
    devices = {
        name: DeviceEntry(name, d["kind"], d["capability"], tuple(map(_point, d["points"])))
        for name, d in data["devices"].items()
    }
    dims, dtype_from = tuple(data["dims"]), data.get("dtype_from")
    return Portfolio(data["task"], data["entry"], dims, kernels, devices, dtype_from)


def _region(data: Mapping[str, object]) -> CheckedRegion:
    low, high, flags = data["low"], data["high"], data.get("flags", {})
    volume = data.get("volume", math.inf)
    assert isinstance(low, dict)
    assert isinstance(high, dict)
    assert isinstance(flags, dict)
    assert isinstance(volume, int | float)
    values = {n: tuple(v) for n, v in flags.items()}
    return CheckedRegion(str(data["dtype"]), low, high, values, volume)


def _point(data: Mapping[str, object]) -> MeasuredPoint:
    dims, best, config = data["dims"], str(data["best"]), data.get("config", {})
    assert isinstance(dims, dict)
    if isinstance(config, int):
        config = {best: config}
    assert isinstance(config, dict)
    return MeasuredPoint(str(data["dtype"]), dims, best, config)


def _by_distance(
    points: Collection[MeasuredPoint], dtype: str, dims: Mapping[str, Size]
) -> list[MeasuredPoint]:
    """Points with the call's flags, the nearest first; of its dtype, else of one as wide."""
    alike = [p for p in points if p.dims.keys() == dims.keys() and _flags(p.dims) == _flags(dims)]
    own = [p for p in alike if p.dtype == dtype]
    width = WIDTH.get(dtype)
    near = own or [p for p in alike if width is not None and WIDTH.get(p.dtype) == width]
    return sorted(near, key=lambda p: _distance(p.dims, dims))


def elements(dims: Mapping[str, Size]) -> int:
    """The size of a call: the product of its dimensions, which are whole numbers above 0."""
    return math.prod(v for v in dims.values() if type(v) is int and v > 0)


WIDTH = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


def _flags(dims: Mapping[str, Size]) -> dict[str, bool]:
    return {n: v for n, v in dims.items() if isinstance(v, bool)}


def _distance(a: Mapping[str, Size], b: Mapping[str, Size]) -> float:
    """Squared, in powers of two. Values without a logarithm are alike or one apart."""
    return sum(
        math.log2(v / b[n]) ** 2 if v > 0 and b[n] > 0 else float(v != b[n])
        for n, v in a.items()
        if not isinstance(v, bool)
    )


def _same(a: Size, b: Size) -> bool:
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names))
