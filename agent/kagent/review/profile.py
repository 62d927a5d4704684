"""What a candidate's kernels do on the device: static facts always, counters where ncu is."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kagent_sandbox.build.request import Built
from kagent_sandbox.errors import MachineError
from kagent_sandbox.plan import Launch, Plan
from kagent_sandbox.plan_json import dump_plan
from kagent_sandbox.records import from_json, to_json
from kagent_sandbox.task import Task
from kagent_sandbox.verdict import Passed

from kagent.lineage import Candidate
from kagent.planview import kernel_label
from kagent.prompting.hardware import Hardware
from kagent.session import has_gpu
from kagent.store import History

NCU_LIMIT_S = 180.0
MOST_IDLE = 2.0  # percent; other work of the tensor pipe makes about 1 without any product
_STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALLS: Mapping[str, str] = {
    "long_scoreboard": "waiting for global or local memory",
    "short_scoreboard": "waiting for shared memory or special functions",
    "barrier": "waiting at a barrier of the block",
    "mio_throttle": "the queue of memory instructions is full",
    "lg_throttle": "the queue of global and local accesses is full",
    "math_pipe_throttle": "an arithmetic pipe is busy",
    "wait": "a fixed latency of the instruction before",
    "not_selected": "ready, another warp was issued",
    "no_instruction": "instructions were not fetched yet",
    "membar": "waiting at a memory fence",
    "drain": "waiting for stores at the end",
    "sleeping": "asleep",
    "dispatch_stall": "the dispatcher is held up",
    "imc_miss": "a constant is not in its cache",
    "tex_throttle": "the texture queue is full",
    "branch_resolving": "waiting for a branch",
    "gmma": "waiting for a warp-group product",
}
"""Reasons for which a warp that could not issue had to wait, as ncu calls them."""
METRICS = (
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "lts__t_sector_hit_rate.pct",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "sm__inst_executed_pipe_tensor.sum",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "l1tex__data_bank_conflicts_pipe_lsu.sum",
    *(_STALL.format(reason) for reason in STALLS),
)
_SCALE = {"nsecond": 1e-3, "usecond": 1.0, "msecond": 1e3, "second": 1e6,
          "ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6,
          "byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}  # fmt: skip


@dataclass(frozen=True, slots=True)
class KernelProfile:
    """One launch of a plan. `counters` are ncu's, by metric, in µs, bytes and percent; empty
    without it.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    registers: int
    spill_bytes: int
    shared_bytes: int  # static and dynamic
    blocks_per_unit: int  # resident on a multiprocessor
    occupancy: float  # warps resident over the most that there may be, 0 to 1
    limited_by: tuple[str, ...]
    waves: float  # blocks over those that run at once
    load_bytes: Mapping[str, int]  # global load instructions by width
    counters: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Profile:
    """A candidate on one benchmark case."""

    candidate: int
    case: str
    device: str
    kernels: tuple[KernelProfile, ...]
    why_static: str = ""  # why there are no counters


def static_profile(plan: Plan, hardware: Hardware) -> tuple[KernelProfile, ...]:
    """What the plan and the compiled code tell, launch by launch. GPUs only."""
    kernels = {k.hash: k for k in plan.kernels}
    found = []
    for op in plan.ops:
        if not isinstance(op, Launch):
            continue
        info = kernels[op.kernel]
        threads = math.prod(op.block)
        shared = info.static_shared_bytes + op.shared
        held = hardware.residency(threads, info.registers, shared)
        at_once = max(1, held.blocks * hardware.units)
        found.append(
            KernelProfile(
                kernel=kernel_label(info.name),
                grid=op.grid,
                block=op.block,
                registers=info.registers,
                spill_bytes=info.spill_bytes,
                shared_bytes=shared,
                blocks_per_unit=held.blocks,
                occupancy=held.warps / held.most_warps,
                limited_by=held.limits,
                waves=math.prod(op.grid) / at_once,
                load_bytes={str(w): n for w, n in info.load_bytes.items()},
            )
        )
    return tuple(found)


def find_ncu() -> str | None:
    """Nsight Compute's command line, on the path or in the toolkit's usual places."""
    found = shutil.which("ncu")
    if found is not None:
        return found
    roots = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    usual = [Path(root) / "bin" / "ncu" for root in roots if root]
    usual += sorted(Path("/opt/nvidia/nsight-compute").glob("*/ncu"), reverse=True)
    return next((str(p) for p in usual if p.is_file()), None)


def counters(ncu: str, task: Task, case: str, built: Built, config: int) -> list[dict[str, float]]:
    """Counters of ncu for each launch of a candidate's plan, in order.

    Raises:
        MachineError: ncu does not work here; the text is its own reason.
    """
    plan = built.plans[config, case]
    with tempfile.TemporaryDirectory(prefix="kagent-profile-") as name:
        folder = Path(name)
        (folder / "plan.json").write_bytes(dump_plan(plan))
        request = {"task": str(task.folder), "case": case, "device": 0}
        (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        for kernel in plan.kernels:
            (folder / f"{kernel.hash}.bin").write_bytes(built.binaries[kernel.hash])
        command = [
            *(ncu, "--clock-control", "none", "--profile-from-start", "off", "--csv"),
            *("--page", "raw", "--print-units", "base", "--metrics", ",".join(METRICS)),
            *(sys.executable, "-m", "kagent_sandbox.launch.profile_run", name),
        ]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, env=environment, check=False,
                timeout=NCU_LIMIT_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise MachineError(f"ncu took longer than {NCU_LIMIT_S:.0f} s") from None
    rows = list(read_csv(done.stdout))
    launches = len(plan.launches)
    if done.returncode != 0 or len(rows) < launches:
        raise MachineError(f"ncu: {_reason(done.stdout + done.stderr)}")
    return rows[:launches]


def read_csv(text: str) -> Iterator[dict[str, float]]:
    """Rows of `ncu --csv --page raw`: metrics by name, in µs and bytes where they have units."""
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith('"ID"')]
    if not starts:
        return
    rows = list(csv.reader(io.StringIO("\n".join(lines[starts[-1] :]))))
    if len(rows) < 2:
        return
    names, units = rows[0], rows[1]
    for row in rows[2:]:
        found: dict[str, float] = {}
        for name, unit, value in zip(names, units, row, strict=False):
            if name in METRICS:
                try:
                    found[name] = float(value.replace(",", "")) * _SCALE.get(unit, 1.0)
                except ValueError:
                    continue  # n/a: the device has no such counter
        yield found


def _reason(output: str) -> str:
    """The first line in which ncu says what is wrong."""
    errors = re.findall(r"==(?:ERROR|PROF|WARNING)== (.*)", output)
    marked = re.findall(r"==ERROR== (.*)", output)
    last = [line for line in output.strip().splitlines() if line.strip()][-1:]
    return str((marked or errors or last or ["it ended without a word"])[0])


def with_counters(
    kernels: Sequence[KernelProfile], rows: Sequence[Mapping[str, float]]
) -> tuple[KernelProfile, ...]:
    """Static facts and counters of the same launches."""
    return tuple(replace(k, counters=dict(r)) for k, r in zip(kernels, rows, strict=True))


def in_words(kernel: KernelProfile, hardware: Hardware) -> list[str]:
    """What a kernel engineer would say of it, the most important first."""
    lines = [*_measured_words(kernel, hardware)] if kernel.counters else []
    limits = " and ".join(kernel.limited_by)
    lines.append(
        f"{kernel.blocks_per_unit} blocks on a multiprocessor, {kernel.occupancy:.0%} occupancy, "
        f"limited by {limits}; {kernel.waves:.2f} waves"
    )
    if 1 < kernel.waves < 4 and kernel.waves % 1 and kernel.waves % 1 < 0.5:
        lines.append(
            f"the last wave fills {kernel.waves % 1:.0%} of the device: a tail of "
            f"{(1 - kernel.waves % 1) / math.ceil(kernel.waves):.0%} of its time"
        )
    if kernel.spill_bytes:
        lines.append(f"spills {kernel.spill_bytes} bytes a thread to local memory")
    widths = {int(w): n for w, n in kernel.load_bytes.items() if n}
    if widths and max(widths) < 16:
        lines.append(f"loads at most {max(widths)} bytes at once: 16 would take fewer instructions")
    return lines


def _measured_words(kernel: KernelProfile, hardware: Hardware) -> Iterator[str]:
    c = kernel.counters
    us = c.get("gpu__time_duration.sum")
    moved = c.get("dram__bytes_read.sum", 0.0) + c.get("dram__bytes_write.sum", 0.0)
    if us:
        rate = moved / us / 1e3
        text = f"{us:.1f} µs; DRAM {moved / 1e6:.1f} MB at {rate:.0f} GB/s"
        peak = hardware.theoretical_gb_per_s
        yield f"{text}, {rate / peak:.0%} of {peak:.0f}" if peak else text
    stalls = {r: c.get(_STALL.format(r), 0.0) for r in STALLS}
    total = sum(stalls.values())
    worst = sorted(stalls, key=lambda r: -stalls[r])[:3]
    if total:
        named = ", ".join(f"{STALLS[r]} {stalls[r] / total:.0%}" for r in worst if stalls[r] > 0)
        yield f"warps wait: {named}"
    active = c.get("sm__warps_active.avg.pct_of_peak_sustained_active")
    if active is not None:
        yield f"{active:.0f} % of the warps that fit were there on average"
    tensor = c.get("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active")
    if c.get("sm__inst_executed_pipe_tensor.sum") and tensor is not None and tensor >= MOST_IDLE:
        yield f"tensor cores busy {tensor:.0f} % of the time"
    hit = c.get("lts__t_sector_hit_rate.pct")
    if hit is not None:
        yield f"{hit:.0f} % of the accesses to L2 hit"
    conflicts = c.get("l1tex__data_bank_conflicts_pipe_lsu.sum")
    if conflicts:
        yield f"{conflicts:,.0f} bank conflicts in shared memory"


def profile(
    candidate: Candidate, task: Task, case: str, built: Built, hardware: Hardware
) -> Profile:
    """Static facts of a candidate's launches on a case, and counters where ncu works."""
    verdict = candidate.verdict
    timings = verdict.timings if isinstance(verdict, Passed) else ()
    config = next((t.config for t in timings if t.case == case), 0)
    kernels = static_profile(built.plans[config, case], hardware)
    ncu = find_ncu() if has_gpu() else None
    why = "" if ncu else "no ncu here" if has_gpu() else "no NVIDIA GPU here"
    if ncu is not None:
        try:
            kernels = with_counters(kernels, counters(ncu, task, case, built, config))
        except MachineError as e:
            why = str(e)
    return Profile(candidate.id, case, hardware.name, kernels, why)


def to_event(profile: Profile) -> Mapping[str, object]:
    """As it is stored."""
    stored = to_json(profile)
    assert isinstance(stored, dict)
    return stored


def stored_profiles(history: History) -> dict[tuple[int, str], Profile]:
    """The last profile of each candidate and case of a run."""
    found = (from_json(Profile, e.data) for e in history.events if e.kind == "profiled")
    return {(p.candidate, p.case): p for p in found}
