"""CARD.md: what a library holds, how fast it is, how that was checked, where it comes from.

Only figures of the library's record are in it; a ratio of two times is bounded by the ends of
their intervals, since the record keeps no samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kagent_sandbox.data.build import Value
from kagent_sandbox.data.verdict import SpeedVerdict, speed_verdict

from kagent.export.dispatch_table import least, mean_gain
from kagent.export.record import (
    TORCH,
    DeviceRecord,
    KernelRecord,
    LibraryRecord,
    PointRecord,
    RegionRecord,
    Timing,
)
from kagent.export.templating import code, figure, listed, render, words
from kagent.text import interval_text, range_text

_BASELINES_OF_TORCH = ("eager", "compile")  # and modes of torch.compile, which begin like it


@dataclass(frozen=True, slots=True)
class Row:
    """One measured shape, in words."""

    case: str
    taken: str  # the kernel that is used there, or torch
    kernel_us: str
    torch_us: str
    ratio: str
    verdict: str  # of the best kernel beside the fastest of torch; "–" where none is known


@dataclass(frozen=True, slots=True)
class CardTable:
    """One operator on one device."""

    device: DeviceRecord
    rows: tuple[Row, ...]
    loses: str
    gain: str  # over all rows, of what is used
    environment: tuple[tuple[str, str], ...]


def card(library: LibraryRecord) -> str:
    """The text of CARD.md."""
    return render(
        "card.md.j2",
        library=library,
        languages=listed([each.title for each in library.languages]),
        devices=_devices(library),
        operators=[
            {
                "operator": o,
                "tables": [_table(d) for d in o.devices],
                "least": least(o),
                "regions": [_region(k, r) for k in o.kernels for r in k.regions],
                "steps": {k.id: [words(s) for s in k.origin.path] for k in o.kernels},
            }
            for o in library.operators
        ],
        models=sorted({m for o in library.operators for k in o.kernels for m in k.origin.models}),
        figure=figure,
        race=_race,
    )


def _devices(library: LibraryRecord) -> list[str]:
    return list(dict.fromkeys(d.name for o in library.operators for d in o.devices))


def _race(kernel: KernelRecord) -> str:
    o = kernel.origin
    return interval_text(o.ratio, o.low, o.high)


def _table(device: DeviceRecord) -> CardTable:
    rows = tuple(row_of(p) for p in device.points)
    used = [r.case for r in rows if r.taken == "torch"]
    faster = sum(r.verdict == SpeedVerdict.FASTER for r in rows)
    loses = f"FASTER than the fastest of torch on {faster} of {len(rows)} measured shapes."
    for verdict in (SpeedVerdict.TIE, SpeedVerdict.SLOWER):
        if found := [r.case for r in rows if r.verdict == verdict]:
            loses += f" {verdict} on {'; '.join(found)}."
    if doubtful := [
        r.case for r in rows if r.taken != "torch" and r.verdict != SpeedVerdict.FASTER
    ]:
        loses += f" A kernel is used without being FASTER than it on {'; '.join(doubtful)}."
    if used:
        loses += f" No kernel is FASTER than eager torch, which is used, on {'; '.join(used)}."
    gain = mean_gain(device)
    return CardTable(
        device, rows, loses, "" if gain is None else f"{gain:.3f}×", tuple(_environment(device))
    )


def row_of(point: PointRecord) -> Row:
    """A measured shape in words: who is used there, and the times."""
    kernels = {n: t for n, t in point.times.items() if n in point.config}
    torch = point.times.get(TORCH)
    name = point.best
    if name == TORCH and kernels:
        name = min(kernels, key=lambda n: kernels[n].us)
    mine = kernels.get(name)
    return Row(
        case=code(shape_text(point.dtype, point.dims)),
        taken="torch" if point.best == TORCH else code(point.best),
        kernel_us="–" if mine is None else _timing(mine),
        torch_us="–" if torch is None else f"{_timing(torch)} {_named(point, torch)}".rstrip(),
        ratio="–" if mine is None or torch is None else ratio_text(torch, mine),
        verdict="–" if mine is None or torch is None else _verdict(point, name, torch, mine),
    )


def shape_text(dtype: str, dims: Mapping[str, Value]) -> str:
    """A call in words: float32 M=1536 N=1024."""
    return " ".join([dtype, *(f"{n}={str(v).lower()}" for n, v in dims.items())])


def ratio_text(torch: Timing, kernel: Timing) -> str:
    """Format the speed-up over torch, and the range between the ends of both intervals."""
    middle, low, high = ratio(torch, kernel)
    return f"{middle:.3f} ({range_text(low, high)})"


def ratio(torch: Timing, kernel: Timing) -> tuple[float, float, float]:
    """Torch's time over the kernel's, the least and the most that both intervals allow."""
    return (
        torch.us / kernel.us,
        torch.low_us / kernel.high_us,
        torch.high_us / kernel.low_us,
    )


def _verdict(point: PointRecord, name: str, torch: Timing, mine: Timing) -> str:
    """Verdict as measured; for an older library, as far as the bounds of its times allow."""
    known = point.verdicts.get(name)
    return known or speed_verdict(*ratio(torch, mine)[1:])


def _timing(timing: Timing) -> str:
    return f"{figure(timing.us)} ({figure(timing.low_us)}–{figure(timing.high_us)})"


def _named(point: PointRecord, torch: Timing) -> str:
    """Name the fastest of eager and the modes of torch.compile."""
    same = [
        n for n, t in point.times.items() if n.startswith(_BASELINES_OF_TORCH) and t.us == torch.us
    ]
    return words(same[0]) if same else ""


def _region(kernel: KernelRecord, region: RegionRecord) -> tuple[str, str, str, str]:
    """Kernel, dtype, shapes and number of cases of a region, as cells."""
    bounds = [f"{n} {low}–{region.high[n]}" for n, low in region.low.items()]
    fixed = [f"{n} {_either(values)}" for n, values in region.flags.items()]
    shapes = ", ".join([*bounds, *fixed])
    if region.volume and len(region.low) > 1:
        shapes += f", {' × '.join(region.low)} at most {region.volume}"
    return kernel.id, region.dtype, words(shapes), str(region.cases)


def _either(values: tuple[int | bool, ...]) -> str:
    return " or ".join(str(v).lower() for v in values)


def _environment(device: DeviceRecord) -> Iterator[tuple[str, str]]:
    """Environment that a device's figures were measured in, as a run stores it."""
    known = device.environment
    versions = known.get("versions")
    if key := known.get("key"):
        yield "device and versions", words(key)
    if isinstance(versions, Mapping):
        yield "packages", words(", ".join(f"{k} {v}" for k, v in versions.items()))
    for name, key in (("isolation", "isolation"), ("host", "host"), ("Python", "python")):
        if known.get(key):
            yield name, words(known[key])
    tested = known.get("selftest")
    if isinstance(tested, Mapping) and "digest" in tested:
        yield "selftest of the judge", words(f"digest {tested['digest']}")
    yield "date", words(device.date)
