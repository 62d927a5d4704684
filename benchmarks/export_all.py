"""All tasks evolved, exported into one library, and the library's own tests and benchmark run.

    python benchmarks/export_all.py --budget 30 --out OUT [--runs RUNS] [--tasks A,B] [--limit-s S]
        [--at-once N] [--devices cuda:0,cuda:1] [--name NAME] [--no-tests] [--no-bench]

Prints what each run took and its final race, what the export took, the generated tests, and a
Markdown table: per shape the operator's device time against torch, and what a call costs from
Python. With --runs it exports the newest run of each task there instead of evolving. Winners that
are slower than torch are left out, unless --allow-slower is given. Everything is kept in OUT:
runs/, the library NAME/, logs. A second call with the same OUT and other --tasks adds to the
library.

--at-once: so many runs share each device; they take turns on it. The export is on the first device.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import queue
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kagent.runs.store import read_history
from kagent.tasks import task_names
from kagent_sandbox.data.verdict import SpeedVerdict


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=_RAW)
    arguments.add_argument("--budget", type=int, default=30)
    arguments.add_argument("--tasks", default=",".join(task_names()))
    arguments.add_argument("--lang", default="any")
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--runs", type=Path)
    arguments.add_argument("--allow-slower", action="store_true")
    arguments.add_argument(
        "--limit-s", type=float, default=math.inf, help="evolve no task after it"
    )
    arguments.add_argument("--at-once", type=int, default=1, help="runs that share a device")
    arguments.add_argument("--devices", help="of the runs; the first GPU, else the CPU")
    arguments.add_argument("--name", default="kernels_of_all", help="of the library")
    arguments.add_argument("--no-tests", action="store_true", help="not the library's own")
    arguments.add_argument("--no-bench", action="store_true", help="not its benchmark")
    options = arguments.parse_args()
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    runs, library, tasks = (
        options.runs or out / "runs",
        out / options.name,
        options.tasks.split(","),
    )
    devices = options.devices.split(",") if options.devices else [""]
    ends = time.monotonic() + options.limit_s
    free: queue.Queue[str] = queue.Queue()
    for device in devices * options.at_once:
        free.put(device)

    def evolve(task: str) -> None:
        if options.runs is not None:
            return
        device = free.get()
        try:
            if time.monotonic() > ends:
                print(f"{task:22} left out, the time is up", flush=True)
                return
            words = ["evolve", task, "--budget", str(options.budget), "--lang", options.lang]
            words += ["--device", device] if device else []
            code, seconds = kagent(out / f"evolve_{task}.log", *words, "--runs", str(runs))
            print(f"{task:22} evolved: exit {code}, {seconds:.0f} s", flush=True)
        finally:
            free.put(device)

    with ThreadPoolExecutor(free.qsize()) as threads:
        list(threads.map(evolve, tasks))
    chosen = [r for r in (winner_of(runs, t, options) for t in tasks) if r is not None]
    if not chosen:
        sys.exit("nothing to export")
    words = ["export", *chosen, "--to", str(library), "--runs", str(runs), "--allow-slower"]
    code, seconds = kagent(out / "export.log", *words)
    print(f"{len(chosen)} exported: exit {code}, {seconds:.0f} s", flush=True)
    if code:
        sys.exit((out / "export.log").read_text()[-3000:])
    if not options.no_tests:
        print_tests(library, out)
    if not options.no_bench:
        print_benchmark(library, out)


def winner_of(runs: Path, task: str, options: argparse.Namespace) -> str | None:
    """The newest run of a task, if its winner may go into the library; prints its final race."""
    found = sorted(runs.glob(f"{task}-2*/run.json"))
    race = read_history(found[-1].parent)[1].race if found else None
    versus = race.versus_torch(race.winner) if race is not None and race.winner else None
    if versus is None:
        print(f"{task:22} {'no final race beside torch' if found else 'no run'}", flush=True)
        return found[-1].parent.name if found and options.allow_slower else None
    slower = versus.verdict is SpeedVerdict.SLOWER and not options.allow_slower
    ratio = f"{versus.verdict} {versus.ratio:.3f} ({versus.low:.3f}–{versus.high:.3f})"
    print(f"{task:22} {ratio}{', left out' if slower else ''}", flush=True)
    return None if slower else found[-1].parent.name


def kagent(log: Path, *words: str) -> tuple[int, float]:
    """A kagent command; its exit code and seconds. All that it prints goes into a file."""
    return command(log, sys.executable, "-m", "kagent", *words)


def command(
    log: Path, *words: str, errors: Path | None = None, **environment: str
) -> tuple[int, float]:
    """Any command, the same way; what it says of errors goes into a file of its own, if named."""
    begun = time.monotonic()
    with contextlib.ExitStack() as files:
        out = files.enter_context(log.open("w"))
        done = subprocess.run(
            words,
            stdout=out,
            stderr=files.enter_context(errors.open("w")) if errors else subprocess.STDOUT,
            env={**os.environ, **environment},
            check=False,
        )
    return done.returncode, time.monotonic() - begun


def print_tests(library: Path, out: Path) -> None:
    log = out / "tests.log"
    code, seconds = command(
        log, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(library / "tests"),
        PYTHONPATH=str(library / "build/torch-universal"),
    )  # fmt: skip
    print(f"generated tests: exit {code}, {seconds:.0f} s: {log.read_text().splitlines()[-1]}")


def print_benchmark(library: Path, out: Path) -> None:
    table, log = out / "bench.json", out / "bench.log"
    bench, path = str(library / "benchmarks" / "bench.py"), str(library / "build/torch-universal")
    words = (sys.executable, bench, "--json")
    code, seconds = command(table, *words, errors=log, PYTHONPATH=path)  # warnings are no JSON
    print(f"benchmark: exit {code}, {seconds:.0f} s")
    if code:
        print(log.read_text()[-3000:])
        return
    print(markdown(json.loads(table.read_text())))


def markdown(found: dict[str, Any]) -> str:
    """The benchmark's figures as a table, one line for each measured shape."""
    calls_us = {
        (call["operator"], call["device"], call["dtype"]): call["us"]["the operator"]
        for call in found["calls"]
    }
    lines = ["| operator | shape | device | µs | × fastest of torch (95 %) | a call, µs |"]
    lines.append("|---|---|---|---|---|---|")
    for shape in found["shapes"]:
        ratio, low, high = shape["ratio"]
        dims = " ".join(f"{n}={v}" for n, v in shape["dims"].items())
        call_us = calls_us.get((shape["operator"], shape["device"], shape["dtype"]))
        lines.append(
            f"| {shape['operator']} | {shape['dtype']} {dims} | {shape['device']} "
            f"| {shape['us']['operator']:.2f} by {shape['kernel']} "
            f"| {ratio:.3f} ({low:.3f}–{high:.3f}) {shape['fastest_of_torch']} "
            f"| {'' if call_us is None else f'{call_us:.1f}'} |"
        )
    return "\n".join(lines)


_RAW = argparse.RawDescriptionHelpFormatter

if __name__ == "__main__":
    main()
