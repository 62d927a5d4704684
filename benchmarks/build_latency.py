"""Time to build each seed of a task for all cases, from a warm builder.

    python benchmarks/build_latency.py [--task softmax] [--lang triton] [--builds 10] [--cores 1]
        [--target sm_90a] [--json FILE]

Builder and client share `--cores` cores. The cases are those of a run: visible and hidden checks,
and the benchmarks. Every build is of a text of its own (a constant that nothing reads), in a
private folder: nothing is taken from an earlier build.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import sys
from pathlib import Path

from kagent.evolve.open_machine import request_maker
from kagent.tasks import find_task, seeds_of
from kagent_sandbox.builder.client import Builder
from kagent_sandbox.data.build import Built
from kagent_sandbox.data.task import Task, draw_hidden

VERSIONS = ("torch", "triton", "cuda-core", "numpy")


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def measure(builder: Builder, task: Task, target: str, source: str, builds: int) -> list[Built]:
    kind = "cpu" if target == "cpu" else "gpu"
    cases = task.cases(kind)
    done = []
    for number in range(builds):
        hidden = draw_hidden(task, kind, "check", number)
        request = request_maker(task, target, [*cases.check, *hidden, *cases.bench], 1)
        built = builder.build(request(f"{source}\nBUILD_NUMBER = {number}\n"))
        if not isinstance(built, Built):
            sys.exit(f"{built.status}: {built.message}")
        done.append(built)
    return done


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", default="softmax")
    parser.add_argument("--lang", default="triton", choices=("triton", "cuda", "cpp"))
    parser.add_argument("--builds", type=int, default=10)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--target", default="sm_90a")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[: options.cores]
    os.sched_setaffinity(0, cores)
    target = "cpu" if options.lang == "cpp" else options.target
    task = find_task(options.task)
    versions = {v: importlib.metadata.version(v) for v in VERSIONS}
    print(
        f"{len(cores)} core(s) of {processor()}, {platform.release()}, "
        f"Python {platform.python_version()}, "
        f"{', '.join(map(' '.join, versions.items()))}, {target}"
    )
    rows: dict[str, list[float]] = {}
    with Builder(1) as builder:
        for seed in seeds_of(task):
            if seed.language != options.lang:
                continue
            measure(builder, task, target, seed.source(), 1)
            built = measure(builder, task, target, seed.source(), options.builds)
            times = sorted(b.build_s for b in built)
            rows[seed.name] = times
            binaries = statistics.median(len(b.binaries) for b in built)
            p90 = times[min(len(times) - 1, round(0.9 * (len(times) - 1)))]
            print(
                f"{seed.name}: {len(built[0].plans)} cases, {binaries:g} binaries: "
                f"median {statistics.median(times):.2f} s, p90 {p90:.2f} s, best {times[0]:.2f} s, "
                f"of {len(times)} builds",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps({"versions": versions, "seconds": rows}, indent=1))


if __name__ == "__main__":
    main()
