"""Kernels called without a pause, as in a training step: time, energy, power and clock of the GPU.

    python benchmarks/power.py TASK [FILE ...] [--case PART] [--seconds S] [--experts A,B]

The judge times single calls from a cold L2, between which the GPU rests. A kernel that computes
without a pause may take more power than the GPU allows, and is slowed down: it is then as fast as
it is frugal, and hiding latency gains nothing. One process on one GPU; each file, and the experts
that are named, as CUDA graphs of 20 calls, for S seconds each, a fifth of them before the reading
begins. Needs nvidia-ml-py. Prints a line for each: µs and mJ of a call, mean power, mean clock of
the multiprocessors and its share of the highest, cycles of a call, and whether the power limit held
it (NVML's SwPowerCap or HwPowerBrakeSlowdown).
"""

from __future__ import annotations

import argparse
import functools
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bars import SEED, where
from kagent.tasks import find_task
from kagent_sandbox.device.baseline_calls import make_call, make_inputs
from kagent_sandbox.importing import import_file
from kagent_sandbox.judge.timing.baselines import baseline_call

CALLS = 20  # of a graph
WARM = 0.2  # share of the time before the reading begins
READ_EVERY_S = 0.02
POWER_REASONS = 0x4 | 0x80  # SwPowerCap, HwPowerBrakeSlowdown


def captured(function: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Calls of a function as one graph."""
    for _ in range(3):
        function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            function()
    return graph


def repeat(graph: torch.cuda.CUDAGraph, seconds: float) -> tuple[int, float]:
    """How many calls there were, and how long they took, in s."""
    start, calls = time.monotonic(), 0
    while time.monotonic() - start < seconds:
        for _ in range(4):
            graph.replay()
        torch.cuda.synchronize()
        calls += 4 * CALLS
    return calls, time.monotonic() - start


def line(name: str, graph: torch.cuda.CUDAGraph, seconds: float, nvml: Any, gpu: Any) -> str:
    """Run a graph and read the GPU meanwhile."""
    repeat(graph, WARM * seconds)
    mhz: list[float] = []
    reasons = 0
    ended = threading.Event()

    def read() -> None:
        nonlocal reasons
        while not ended.wait(READ_EVERY_S):
            mhz.append(nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM))
            reasons |= nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)

    reader = threading.Thread(target=read)
    before_mj = nvml.nvmlDeviceGetTotalEnergyConsumption(gpu)
    reader.start()
    try:
        calls, took_s = repeat(graph, (1 - WARM) * seconds)
    finally:
        ended.set()
        reader.join()
    mj = nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) - before_mj
    highest = nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM)
    mean, us = statistics.fmean(mhz), 1e6 * took_s / calls
    limit = "power limit" if reasons & POWER_REASONS else "no limit"
    return (
        f"  {name:<24} {us:9.1f} µs {mj / calls:8.2f} mJ {mj / took_s / 1e3:5.0f} W "
        f"{mean:5.0f} MHz ({mean / highest:.0%}) {us * mean / 1e3:8.0f} k cycles  {limit}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task")
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--case", default="", help="part of the names of benchmark cases")
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--experts", default="", help="names of baselines, with commas")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("power.py needs an NVIDIA GPU")
    try:
        import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise SystemExit("power.py needs nvidia-ml-py: pip install nvidia-ml-py") from None
    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    device, task = torch.device("cuda", 0), find_task(options.task)
    print(where(), f"power limit {pynvml.nvmlDeviceGetPowerManagementLimit(gpu) / 1e3:.0f} W")
    for case in task.cases("gpu").bench:
        if options.case not in case.name:
            continue
        print(case.name)
        eager = baseline_call(task, case, "eager", SEED)
        reference = import_file(Path(eager.reference), f"reference_of_{task.name}")
        arguments = make_inputs(eager, device, reference)
        calls: dict[str, Callable[[], object]] = {}
        for file in options.files:
            entry = getattr(import_file(file, f"power_{file.stem}"), task.entry)
            calls[f"{file.parent.name}/{file.stem}"] = functools.partial(entry, **arguments)
        for name in filter(None, options.experts.split(",")):
            calls[name] = make_call(baseline_call(task, case, name, SEED), device)
        for name, function in calls.items():
            print(line(name, captured(function), options.seconds, pynvml, gpu), flush=True)


if __name__ == "__main__":
    main()
