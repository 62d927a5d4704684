"""How many KernelBench problems become tasks with nothing written by hand, and why others do not.

    python benchmarks/import_kernelbench.py KERNELBENCH/level1 --to /tmp/tasks --limit 300

Each file is imported and checked by `kagent import kernelbench` in a process of its own. The table
has a line for each file; the last lines count, by folder. With `--seeds`, seeds are derived, too,
and counted with the reasons for none.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", type=Path, help="files, or folders of them")
    parser.add_argument("--to", type=Path, required=True, help="folder for the tasks")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for each file")
    parser.add_argument("--every", type=int, default=1, help="take every n-th file")
    parser.add_argument("--seeds", action="store_true", help="derive seeds, and count them")
    args = parser.parse_args()
    files = [f for p in args.paths for f in (sorted(p.glob("*.py")) if p.is_dir() else [p])]
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for file in files[:: args.every]:
        began = time.perf_counter()
        outcome, why = import_one(file, args.to, args.limit, seeds=args.seeds)
        counts[file.parent.name][outcome] += 1
        seconds = time.perf_counter() - began
        print(f"{outcome:8} {seconds:6.1f} s  {file.parent.name}/{file.name}  {why}", flush=True)
    for folder, found in counts.items():
        total = found.total()
        parts = ", ".join(f"{n} {outcome}" for outcome, n in found.most_common())
        print(f"{folder}: {found['task']} of {total} are tasks without fault or hole ({parts})")


def import_one(file: Path, to: Path, limit_s: float, *, seeds: bool) -> tuple[str, str]:
    """Outcome ("task", "holes", "refused", "timeout" or "crash") and its reason."""
    command = [sys.executable, "-m", "kagent", "import", "kernelbench", str(file), "--json"]
    command += [] if seeds else ["--no-seeds"]
    folder = to / file.parent.name / file.stem
    try:
        done = subprocess.run(
            [*command, "--to", str(folder)], capture_output=True, timeout=limit_s, text=True
        )
    except subprocess.TimeoutExpired:
        return "timeout", f"over {limit_s:g} s"
    if done.returncode <= 1 and done.stdout:
        made = json.loads(done.stdout)[0]
        names = " and ".join(made["seeds"]) if seeds else ""
        missing = [n for n in made["notes"] if seeds and re.match("no (Triton|C\\+\\+) seed", n)]
        words = "; ".join(filter(None, [*made["holes"], names, *missing]))
        return "holes" if made["holes"] else "task", words
    lines = done.stderr.strip().splitlines()
    text = lines[-1] if lines else f"status {done.returncode}"
    return ("refused" if "Traceback" not in done.stderr and lines else "crash"), text


if __name__ == "__main__":
    main()
