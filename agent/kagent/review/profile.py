"""Profiles of a candidate's kernels: static facts always, counters where ncu is."""

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
from dataclasses import replace
from pathlib import Path

from kagent_sandbox.data.build import Built
from kagent_sandbox.data.plan import Launch, Plan
from kagent_sandbox.data.plan_json import dump_plan
from kagent_sandbox.data.task import Task
from kagent_sandbox.data.verdict import Passed
from kagent_sandbox.device.detect import has_gpu
from kagent_sandbox.errors import MachineError

from kagent.prompting.hardware import Hardware
from kagent.prompting.profiles import STALL, STALLS, KernelProfile, Profile
from kagent.runs.lineage import Candidate
from kagent.text import kernel_label

NCU_LIMIT_S = 180.0
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
    *(STALL.format(reason) for reason in STALLS),
)
_SCALE = {"nsecond": 1e-3, "usecond": 1.0, "msecond": 1e3, "second": 1e6,
          "ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6,
          "byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}  # fmt: skip


def static_profile(plan: Plan, hardware: Hardware) -> tuple[KernelProfile, ...]:
    """Return the static facts of the plan and the compiled code, launch by launch. GPUs only."""
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
            *(sys.executable, "-m", "kagent_sandbox.judge.profile_run", name),
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
    return str((marked or errors or last or ["it ended without output"])[0])


def with_counters(
    kernels: Sequence[KernelProfile], rows: Sequence[Mapping[str, float]]
) -> tuple[KernelProfile, ...]:
    """Static facts and counters of the same launches."""
    return tuple(replace(k, counters=dict(r)) for k, r in zip(kernels, rows, strict=True))


def profile(
    candidate: Candidate, task: Task, case: str, built: Built, hardware: Hardware
) -> Profile:
    """Profile a candidate's launches on a case: static facts, and counters where ncu works.

    Args:
        candidate: The candidate.
        task: The task.
        case: Name of a benchmark case.
        built: The candidate's plans and binaries.
        hardware: The run's device.
    """
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
