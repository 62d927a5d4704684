"""What Triton's own compiler takes for the binaries of a seed: the floor of any build of it.

    python benchmarks/compiler_share.py [--task softmax] [--seed triton_rows] [--target sm_90a]

All cases of a run are traced one after the other in this process, warm and pinned to one core, and
Triton's compilation listener tells what each stage took. A build by the sandbox adds a fresh fork
per case (`build_latency.py`).
"""

from __future__ import annotations

import argparse
import collections
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from build_latency import processor
from kagent.evolve.open_machine import request_maker
from kagent.tasks import find_task, seeds_of
from kagent_sandbox.data.task import draw_hidden


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", default="softmax")
    parser.add_argument("--seed", default="triton_rows")
    parser.add_argument("--target", default="sm_90a")
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    task = find_task(options.task)
    cases = task.cases("gpu")
    every = [*cases.check, *draw_hidden(task, "gpu", "check", 1), *cases.bench]
    source = next(s.source() for s in seeds_of(task) if s.name == options.seed)
    request = request_maker(task, options.target, every, 1)(source)
    ms: collections.Counter[str] = collections.Counter()
    binaries = 0

    def listen(*, times: Any, **_: object) -> None:
        nonlocal binaries
        binaries += 1
        ms["parse"] += times.ir_initialization / 1e3
        for stage, us in times.lowering_stages:
            ms[stage] += us / 1e3
        ms["store"] += times.store_results / 1e3

    with tempfile.TemporaryDirectory() as folder:
        from kagent_sandbox.builder.configs import apply_config, enumerate_configs
        from kagent_sandbox.builder.trace.trace import load_candidate, trace_case
        from kagent_sandbox.data.target import parse_target
        from triton import knobs

        os.environ["TRITON_CACHE_DIR"] = folder
        knobs.compilation.listener = listen
        target = parse_target(request.target, request.device)
        module = load_candidate(request.source, Path(folder), target)
        apply_config(module, enumerate_configs(module, 1)[0])
        began = time.perf_counter()
        for case in request.cases:
            trace_case(module, request.entry, case, target, request.allow, request.mutates)
        whole_s = time.perf_counter() - began
    stages = ", ".join(f"{name} {total / binaries:.0f}" for name, total in ms.items())
    print(f"one core of {processor()}, {options.target}: {options.seed}, {len(every)} cases")
    print(f"{binaries} binaries, each in ms: {stages}")
    print(f"the compiler {ms.total() / 1e3:.2f} s, with tracing {whole_s:.2f} s")


if __name__ == "__main__":
    main()
