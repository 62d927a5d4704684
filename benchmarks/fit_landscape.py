"""Recorded answers as figures, and the simulated landscape that is most like them.

    python benchmarks/fit_landscape.py [RUN...] [--seeds 60] [--jobs 2]

Runs are those that models or people answered; by default the two that ship. Of their answers: the
share that failed, the share that became the incumbent, the deciles of the log ratio to the
incumbent of the moment, the mean log gain of a promotion, and the standard error of a comparison.
Then landscapes of `search_simulation.py` around `calibrated`, each with kagent as it was then (no
constants tuned before, one idea), for as many answers: the nearest first, by the squared
differences of these figures over what chance does to them in so few answers.

What was never seen cannot be fitted: where no answer failed, nothing says how repairs go.
"""

import argparse
import itertools
import math
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from kagent.config.settings import load_config
from kagent.runs.lineage import FREE, Lineage
from kagent.runs.manifest import find_run
from kagent.runs.store import read_history
from kagent_sandbox.data.verdict import Passed
from search_simulation import LANDSCAPES, Landscape, Search, World
from work_queue import cancelled_on_interrupt

DECILES = (1, 3, 5, 7, 9)
GRID = {
    "scale": (0.15, 0.3, 0.6, 1.0),
    "breaks": (0.0, 0.2, 0.5, 1.0),
    "belief": (0.03, 0.08, 0.3),
}


@dataclass(frozen=True)
class Answers:
    """Answers of one or several runs: the log ratio of each that passed, and what came of it."""

    count: int
    failed: int
    logs: tuple[float, ...]
    gains: tuple[float, ...]  # of those that were promoted
    stderr: float  # median, of a comparison

    @property
    def figures(self) -> dict[str, float]:
        """The figures that are compared."""
        cuts = statistics.quantiles(self.logs, n=10, method="inclusive")
        return {
            "failed": self.failed / self.count,
            "promoted": len(self.gains) / self.count,
            **{f"decile {d}": cuts[d - 1] for d in DECILES},
            "gain": statistics.mean(self.gains) if self.gains else 0.0,
        }

    def errors(self) -> dict[str, float]:
        """Standard errors of the figures for so many answers."""
        spread = statistics.stdev(self.logs) / math.sqrt(len(self.logs))
        share = math.sqrt(0.25 / self.count)
        return {
            "failed": share,
            "promoted": share,
            **{f"decile {d}": 1.5 * spread for d in DECILES},
            "gain": spread,
        }


def answers(lineages: Sequence[Lineage], most: int | None = None) -> Answers:
    """The answers of runs, at most the first `most` of each; duplicates are none."""
    logs: list[float] = []
    gains: list[float] = []
    errors: list[float] = []
    count = failed = 0
    for lineage in lineages:
        promoted = {c.id for c in lineage.promotions}
        asked = [c for c in lineage if c.proposal.operator not in FREE and not c.is_duplicate]
        for candidate in asked[:most]:
            count += 1
            verdict = candidate.verdict
            if not isinstance(verdict, Passed):
                failed += 1
            elif verdict.versus is not None:
                versus = verdict.versus
                log = math.log(versus.ratio)
                logs.append(log)
                errors.append((math.log(versus.high) - math.log(versus.low)) / 3.92)
                if candidate.id in promoted:
                    gains.append(log)
    return Answers(count, failed, tuple(logs), tuple(gains), statistics.median(errors))


def simulated(kind: Landscape, each: int, seed: int) -> Lineage:
    """One simulated run of `each` answers."""
    search = Search(World(kind, seed), each + 1, 1, most_ideas=1)
    search.run()
    return search.lineage


def told(found: Answers) -> str:
    """All figures in a line."""
    return "  ".join(f"{name} {value:+.3f}" for name, value in found.figures.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*")
    parser.add_argument("--seeds", type=int, default=60)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    runs = options.runs or ["softmax-ask-tell", "cross_entropy-ask-tell"]
    folder = load_config().runs
    lineages = [read_history(find_run(folder, run))[1].lineage for run in runs]
    recorded = answers(lineages)
    if not recorded.count:
        parser.error(f"{', '.join(runs)}: nothing was answered")
    print(f"{recorded.count} answers of {', '.join(runs)}; comparisons ± {recorded.stderr:.4f}")
    print(f"recorded: {told(recorded)}")
    each = math.ceil(recorded.count / len(runs))
    errors, figures = recorded.errors(), recorded.figures
    noisy = replace(LANDSCAPES["calibrated"], noise=max(0.001, recorded.stderr))
    kinds = [
        replace(noisy, **dict(zip(GRID, values, strict=True)))
        for values in itertools.product(*GRID.values())
    ]
    ranked = []
    with ProcessPoolExecutor(options.jobs) as pool, cancelled_on_interrupt(pool):
        for kind in kinds:
            work = partial(simulated, kind, each)
            found = answers(list(pool.map(work, range(options.seeds), chunksize=8)), each)
            distance = sum(
                ((value - found.figures[name]) / errors[name]) ** 2
                for name, value in figures.items()
            )
            ranked.append((distance, kind, found))
    ranked.sort(key=lambda r: r[0])
    for distance, kind, found in ranked[:5]:
        values = ", ".join(f"{name} {getattr(kind, name):g}" for name in GRID)
        print(f"{distance:7.1f}  {values}: {told(found)}")


if __name__ == "__main__":
    main()
