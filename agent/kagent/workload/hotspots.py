"""Regions of a step, ranked by the time that they take above what this device allows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kagent_sandbox.device.detect import has_gpu
from kagent_sandbox.device.table import device_for, find_device
from kagent_sandbox.errors import UserError
from kagent_sandbox.judge.timing.metrics import memory_us

from kagent.runs.files import place_for, write_file
from kagent.text import short
from kagent.workload.running import require_script, run_script
from kagent.workload.step_kind import StepKind

if TYPE_CHECKING:
    from kagent_sandbox.data.device import Ceilings

_IDLE = 0.3  # share of a step without a kernel from which on it is bound by its host
_HOST_SHARE = 0.4  # the same for a CPU, where the rest is Python, torch's dispatcher, and loading
_MUCH = 0.2  # share of a step from which on copies, or communication, are named
_NEAR = 0.9  # share of the ceiling above which nothing is left to gain


@dataclass(frozen=True)
class Hotspot:
    """A region, with all its occurrences in a step."""

    number: int  # its place in the ranking, from 1
    key: str  # of operations and shapes: the same in the next run
    kind: str  # "fused", "product", "attention", "copy", "communication", "other"
    title: str
    place: str  # the module
    phase: str  # "forward", "backward", "optimizer"
    count: int  # occurrences in a step
    us: float  # of all of them
    floor_us: float  # the same at the device's measured ceilings
    share: float  # of the step
    step_gain: float  # how much faster the step is if the region runs at the ceilings: at most
    ops: int
    inputs: Sequence[str]
    outputs: Sequence[str]
    read_bytes: int  # of one occurrence, at least
    written_bytes: int
    flops: Mapping[str, float]  # of one occurrence, by dtype
    modules: Mapping[str, float]  # µs by module
    source: Mapping[str, str]  # of the region as a module: "text", or why there is none: "refused"

    @property
    def headroom_us(self) -> float:
        """Time above the ceilings."""
        return max(0.0, self.us - self.floor_us)

    @property
    def of_ceiling(self) -> float:
        """Share of the ceiling that it attains. Caches may take it above 1."""
        return self.floor_us / self.us if self.us else 0.0


@dataclass(frozen=True)
class Hotspots:
    """All of a script's regions, and what a step is bound by."""

    script: str
    device: str
    kind: str  # "gpu" or "cpu"
    trains: bool
    step_us: float  # median of steps without a profiler
    ops_us: float  # of all operations
    busy_us: float | None  # at least one kernel runs; None on a CPU
    launches: float | None  # kernels in a step; None on a CPU
    compiled_us: float
    regions: Sequence[Hotspot]
    kernels: Mapping[str, float]  # µs by kernel of a GPU
    notes: Sequence[str]  # what disturbed the times, and what the step is bound by, in words

    def find(self, wanted: str) -> Hotspot:
        """Return a region by its number or its key.

        Raises:
            UserError: There is none.
        """
        for region in self.regions:
            if wanted in (str(region.number), region.key):
                return region
        raise UserError(
            f"--take {wanted}: no such region: expected 1 to {len(self.regions)}, or the id of one"
        )


def find_hotspots(
    script: Path,
    args: Sequence[str],
    *,
    warmup: int,
    steps: int,
    kind: StepKind,
    say: Callable[[str], None] = lambda _: None,
) -> Hotspots:
    """Run some steps of a script and rank what they do.

    Args:
        script: A Python file of the user's.
        args: Its arguments.
        warmup: Steps before the first one that counts.
        steps: Steps of each of the three measurements: without a profiler, by kernel, by operation.
        kind: What ends a step.
        say: Is told what is being done.

    Raises:
        UserError: The script fails or has too few steps.
        MachineError: The device's ceilings cannot be measured.
    """
    require_script(script)
    say("ceilings of the device")
    name, ceilings = device_ceilings()
    say(f"running {script}")
    request = {"warmup": warmup, "steps": steps, "kind": kind, "seed": 0}
    seen = run_script("observing", script, args, request)
    return rank(str(script), name, ceilings, seen)


def device_ceilings() -> tuple[str, Ceilings]:
    """Name and measured ceilings of this machine's GPU, else of its CPU.

    Raises:
        MachineError: They cannot be measured.
    """
    entry = find_device(device_for("gpu" if has_gpu() else "cpu"))
    with contextlib.closing(entry.open(0, products=True)) as backend:
        return backend.facts.name, backend.ceilings()


def rank(script: str, device: str, ceilings: Ceilings, seen: Mapping[str, Any]) -> Hotspots:
    """Rank what was seen (`observing.observe`) by the time above the ceilings, the most first."""
    step_us = float(seen["step_us"])
    # Profiled operations take longer, and on a GPU they may overlap: together no more than a step.
    scale = min(1.0, step_us / max(sum(r["us"] for r in seen["regions"]), 1e-9))
    rows = [(_scaled(region, scale), _floor_us(region, ceilings)) for region in seen["regions"]]
    rows.sort(key=lambda row: row[1] - row[0]["us"])
    regions = []
    for number, (region, floor_us) in enumerate(rows, 1):
        gain = min(max(0.0, region["us"] - floor_us), 0.999 * step_us)
        regions.append(
            Hotspot(
                number=number,
                floor_us=floor_us,
                share=region["us"] / step_us,
                step_gain=step_us / (step_us - gain),
                **region,
            )
        )
    ops_us = sum(r.us for r in regions)
    return Hotspots(
        script=script,
        device=device,
        kind=seen["device"],
        trains=seen["trains"],
        step_us=step_us,
        ops_us=ops_us,
        busy_us=seen["busy_us"],
        launches=seen["launches"],
        compiled_us=seen["compiled_us"],
        regions=regions,
        kernels=seen["kernels"],
        notes=_notes(seen, regions, step_us, ops_us),
    )


def _scaled(region: Mapping[str, Any], scale: float) -> dict[str, Any]:
    modules = {name: us * scale for name, us in region["modules"].items()}
    return {**region, "us": region["us"] * scale, "modules": modules}


def _floor_us(region: Mapping[str, Any], ceilings: Ceilings) -> float:
    """Time of all occurrences at the ceilings: of memory, or of matrix products."""
    us = memory_us(region["read_bytes"], region["written_bytes"], ceilings)
    products_us = 0.0
    for dtype, flops in region["flops"].items():
        peak = ceilings.tflop_per_s.get(dtype)
        products_us += flops / peak / 1e6 if peak else 0.0
    return max(us, products_us) * float(region["count"])


def _notes(
    seen: Mapping[str, Any], regions: Sequence[Hotspot], step_us: float, ops_us: float
) -> list[str]:
    """Facts to know before a kernel is written."""
    found: list[str] = []
    if seen["disturbed"]:
        reasons = "; ".join(seen["disturbed"])
        found.append(f"disturbed: {reasons}. Times are longer than the script's own")
    gpu = seen["device"] == "gpu"
    if gpu and (idle := 1 - seen["busy_us"] / step_us) > _IDLE:
        found.append(
            f"bound by launches or by the host: the GPU has nothing to do in {idle:.0%} of the "
            f"step ({seen['launches']:.0f} kernels). CUDA graphs or "
            "torch.compile(mode='reduce-overhead') come before faster kernels"
        )
    if not gpu and (outside := 1 - ops_us / step_us) > _HOST_SHARE:
        found.append(
            f"bound by the host: {outside:.0%} of the step is outside of torch's operations "
            "(Python, dispatch, loading of data). Faster kernels change only the rest"
        )
    for kind, advice in (
        ("copy", "look at layouts, casts and transfers first"),
        ("communication", "overlap it with computation first"),
    ):
        share = sum(r.us for r in regions if r.kind == kind) / step_us
        if share > _MUCH:
            found.append(f"bound by {kind}: {share:.0%} of the step; {advice}")
    if seen["compiled_frames"]:
        found.append(
            f"torch.compile has {seen['compiled_frames']} functions of it already: regions are "
            "shown as they run without it, and their times are not parts of the compiled step"
        )
    best = max(regions, key=lambda r: r.headroom_us, default=None)
    if best is not None and best.of_ceiling > _NEAR:
        found.append("every region is near its ceiling: there is nothing to gain from a kernel")
    return found


def to_json(found: Hotspots) -> dict[str, Any]:
    """All of it as data. The regions' texts are left out."""
    data = asdict(found)
    for region, hotspot in zip(data["regions"], found.regions, strict=True):
        source = region.pop("source")
        region["takes"] = "refused" not in source
        region["refused"] = source.get("refused", "")
        region["headroom_us"] = hotspot.headroom_us
        region["of_ceiling"] = hotspot.of_ceiling
    return data


def write_region(found: Hotspots, wanted: str, folder: Path) -> Path:
    """Write a region as a Python module.

    Args:
        found: The regions.
        wanted: Number or id of one.
        folder: Where; made if need be.

    Returns:
        The file: region_ID.py.

    Raises:
        UserError: There is no such region, it cannot be a function, or the file cannot be written.
    """
    region = found.find(wanted)
    if "refused" in region.source:
        raise UserError(
            f"--take {wanted}: {short(region.title, 60)} cannot be a task: "
            f"{region.source['refused']}"
        )
    path = folder / f"region_{region.key}.py"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(place_for(path), region.source["text"])
    except OSError as e:
        raise UserError(f"{path}: cannot be written ({e.strerror})") from None
    return path
