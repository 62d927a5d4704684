"""How many KernelBench problems become tasks with nothing written by hand, and why others do not.

    python benchmarks/import_kernelbench.py KERNELBENCH/level1 --to /tmp/tasks --limit 300

Each file is imported and checked by `kagent import kernelbench` in a process of its own. The table
has a line for each file; the last lines count, by folder, and give the CPU time. With `--seeds`,
seeds are derived, too, and counted with the reasons for none.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from work_queue import cancelled_on_interrupt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", type=Path, help="files, or folders of them")
    parser.add_argument("--to", type=Path, required=True, help="folder for the tasks")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for each file")
    parser.add_argument("--every", type=int, default=1, help="take every n-th file")
    parser.add_argument("--seeds", action="store_true", help="derive seeds, and count them")
    parser.add_argument("--jobs", type=int, default=1, help="imports at once")
    args = parser.parse_args()
    files = [f for p in args.paths for f in (sorted(p.glob("*.py")) if p.is_dir() else [p])]
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    seeded: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)

    def one(file: Path) -> tuple[Path, Outcome, float]:
        began = time.perf_counter()
        found = import_one(file, args.to, args.limit, seeds=args.seeds)
        return file, found, time.perf_counter() - began

    with ThreadPoolExecutor(args.jobs) as pool, cancelled_on_interrupt(pool):
        waiting = [pool.submit(one, file) for file in files[:: args.every]]
        for done in as_completed(waiting):
            file, found, took_s = done.result()
            counts[file.parent.name][found.word] += 1
            seeded[file.parent.name].update(found.seeds)
            where = f"{file.parent.name}/{file.name}"
            print(f"{found.word:8} {took_s:6.1f} s  {where}  {found.why}", flush=True)
    for folder, words in counts.items():
        total = words.total()
        parts = ", ".join(f"{n} {word}" for word, n in words.most_common())
        print(f"{folder}: {words['task']} of {total} are tasks without fault or hole ({parts})")
        if args.seeds:
            parts = ", ".join(f"{n} {name}" for name, n in seeded[folder].most_common())
            print(f"{folder}: seeds that are right: {parts or 'none'}")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{used.ru_utime + used.ru_stime:.0f} s of CPU time")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a file: "task", "holes", "refused", "timeout" or "crash", and why."""

    word: str
    why: str
    seeds: tuple[str, ...] = ()


def import_one(file: Path, to: Path, limit_s: float, *, seeds: bool) -> Outcome:
    """Import a file in a process of its own."""
    command = [sys.executable, "-m", "kagent", "import", "kernelbench", str(file), "--json"]
    command += [] if seeds else ["--no-seeds"]
    folder = to / file.parent.name / file.stem
    try:
        done = subprocess.run(
            [*command, "--to", str(folder)], capture_output=True, timeout=limit_s, text=True
        )
    except subprocess.TimeoutExpired:
        return Outcome("timeout", f"over {limit_s:g} s")
    if done.returncode <= 1 and done.stdout:
        made = json.loads(done.stdout)[0]
        names = " and ".join(made["seeds"]) if seeds else ""
        missing = [n for n in made["notes"] if seeds and re.match("no (Triton|C\\+\\+) seed", n)]
        words = "; ".join(filter(None, [*made["holes"], names, *missing]))
        return Outcome("holes" if made["holes"] else "task", words, tuple(made["seeds"]))
    lines = done.stderr.strip().splitlines()
    text = lines[-1] if lines else f"status {done.returncode}"
    return Outcome("refused" if "Traceback" not in done.stderr and lines else "crash", text)


if __name__ == "__main__":
    main()
