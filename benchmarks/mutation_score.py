"""The judge's mutation score: of kernels with one small mistake, how many does the check reject?

    python benchmarks/mutation_score.py [--task NAME ...] [--language cpp|triton|cuda ...]
        [--device cpu|gpu] [--sample N] [--seed S] [--deadline-s T] [--only TEXT] [--json FILE]

Mutants of all seeds are made automatically (benchmarks/mutation/). With --device cpu (the default
without a GPU) C++ seeds are judged on the CPU, and Triton seeds in Triton's interpreter; with
--device gpu Triton and CUDA seeds are judged on the GPU. --sample takes N mutants of each seed's
file at random. Excluded from the score: mutants that do not build, mutants with the seed's machine
code and plans, and those that benchmarks/mutation/equivalent.toml lists with a reason.
"""

import argparse
import collections
import importlib.metadata
import json
import os
import platform
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from kagent.session import has_gpu
from kagent.tasks import find_task, seeds_of, task_names
from kagent_sandbox.launch.cpu_backend import CpuBackend
from kagent_sandbox.task import Task
from mutation.edits import Mutant, diff_of
from mutation.engines import Fate, Interpreting, Judged, Real
from mutation.equivalent import Equivalents
from mutation.generate import mutants_of

VERSIONS = ("torch", "triton", "numpy")


def sampled(mutants: list[Mutant], count: int | None, seed: int) -> list[Mutant]:
    """`count` mutants of each file, the same ones for the same seed."""
    if count is None:
        return mutants
    by_file = collections.defaultdict(list)
    for mutant in mutants:
        by_file[mutant.file].append(mutant)
    taken = []
    for file, all_of_it in by_file.items():
        rng = random.Random(f"{seed}/{file}")
        taken += rng.sample(all_of_it, min(count, len(all_of_it)))
    return taken


def judged(task: Task, language: str, options: argparse.Namespace) -> Iterator[Judged]:
    """Fates of a task's mutants in one language, until the deadline."""
    files = {f"{task.name}/{s.path.name}": s.path for s in seeds_of(task) if s.language == language}
    mutants = [m for path in files.values() for m in mutants_of(path)]
    mutants = [m for m in mutants if options.only in f"{m.file}:{m.line} {m.was} -> {m.now}"]
    mutants = sampled(mutants, options.sample, options.seed)
    # What the deadline cuts off is a random part.
    random.Random(options.seed).shuffle(mutants)
    originals = {file: path.read_text() for file, path in files.items()}
    if options.device == "gpu":
        from kagent_sandbox.launch.gpu_backend import GpuBackend

        with GpuBackend() as backend, Real(task, backend, options.jobs) as engine:
            yield from engine.judge(originals, mutants)
    elif language == "cpp":
        with CpuBackend() as backend, Real(task, backend, options.jobs) as engine:
            yield from engine.judge(originals, mutants)
    else:
        with Interpreting(task, options.jobs) as engine:
            yield from engine.judge(originals, mutants)


def row(task: str, language: str, fates: dict[str, int], left: int) -> str:
    caught, survived = fates["caught"], fates["survived"]
    score = f"{caught / (caught + survived):.1%}" if caught + survived else "–"
    cells = (task, language, caught, caught + survived, score, fates["listed"], fates["same"],
             fates["not built"], left)  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", action="append", choices=task_names())
    parser.add_argument("--language", action="append", choices=("cpp", "triton", "cuda"))
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu" if has_gpu() else "cpu")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--sample", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deadline-s", type=float, default=float("inf"))
    parser.add_argument("--only", default="", help="mutants whose file, lines or change have this")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    possible = ("triton", "cuda") if options.device == "gpu" else ("cpp", "triton")
    languages = [x for x in options.language or possible if x in possible]
    work = [(t, x) for t in options.task or task_names() for x in languages]

    ends = time.monotonic() + options.deadline_s
    equivalents = Equivalents()
    table, survivors, records = [], [], []
    for number, (name, language) in enumerate(work):
        began = time.monotonic()
        share_s = (ends - began) / (len(work) - number)  # each gets its part of what is left
        fates: collections.Counter[str] = collections.Counter()
        left = False
        for item in judged(find_task(name), language, options):
            listed = item.fate is Fate.SURVIVED and equivalents.reason(item.mutant) is not None
            fates["listed" if listed else str(item.fate)] += 1
            m = item.mutant
            records.append(
                {
                    "task": name, "language": language, "file": m.file, "line": m.line,
                    "kind": m.kind, "was": m.was, "now": m.now, "share": item.share,
                    "fate": "listed" if listed else str(item.fate), "says": item.says,
                }
            )  # fmt: skip
            if item.fate is Fate.SURVIVED and not listed:
                survivors.append(item)
                print(f"survived {m.file}:{m.line} {m.kind}, {item.share:.2g} of the tolerance\n"
                      f"{diff_of(m)}", flush=True)  # fmt: skip
            if time.monotonic() - began > share_s:
                left = True
                break
        table.append(row(name, language, fates, "cut off" if left else ""))
        print(table[-1], f"{time.monotonic() - began:.0f} s", flush=True)

    versions = ", ".join(f"{v} {importlib.metadata.version(v)}" for v in VERSIONS)
    where = f"{versions}, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}"
    print(f"\n{where}; --sample {options.sample} --seed {options.seed}\n")
    print("| task | language | caught | mutants | score | listed | same code | not built | |")
    print("|---|---|---|---|---|---|---|---|---|")
    print("\n".join(table))
    if options.json:
        options.json.write_text(json.dumps({"where": where, "mutants": records}, indent=1))
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
