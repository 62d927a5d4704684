"""triton.testing.do_bench of a library's operators, beside the times that the library records.

    python benchmarks/do_bench.py LIBRARY [--operator NAME ...] [--json FILE]

At every shape that was measured on this device and for which the library uses a kernel, the
operator is called as torch code calls it, `torch.ops...`, under `do_bench` (median of 100 ms, after
25 ms), and so is eager torch. Prints both times of the operator and their ratio, and how many times
as fast as eager it is by either clock. do_bench empties the L2 cache by writing, calls from Python
without a rest, and has the launch between its events: it adds some µs to each time, whosever it is.
Without a GPU single calls are timed, with the caches as they are.

The device is had alone meanwhile, among processes of kagent.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kagent.export.reading import read_library
from kagent.export.record import TORCH
from kagent_sandbox.data.race import EAGER
from kagent_sandbox.device.table import own_unit
from kagent_sandbox.errors import KagentError
from kagent_sandbox.process.device_lock import DeviceLock

CALLS = 20  # on a CPU
LONG_US = 100.0
"""Kernels from here on are compared."""
NEAR = 0.02
"""Share of a time, or of a ratio to eager, within which do_bench agrees."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("library", type=Path)
    parser.add_argument("--operator", action="append")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    try:
        disk = read_library(options.library)
    except KagentError as e:
        sys.exit(str(e))
    names = [o.task for o in disk.library.operators]
    if unknown := set(options.operator or ()) - set(names):
        sys.exit(f"no operator {', '.join(unknown)} in {disk.folder}; there are {', '.join(names)}")
    sys.path[:0] = [str(disk.folder / "tests"), str(disk.package.parent)]
    harness: Any = importlib.import_module("harness")
    torch: Any = importlib.import_module("torch")
    kind = "gpu" if torch.cuda.is_available() else "cpu"
    devices: Any = importlib.import_module(f"{disk.library.name}._devices")
    device = devices.device_name(torch.device(harness.DEVICES[kind]))
    found = []
    lock = DeviceLock(own_unit(kind))
    for operator in disk.library.operators:
        if options.operator and operator.task not in options.operator:
            continue
        task, own = harness.Task(operator.task), harness.operator_of(operator.task)
        eager = task.reference.eager
        points = [p for d in operator.devices if d.name == device for p in d.points]
        for point in (p for p in points if p.best != TORCH):
            case = harness.Case(point.case, point.dtype, dict(point.dims), kind=kind)
            arguments = task.arguments(case)
            values = tuple(arguments.values())
            own.op(*values)  # compiled before the turn
            with lock.turn("timing"):
                us = timed_us(lambda own=own, a=values: own.op(*a), kind)
                eager_us = timed_us(lambda f=eager, a=arguments: f(**a), kind)
            recorded = point.times[point.best]
            found.append(
                {
                    "operator": operator.task,
                    "case": point.case,
                    "dtype": point.dtype,
                    "dims": dict(point.dims),
                    "kernel": point.best,
                    "device": device,
                    "recorded_us": recorded.us,
                    "us": us,
                    "eager_us": eager_us,
                    "recorded_eager_us": point.times[EAGER].us,
                }
            )
            print(
                f"{operator.task} {point.dtype} {point.case}: {us:.1f} µs, recorded "
                f"{recorded.us:.1f} ({us / recorded.us:.3f}); {eager_us / us:.3f} times as fast as "
                f"eager, recorded {point.times[EAGER].us / recorded.us:.3f}",
                flush=True,
            )
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def agreement(shapes: Sequence[Mapping[str, Any]]) -> str:
    """On how many of the long shapes both clocks agree: on the operator's time, and on how many
    times as fast as eager it is, where that is known.
    """
    long = [s for s in shapes if s["recorded_us"] >= LONG_US]
    if not long:
        return "all shorter"
    near = [s for s in long if abs(s["us"] / s["recorded_us"] - 1) <= NEAR]
    text = f"{len(near)} of {len(long)}"
    if all("eager_us" in s for s in long):
        ratios = [times_eager(s) for s in long]
        text += f"; × eager {sum(abs(a / b - 1) <= NEAR for a, b in ratios)}"
    return text


def times_eager(shape: Mapping[str, Any]) -> tuple[float, float]:
    """How many times as fast as eager an operator is: by do_bench, and by the judge's clock."""
    return shape["eager_us"] / shape["us"], shape["recorded_eager_us"] / shape["recorded_us"]


def timed_us(call: Callable[[], object], kind: str) -> float:
    """µs of a call by do_bench; on a CPU, the median of single calls."""
    if kind == "gpu":
        testing: Any = importlib.import_module("triton.testing")
        return 1000 * float(testing.do_bench(call, return_mode="median"))
    samples = []
    for _ in range(CALLS):
        start = time.perf_counter_ns()
        call()
        samples.append((time.perf_counter_ns() - start) / 1000)
    return statistics.median(samples)


if __name__ == "__main__":
    main()
