"""A candidate with its tunables set to other values, raced beside other files and all baselines.

    python benchmarks/variants.py attention seeds/attention/gluon_hopper.py KEYS=64,STAGES=3 \
        [--beside FILE ...] [--check]

Each further argument is one variant: values of tunables with commas between them, from the lists in
the file's TUNE. Prints each kernel's time by case in ms, and its ratio to the fastest baseline of
that case, with 95 % intervals. `--check` checks every file on all cases, and times nothing.
"""

import argparse
import ast
import importlib.metadata
import tempfile
import time
from pathlib import Path

from kagent.candidate_file import bench_files, check_file
from kagent.config.settings import load_config
from kagent.search.tunables import Value, read_tunables
from kagent.tasks import find_task
from kagent_sandbox.data.race import Race
from kagent_sandbox.data.verdict import Rejected


def variant(source: str, text: str) -> str:
    """The source with `text` ("KEYS=64,STAGES=3") among its tunables."""
    tunables = read_tunables(source)
    known = {t.name: t for t in tunables.items} if tunables else {}
    values: dict[str, Value] = {}
    for item in text.split(","):
        name, _, value = item.partition("=")
        if name not in known:
            raise SystemExit(f"{text}: no tunable {name!r}; there are {', '.join(known) or 'none'}")
        values[name] = ast.literal_eval(value)
        if values[name] not in known[name].values:
            raise SystemExit(f"{text}: {name} is one of {known[name].values}")
    assert tunables is not None
    return tunables.rewrite(values)


def table(race: Race) -> str:
    """Lines of Markdown: kernels and baselines down, cases across."""
    names = list({n: None for c in race.cases for n in (*c.candidates, *c.baselines)})
    lines = ["| ms (× fastest baseline) | " + " | ".join(c.case for c in race.cases) + " |"]
    lines.append("|---" * (1 + len(race.cases)) + "|")
    for name in names:
        cells = []
        for case in race.cases:
            timing = case.candidates.get(name) or case.baselines.get(name)
            if timing is None:
                cells.append("–")
                continue
            cell = f"{timing.kernel_us / 1e3:.4f}"
            fastest = min(case.baselines, key=lambda n: case.baselines[n].kernel_us, default="")
            ratio = case.ratio(name, fastest)
            if ratio:
                cell += f" ({ratio.value:.3f}, {ratio.low:.3f}–{ratio.high:.3f})"
            cells.append(cell)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task")
    parser.add_argument("file", type=Path)
    parser.add_argument("variants", nargs="*")
    parser.add_argument("--beside", type=Path, nargs="+", default=[])
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    task, jobs = find_task(options.task), load_config().jobs
    source = options.file.read_text()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        files = [options.file]
        for text in options.variants:
            name = options.file.stem + "_" + text.replace("=", "").replace(",", "_")
            files.append(Path(folder) / f"{name}.py")
            files[-1].write_text(variant(source, text))
        files += options.beside
        if options.check:
            for file in files:
                checked = check_file(task, file, jobs=jobs)
                verdict = checked.verdict
                found = (
                    f"{verdict.status} in {verdict.case}: {verdict.message[:300]}"
                    if isinstance(verdict, Rejected)
                    else f"right in {len(verdict)} results"
                )
                print(f"{file.stem}: {found} ({checked.device})", flush=True)
            return
        result = bench_files(task, files, jobs=jobs, configs=1, say=lambda _: None)
    versions = ", ".join(f"{n} {importlib.metadata.version(n)}" for n in ("torch", "triton"))
    where = result.facts.name if result.facts else "no device"
    print(f"{task.name}, {where}, {versions}, {time.monotonic() - began:.0f} s\n")
    print(table(result.race))
    for name, verdict in {**result.rejected, **result.race.failed}.items():
        print(f"{name}: {verdict.status} in {verdict.case}: {verdict.message[:300]}")
    if result.failure is not None:
        raise SystemExit(f"the race failed: {result.failure}")


if __name__ == "__main__":
    main()
