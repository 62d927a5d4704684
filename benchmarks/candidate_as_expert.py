"""How alike a candidate and a way of torch are timed: one kernel, as both.

    python benchmarks/candidate_as_expert.py [TASK/FILE ...] [--device cuda:0] [--work DIR]

For each seed, makes a copy of its task that has the seed itself among its experts, called as users
would call it, and lets `kagent bench` race the seed against all baselines. Prints for each case
both medians in µs, and how many times as fast as itself the seed is said to be, with its 95 %
interval: 1 if the judge times both alike.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

SEEDS = Path(__file__).resolve().parents[1] / "seeds"
GPU = ("softmax/triton_rows.py", "softmax/cuda_packed.py", "gelu/triton_flat.py")
CPU = ("softmax/cpp_rows.py", "gelu/cpp_simd.py")
ITSELF = "the seed itself"
EXPERT = '''

def experts():
    """The seed, by another name."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("seed_as_expert", {file!r})
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {{{name!r}: lambda **given: module.{entry}(*given.values())}}
'''


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("seeds", nargs="*", metavar="TASK/FILE")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--work", type=Path, default=Path("candidate_as_expert"))
    options = parser.parse_args()
    for seed in options.seeds or (CPU if options.device == "cpu" else GPU):
        file = SEEDS / seed
        task = task_with_expert(file, options.work)
        words = ("bench", str(file), "--task", str(task), "--device", options.device, "--json")
        done = subprocess.run(
            (sys.executable, "-m", "kagent", *words), capture_output=True, text=True, check=False
        )
        if done.returncode:
            print(f"{seed}: {done.stdout}{done.stderr}")
            continue
        for case in json.loads(done.stdout)["race"]["cases"]:
            print(f"{seed} {line(case)}", flush=True)


def line(case: dict[str, Any]) -> str:
    """One case of a race, as `--json` has it."""
    (mine,) = case["candidates"].values()
    itself = case["baselines"].get(ITSELF)
    if itself is None:
        return f"{case['case']}: not measured: {case['missing']}"
    (ratio,) = (r for r in case["ratios"] if r["against"] == ITSELF)
    return (
        f"{case['case']}: candidate {mine['kernel_us']:.1f} µs, expert {itself['kernel_us']:.1f} "
        f"µs, {ratio['value']:.3f} ({ratio['low']:.3f}–{ratio['high']:.3f}) {ratio['verdict']}"
    )


def task_with_expert(file: Path, work: Path) -> Path:
    """A copy of a seed's task with the seed as its one expert."""
    entry = file.parent.name
    folder = work / entry
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(file.parent / "task.toml", folder)
    text = (file.parent / "reference.py").read_text()
    (folder / "reference.py").write_text(
        text + EXPERT.format(file=str(file), name=ITSELF, entry=entry)
    )
    return folder


if __name__ == "__main__":
    main()
