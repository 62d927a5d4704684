"""Import every definition of a FlashInfer-Bench suite as a task, and check each task.

    python benchmarks/import_flashinfer.py SUITE [--to FOLDER] [--only TEXT] [--every N]

SUITE holds definitions/ and workloads/. Prints a line for each definition, then a table with a row
for each kind of operation. What was checked before is recalled.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

from kagent.authoring.exchange import read_definition
from kagent.authoring.flashinfer_task import find_definitions, import_definition
from kagent_sandbox.data.task import load_task
from kagent_sandbox.errors import KagentError
from kagent_sandbox.judge.task_check import check_task


def outcome(path: Path, workloads: Path | None, to: Path) -> tuple[str, str]:
    """Return what became of a definition ("passed", "holes", "refused" or "fault"), and why."""
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
    options = parser.parse_args()
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    with tempfile.TemporaryDirectory() as scratch:
        for path, workloads in find_definitions([options.suite])[:: options.every]:
            if options.only not in path.stem:
                continue
            began = time.perf_counter()
            found, why = outcome(path, workloads, options.to or Path(scratch))
            seconds = time.perf_counter() - began
            print(f"{found:8} {seconds:6.1f} s  {path.stem}  {why}", flush=True)
            counts[read_definition(path).op_type][found] += 1
    print("\n| operation | definitions | passed | holes | refused | fault |")
    print("|---|---|---|---|---|---|")
    counts["**all**"] = sum(counts.values(), Counter())
    for name, found_counts in counts.items():
        row = [found_counts[k] for k in ("passed", "holes", "refused", "fault")]
        print(f"| {name} | {found_counts.total()} | {' | '.join(map(str, row))} |")


if __name__ == "__main__":
    main()
