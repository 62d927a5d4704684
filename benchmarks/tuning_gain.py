"""How much a kernel gains from other constants: recorded answers, as written and tuned.

    python benchmarks/tuning_gain.py RUN... [--configs 48] [--deadline-s 200]

Each kernel of a run's folder that has tunables, builds and passes the check is tuned as a search
does it before a verdict, with up to `--configs` configurations. The file with the best constants is
then timed beside the file as it was written, as a candidate is beside an incumbent. One line each,
then the median gain, and with how many configurations the search stopped.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from kagent.config.settings import load_config
from kagent.evolve.open_machine import request_maker, search_cases
from kagent.evolve.tuning import Tuned, Tuning
from kagent.runs.manifest import find_run, read_manifest
from kagent.search.tunables import read_tunables
from kagent.tasks import find_task
from kagent_sandbox.builder.client import Builder
from kagent_sandbox.data.build import BuildRequest, Built
from kagent_sandbox.data.language import language_of_source
from kagent_sandbox.data.verdict import Rejected
from kagent_sandbox.judge.client import JudgeClient

SECRET = 17


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--configs", type=int, default=48)
    parser.add_argument("--deadline-s", type=float, default=200.0)
    options = parser.parse_args()
    end = time.monotonic() + options.deadline_s
    gains: list[float] = []
    for run in options.runs:
        gains += of_run(find_run(load_config().runs, run), options.configs, end)
    if gains:
        print(f"{len(gains)} kernels: median gain {100 * (statistics.median(gains) - 1):.2f} %, ")
        print("all, in percent: " + ", ".join(f"{100 * (g - 1):.1f}" for g in sorted(gains)))


def of_run(folder: Path, configs: int, end: float) -> list[float]:
    """Ratios of tuned to written files; 1 where the constants as written were as good."""
    task = find_task(str(read_manifest(folder).task))
    files = sorted((folder / "kernels").glob("*.py"))
    sources = {f.stem: f.read_text() for f in files}
    kind = language_of_source(next(iter(sources.values()))).kind
    gains: list[float] = []
    with Builder(load_config().jobs) as builder, JudgeClient(task.folder, kind, SECRET) as judge:
        request = request_maker(task, judge.facts, search_cases(task, kind, SECRET), 1)
        timed = request_maker(task, judge.facts, [*task.cases(kind).bench], 1)
        print(f"{folder.name}: {judge.facts.name}, {judge.noise().text}", flush=True)
        judge.ceilings()

        async def build(asked: BuildRequest) -> Built | Rejected:
            return await asyncio.to_thread(builder.build, asked)

        async def sweep(built: Built) -> Sequence[Mapping[str, float]] | Rejected:
            return await asyncio.to_thread(judge.sweep, built)

        for name, source in sources.items():
            tunables = read_tunables(source)
            if time.monotonic() > end or tunables is None or tunables.size < 2:
                continue
            written = builder.build(request(source))
            errors = written if isinstance(written, Rejected) else judge.check(written)
            if isinstance(written, Rejected) or isinstance(errors, Rejected):
                print(f"{name}: {errors}"[:120], flush=True)
                continue
            began = time.monotonic()
            best = asyncio.run(Tuning(configs, timed, build, sweep).best(source, written))
            took = time.monotonic() - began
            of = f"of {tunables.size} configurations, {took:.1f} s"
            if best is None:
                gains.append(1.0)
                print(f"{name}: constants as written, {of}", flush=True)
                continue
            gains.append(measured(builder.build(request(best.source)), best, written, judge))
            print(f"{name}: {gains[-1]:.3f}× by {best.what}, {best.configs} {of}", flush=True)
    return gains


def measured(built: Built | Rejected, best: Tuned, written: Built, judge: JudgeClient) -> float:
    """Ratio of the tuned file to the written one; 1 where it fails the check."""
    errors = built if isinstance(built, Rejected) else judge.check(built)
    if isinstance(built, Rejected) or isinstance(errors, Rejected):
        print(f"  {best.what}: {errors}"[:160])
        return 1.0
    verdict = judge.measure(built, errors, written, "as written")
    if isinstance(verdict, Rejected) or verdict.versus is None:
        print(f"  {best.what}: {verdict}"[:160])
        return 1.0
    return verdict.versus.ratio


if __name__ == "__main__":
    main()
