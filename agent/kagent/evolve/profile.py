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
import threading
import time
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
from kagent_sandbox.process.environment import for_trusted
from kagent_sandbox.process.process_tree import kill_tree
from kagent_sandbox.runtime.text import printable

from kagent.prompting.hardware import Hardware
from kagent.prompting.profiles import STALL, STALLS
from kagent.runs.lineage import Candidate
from kagent.runs.profiles import KernelProfile, Profile
from kagent.text import kernel_label

NCU_LIMIT_S = 180.0
_LOOK_S = 0.2
"""Seconds between looks at whether ncu is still wanted."""
_MOST_REASON = 300  # characters of what ncu says is wrong
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


def counters(
    ncu: str,
    task: Task,
    case: str,
    built: Built,
    config: int,
    *,
    limit_s: float = NCU_LIMIT_S,
    stopped: threading.Event | None = None,
) -> list[dict[str, float]]:
    """Counters of ncu for each launch of a candidate's plan, in order.

    Args:
        ncu: Its path.
        task: The task.
        case: Name of a benchmark case.
        built: The candidate.
        config: Its configuration on that case.
        limit_s: Wall clock that ncu may take.
        stopped: Ends it early, once set.

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
        status, out, log = _run(command, limit_s, stopped or threading.Event())
    rows = list(read_csv(out))
    launches = len(plan.launches)
    if status != 0 or len(rows) < launches:
        raise MachineError(f"ncu: {_reason(out + log)}")
    return rows[:launches]


def _run(command: Sequence[str], limit_s: float, stopped: threading.Event) -> tuple[int, str, str]:
    """Exit status, output and log of ncu, which is killed with all that it started at its limit,
    when it is no longer wanted, and with the caller's own error.
    """
    # No key of a model's endpoint: device code runs in there, unconfined.
    environment = {**for_trusted(), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=log,
            env=environment,
            start_new_session=True,  # a Ctrl-C at the terminal is the caller's to handle
        )
        end = time.monotonic() + limit_s
        try:
            while True:
                try:
                    status = process.wait(_LOOK_S)
                    break
                except subprocess.TimeoutExpired:
                    if stopped.is_set():
                        raise MachineError("ncu was ended: nobody waits for it") from None
                    if time.monotonic() >= end:
                        raise MachineError(f"ncu took longer than {limit_s:g} s") from None
        except BaseException:
            kill_tree(process.pid)
            process.wait()
            raise
        texts = []
        for file in (out, log):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        return status, texts[0], texts[1]


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
                    number = float(value.replace(",", "")) * _SCALE.get(unit, 1.0)
                except ValueError:
                    continue  # n/a: the device has no such counter
                if math.isfinite(number):  # JSON has no nan, which ratios over nothing are
                    found[name] = number
        yield found


def _reason(output: str) -> str:
    """The first line in which ncu says what is wrong."""
    errors = re.findall(r"==(?:ERROR|PROF|WARNING)== (.*)", output)
    marked = re.findall(r"==ERROR== (.*)", output)
    last = [line for line in output.strip().splitlines() if line.strip()][-1:]
    said = str((marked or errors or last or ["it ended without output"])[0])
    return printable(said.strip())[:_MOST_REASON]  # device code prints into the same output


def with_counters(
    kernels: Sequence[KernelProfile], rows: Sequence[Mapping[str, float]]
) -> tuple[KernelProfile, ...]:
    """Static facts and counters of the same launches."""
    return tuple(replace(k, counters=dict(r)) for k, r in zip(kernels, rows, strict=True))


def worst_case(candidate: Candidate) -> str:
    """The benchmark case on which a candidate is furthest from its ceiling; "" where none was
    timed.
    """
    timings = candidate.verdict.timings if isinstance(candidate.verdict, Passed) else ()
    return min(timings, key=lambda t: t.roofline_share).case if timings else ""


def profile(
    candidate: Candidate,
    task: Task,
    case: str,
    built: Built,
    hardware: Hardware,
    *,
    limit_s: float = NCU_LIMIT_S,
    stopped: threading.Event | None = None,
) -> Profile:
    """Profile a candidate's launches on a case: static facts, and counters where ncu works.

    Args:
        candidate: The candidate.
        task: The task.
        case: Name of a benchmark case.
        built: The candidate's plans and binaries.
        hardware: The run's device.
        limit_s: Wall clock that ncu may take.
        stopped: Ends ncu early, once set.
    """
    verdict = candidate.verdict
    timings = verdict.timings if isinstance(verdict, Passed) else ()
    config = next((t.config for t in timings if t.case == case), 0)
    kernels = static_profile(built.plans[config, case], hardware)
    ncu = find_ncu() if has_gpu() else None
    why = "" if ncu else "no ncu here" if has_gpu() else "no NVIDIA GPU here"
    if ncu is not None:
        try:
            rows = counters(ncu, task, case, built, config, limit_s=limit_s, stopped=stopped)
            kernels = with_counters(kernels, rows)
        except (MachineError, OSError) as e:
            why = str(e)
    return Profile(candidate.id, case, hardware.name, kernels, why)
