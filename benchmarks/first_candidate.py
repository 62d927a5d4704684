"""From a PyTorch function to the first measured candidate: two commands, timed.

    python benchmarks/first_candidate.py [--budget 1] [--device cpu]

Writes a function that no task has into an empty folder, then runs `kagent new` (with seeds) and
`kagent evolve` as a user would, with an empty cache. Prints the wall clock and the CPU time of each
command with all that it starts, when the first candidate after the seeds was recorded, and the load
of the machine: other programs lengthen the wall clock.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kagent.runs.lineage import Operator
from kagent.runs.store import read_history

_FUNCTION = """
import torch
from torch.nn import functional as F


def gated_mean(x, gate):
    return (F.silu(x) * torch.sigmoid(gate)).mean(-1)


def make_inputs():
    return torch.randn(512, 1024), torch.randn(512, 1024)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=int, default=1, help="proposals after the seeds")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    if options.budget < 1:
        parser.error(f"--budget {options.budget}: expected 1 or more")
    with tempfile.TemporaryDirectory(prefix="kagent-first-") as made:
        folder = Path(made)
        (folder / "mine.py").write_text(_FUNCTION)
        environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
        evolve = ["evolve", "./gated_mean", "--device", options.device, "--runs", "runs"]
        began, total_s = time.time(), 0.0
        for words in (["new", "mine.py:gated_mean"], [*evolve, "--budget", str(options.budget)]):
            total_s += timed(words, folder, environment)
        (run,) = (p.parent for p in folder.glob("runs/*/run.json"))
        _, history = read_history(run)
        recorded = [e.at for e in history.events if e.kind == "recorded"]
        seeds = sum(c.proposal.operator is Operator.SEED for c in history.lineage)
        print(f"first seed recorded       {recorded[0] - began:7.1f} s after the start")
        if len(recorded) > seeds:
            print(f"first proposal recorded   {recorded[seeds] - began:7.1f} s after the start")
        print(f"both commands             {total_s:7.1f} s")
    print(f"load over 5 minutes {os.getloadavg()[1]:.1f} on {len(os.sched_getaffinity(0))} cores")


def timed(words: list[str], folder: Path, environment: dict[str, str]) -> float:
    """Run a command of kagent, and print what it took; the wall clock, in seconds."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "kagent", *words],
        cwd=folder, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    took_s = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if done.returncode not in (0, 3):  # 3: measured, and not faster than torch
        raise SystemExit(f"kagent {' '.join(words)}: {done.returncode}\n{done.stderr[-3000:]}")
    print(f"kagent {words[0]:<8} {took_s:7.1f} s, {used_s:.1f} s of CPU time")
    return took_s


if __name__ == "__main__":
    main()
