"""Import every definition of a FlashInfer-Bench suite as a task, and check each task.

    python benchmarks/import_flashinfer.py SUITE [--to FOLDER] [--only TEXT] [--every N]

SUITE holds definitions/ and workloads/. Prints a line for each definition, then a table with a row
for each kind of operation. What was checked before is recalled.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
import time
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from kagent.authoring.exchange import read_definition
from kagent.authoring.flashinfer_task import find_definitions, import_definition
from kagent_sandbox.data.task import load_task
from kagent_sandbox.errors import KagentError
from kagent_sandbox.judge.task_check import check_task
from work_queue import cancelled_on_interrupt


def outcome(path: Path, workloads: Path | None, to: Path) -> tuple[Path, str, str, float]:
    """What became of a definition: its path, a word, why, and the seconds that it took.

    The word is "passed", "holes", "refused" or "fault".
    """
    began = time.perf_counter()
    found, why = import_and_check(path, workloads, to)
    return path, found, why, time.perf_counter() - began


def import_and_check(path: Path, workloads: Path | None, to: Path) -> tuple[str, str]:
    """A word and a reason, as in `outcome`."""
    try:
        task = load_task(import_definition(path, workloads, to, force=True).folder)
    except KagentError as e:
        return "refused", str(e)
    try:
        checks = [check_task(task, kind) for kind in ("gpu", "cpu")]
    except KagentError as e:
        return "fault", str(e)
    holes = [h for c in checks for h in c.holes]
    skipped = f"{len(checks[0].skipped)} GPU cases too large for a CPU" if checks[0].skipped else ""
    return ("holes", "; ".join(holes)) if holes else ("passed", skipped)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", type=Path)
    parser.add_argument("--to", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--every", type=int, default=1, help="take every n-th definition")
    parser.add_argument("--jobs", type=int, default=1, help="definitions at once")
    options = parser.parse_args()
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    processes = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as scratch,
        ProcessPoolExecutor(options.jobs, processes) as pool,
        cancelled_on_interrupt(pool),
    ):
        to = options.to or Path(scratch)
        waiting = [
            pool.submit(outcome, path, workloads, to)
            for path, workloads in find_definitions([options.suite])[:: options.every]
            if options.only in path.stem
        ]
        for done in as_completed(waiting):
            path, found, why, took_s = done.result()
            print(f"{found:8} {took_s:6.1f} s  {path.stem}  {why}", flush=True)
            counts[read_definition(path).op_type][found] += 1
    print("\n| operation | definitions | passed | holes | refused | fault |")
    print("|---|---|---|---|---|---|")
    counts["**all**"] = sum(counts.values(), Counter())
    for name, found_counts in counts.items():
        row = [found_counts[k] for k in ("passed", "holes", "refused", "fault")]
        print(f"| {name} | {found_counts.total()} | {' | '.join(map(str, row))} |")
    used = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(f"\n{sum(u.ru_utime + u.ru_stime for u in used):.0f} s of CPU time")


if __name__ == "__main__":
    main()
