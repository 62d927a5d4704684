"""What the loop itself costs: everything but builds, measurements and calls of a model.

    python benchmarks/loop_overhead.py [--budget 500]

A run over the tests' simulated landscape (tests/agent/simulated_evolution.py: builder, judge
and proposer answer at once), on a real store in a temporary folder. Printed are the wall clock per
candidate, with every event committed to disk, and the time of one selection at the run's end, by
all operators.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

from kagent.llm.proposer import ModelProposer
from kagent.search.select import select

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "agent"))
from simulated_evolution import evolution, setting
from simulated_landscape import toy_task

SELECTIONS = 50


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget", type=int, default=500)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        search, store = evolution(at / "task", at / "runs", budget=options.budget)
        with store:
            start = time.perf_counter()
            asyncio.run(search.run())
            wall_s = time.perf_counter() - start
        lineage = search.lineage
        each_ms = wall_s / len(lineage) * 1e3
        print(f"{len(lineage)} candidates in {wall_s:.2f} s: {each_ms:.1f} ms each")
        asked = setting(toy_task(at / "task"), ModelProposer, budget=2 * options.budget)
        took_ms = []
        for number in range(SELECTIONS):
            start = time.perf_counter()
            select(asked, lineage.as_of(len(lineage)), 10**6 + number)
            took_ms.append((time.perf_counter() - start) * 1e3)
    print(f"selection: median {statistics.median(took_ms):.2f} ms, longest {max(took_ms):.2f} ms")


if __name__ == "__main__":
    main()
