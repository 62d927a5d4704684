"""The judge's mutation score: of kernels with one small mistake, how many does the check reject?

    python benchmarks/mutation_score.py [--task NAME ...] [--language cpp|triton|cuda ...]
        [--device cpu|gpu] [--sample N] [--seed S] [--deadline-s T] [--only TEXT] [--json FILE]
        [--conditions]

Mutants of all seeds are made automatically (benchmarks/mutation/). With --device cpu (the default
without a GPU) C++ seeds are judged on the CPU, and Triton seeds in Triton's interpreter; with
--device gpu Triton and CUDA seeds are judged on the GPU. --sample takes N mutants of each seed's
file at random, and --deadline-s stops in time: what it cuts off is random, too. Excluded from the
score: mutants that do not build, mutants with the seed's machine code and plans, and those that
benchmarks/mutation/equivalent.toml lists with a reason. Exits with 1 if any other survived.

With --conditions, mutants are seeds that are wrong for some sizes, layouts or values alone
(benchmarks/mutation/conditions.py), N of each file by sizes and layouts (40 by default) and all by
values; they are judged on all cases of a run, those of its check and of its races.
"""

import argparse
import collections
import contextlib
import importlib.metadata
import json
import platform
import random
import secrets
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kagent.tasks import find_task, seeds_of, task_names
from kagent_sandbox.builder.client import Builder
from kagent_sandbox.device.cpu.backend import CpuBackend
from kagent_sandbox.device.detect import has_gpu
from kagent_sandbox.errors import KagentError
from kagent_sandbox.process.cores import usable_cores
from mutation import conditions
from mutation.edits import Mutant, diff_of
from mutation.engines import Fate, Interpreting, Judged, Real, with_race
from mutation.equivalent import Equivalents
from mutation.generate import mutants_of

VERSIONS = ("torch", "triton", "numpy")


@dataclass
class Tally:
    """Fates of one task's mutants in one language. `listed` survived and are known to be right."""

    task: str
    language: str
    judged: list[Judged] = field(default_factory=list)
    listed: int = 0
    ended: str = ""  # why not all were judged

    def count(self, fate: Fate) -> int:
        """How many had this fate."""
        return sum(j.fate is fate for j in self.judged)

    def row(self) -> str:
        """Of the table that `main` prints."""
        caught, survived = self.count(Fate.CAUGHT), self.count(Fate.SURVIVED) - self.listed
        score = f"{caught / (caught + survived):.1%}" if caught + survived else "–"
        cells = (self.task, self.language, caught, caught + survived, score, self.listed,
                 self.count(Fate.SAME), self.count(Fate.NOT_BUILT), self.ended)  # fmt: skip
        return "| " + " | ".join(map(str, cells)) + " |"


def sampled(mutants: list[Mutant], count: int | None, seed: int) -> list[Mutant]:
    """`count` mutants of each file, in random order; the same ones for the same seed."""
    by_file = collections.defaultdict(list)
    for mutant in mutants:
        by_file[mutant.file].append(mutant)
    taken = []
    for file, all_of_it in by_file.items():
        rng = random.Random(f"{seed}/{file}")
        most = len(all_of_it) if count is None else min(count, len(all_of_it))
        taken += rng.sample(all_of_it, most)
    random.Random(seed).shuffle(taken)
    return taken


def judged(
    name: str, language: str, builder: Builder, options: argparse.Namespace
) -> Iterator[Judged]:
    """Fates of a task's mutants in one language."""
    task = find_task(name)
    if options.conditions:
        task = with_race(task, options.device, secrets.randbits(62))
    files = {f"{name}/{s.path.name}": s.path for s in seeds_of(task) if s.language == language}
    if options.conditions:
        cases, count = task.cases(options.device).check, options.sample or 40
        mutants = [
            m
            for path in files.values()
            for m in (
                *conditions.of_sizes(task, path, cases, count, options.seed),
                *conditions.of_values(path),
            )
        ]
    else:
        mutants = [m for path in files.values() for m in mutants_of(path)]
    mutants = [m for m in mutants if options.only in f"{m.file}:{m.line} {m.was} -> {m.now}"]
    mutants = sampled(mutants, None if options.conditions else options.sample, options.seed)
    originals = {file: path.read_text() for file, path in files.items()}
    engine: Real | Interpreting
    if options.device == "gpu":
        from kagent_sandbox.device.cuda.backend import GpuBackend

        engine = Real(task, GpuBackend(), builder, options.jobs)
    elif language == "cpp":
        engine = Real(task, CpuBackend(), builder, options.jobs)
    else:
        engine = Interpreting(task, builder, options.jobs)
    with engine:
        yield from engine.judge(originals, mutants)


def take(tally: Tally, items: Iterator[Judged], equivalents: Equivalents, until: float) -> None:
    """Collect fates until the deadline, and print survivors."""
    for item in items:
        tally.judged.append(item)
        if item.fate is Fate.SURVIVED:
            m = item.mutant
            if equivalents.reason(m) is not None:
                tally.listed += 1
            else:
                print(f"survived {m.file}:{m.line} {m.kind}, {item.share:.2g} of the tolerance\n"
                      f"{diff_of(m)}", flush=True)  # fmt: skip
        if time.monotonic() > until:
            tally.ended = "deadline"
            return


def record(tally: Tally, item: Judged, equivalents: Equivalents) -> dict[str, object]:
    m = item.mutant
    return {
        "task": tally.task, "language": tally.language, "file": m.file, "line": m.line,
        "kind": m.kind, "was": m.was, "now": m.now, "fate": item.fate, "share": item.share,
        "says": item.says, "equivalent": equivalents.reason(m) or "",
    }  # fmt: skip


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", action="append", choices=task_names())
    parser.add_argument("--language", action="append", choices=("cpp", "triton", "cuda"))
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu" if has_gpu() else "cpu")
    parser.add_argument("--jobs", type=int, default=usable_cores())
    parser.add_argument("--sample", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deadline-s", type=float, default=float("inf"))
    parser.add_argument("--only", default="", help="mutants whose file, lines or change have this")
    parser.add_argument("--conditions", action="store_true", help="mutants of conditions instead")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> int:
    options = parsed()
    began = time.monotonic()
    possible = ("triton", "cuda") if options.device == "gpu" else ("cpp", "triton")
    if options.conditions and options.device == "cpu":
        possible = ("cpp",)  # the interpreter takes small cases only
    languages = [x for x in options.language or possible if x in possible]
    tallies = [Tally(t, x) for t in options.task or task_names() for x in languages]
    equivalents = Equivalents()
    with Builder(options.jobs) as builder:
        for number, tally in enumerate(tallies):
            now = time.monotonic()
            # Each gets its part of the time that is left.
            until = now + (began + options.deadline_s - now) / (len(tallies) - number)
            try:
                with contextlib.closing(judged(tally.task, tally.language, builder, options)) as it:
                    take(tally, it, equivalents, until)
            except KagentError as e:  # the machine's failure, not a mutant's
                tally.ended = f"{type(e).__name__}: {e}"
            print(tally.row(), f"{time.monotonic() - now:.0f} s", flush=True)
            if options.json:
                where = place(options)
                all_of_it = [record(t, j, equivalents) for t in tallies for j in t.judged]
                options.json.write_text(
                    json.dumps({"where": where, "mutants": all_of_it}, indent=1)
                )
    print(f"\n{place(options)}\n")
    print("| task | language | caught | mutants | score | listed | same code | not built | ended |")
    print("|---|---|---|---|---|---|---|---|---|")
    print("\n".join(t.row() for t in tallies))
    return int(any(t.count(Fate.SURVIVED) > t.listed for t in tallies))


def place(options: argparse.Namespace) -> str:
    versions = ", ".join(f"{v} {importlib.metadata.version(v)}" for v in VERSIONS)
    device = options.device
    if device == "gpu":
        import torch

        device = torch.cuda.get_device_name()
    return (
        f"{device}, {versions}, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}; "
        f"--sample {options.sample} --seed {options.seed}"
    )


if __name__ == "__main__":
    sys.exit(main())
