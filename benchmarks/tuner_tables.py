"""How fast the choice of constants comes near the best of a table.

    python benchmarks/tuner_tables.py [--tables 48] [--draws 5] [--budget 50]

A table has three to six tunables with two to four values each, 24 to 320 configurations in all, as
kernels declare them. Its log speeds are drawn: an effect of each value, effects of two pairs of
tunables, and for every configuration something that nothing explains, a tenth of the variance; one
configuration in ten fails. The declared one lies between the median and the best quarter, and at
least 3 % can be gained. Each try is measured with 1 % noise.

Printed for each way to choose: the share of the best gain that the best measured configuration has
after some evaluations, and the median number of evaluations until that share is 0.95 for good.
"""

import argparse
import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from kagent.search.config_search import Config, ConfigSearch

NOISE = 0.01
FAILING = 0.1
UNEXPLAINED = 0.1  # of the variance
ENOUGH = 0.95


@dataclass(frozen=True)
class Table:
    """Log speed of each configuration over the declared one; None where it fails."""

    sizes: tuple[int, ...]
    declared: Config
    logs: Mapping[Config, float | None]

    @property
    def best(self) -> float:
        """The largest gain."""
        return max(log for log in self.logs.values() if log is not None)


def drawn(seed: int) -> Table:
    """A table by its seed."""
    draw = np.random.default_rng(seed)
    while True:
        sizes = tuple(int(n) for n in draw.integers(2, 5, draw.integers(3, 7)))
        if not 24 <= math.prod(sizes) <= 320:
            continue
        effects = [draw.normal(0, 0.12, n) for n in sizes]
        pairs = [draw.choice(len(sizes), 2, replace=False) for _ in range(2)]
        joint = [draw.normal(0, 0.06, (sizes[i], sizes[j])) for i, j in pairs]
        every = list(itertools.product(*map(range, sizes)))
        logs = np.array(
            [
                sum(effects[k][v] for k, v in enumerate(config))
                + sum(j[config[a], config[b]] for (a, b), j in zip(pairs, joint, strict=True))
                for config in every
            ]
        )
        share = math.sqrt(UNEXPLAINED / (1 - UNEXPLAINED))
        logs = logs + draw.normal(0, share * float(logs.std()), len(every))
        works = draw.random(len(every)) >= FAILING
        ranked = np.sort(logs[works])
        low, high = ranked[len(ranked) // 2], ranked[int(0.75 * len(ranked))]
        middle = np.flatnonzero(works & (logs >= low) & (logs <= high))
        if not len(middle):
            continue
        declared = int(draw.choice(middle))
        if ranked[-1] - logs[declared] < 0.03:
            continue
        base = logs[declared]
        found = zip(every, logs - base, works, strict=True)
        return Table(
            sizes, every[declared], {c: float(log) if ok else None for c, log, ok in found}
        )


def model(table: Table, rng: random.Random) -> Iterator[Config]:
    """The choice of kagent's tuning."""
    search = ConfigSearch(table.sizes, table.declared, rng)
    while (config := search.next()) is not None:
        log = table.logs[config]
        search.add(config, None if log is None else log + rng.gauss(0, NOISE))
        yield config


def nearest(table: Table, rng: random.Random) -> Iterator[Config]:
    """All that differ from the declared one in one tunable, then in two, and so on."""

    def order(config: Config) -> tuple[int, float]:
        return sum(a != b for a, b in zip(config, table.declared, strict=True)), rng.random()

    yield from sorted(table.logs, key=order)


def anything(table: Table, rng: random.Random) -> Iterator[Config]:
    """The declared one, then any."""
    others = [c for c in table.logs if c != table.declared]
    rng.shuffle(others)
    yield from (table.declared, *others)


def curve(
    table: Table, choose: Callable[..., Iterator[Config]], budget: int, seed: int
) -> list[float]:
    """Share of the best gain that the best measured configuration has after each evaluation."""
    rng, noise = random.Random(f"{seed}"), random.Random(f"{seed}/noise")
    best, shares = (-math.inf, 0.0), list[float]()
    for config in itertools.islice(choose(table, rng), budget):
        log = table.logs[config]
        if log is not None:
            best = max(best, (log + noise.gauss(0, NOISE), log))
        shares.append(best[1] / table.best)
    return shares + shares[-1:] * (budget - len(shares))


def reached(shares: list[float]) -> float:
    """Evaluations until the share is `ENOUGH` for good; infinity where it never is."""
    below = [i for i, share in enumerate(shares) if share < ENOUGH]
    last = below[-1] + 1 if below else 0
    return last + 1 if last < len(shares) else math.inf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", type=int, default=48)
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--budget", type=int, default=50)
    options = parser.parse_args()
    tables = [drawn(seed) for seed in range(options.tables)]
    sizes = sorted(len(t.logs) for t in tables)
    print(f"{len(tables)} tables of {sizes[0]} to {sizes[-1]} configurations")
    for choose in (anything, nearest, model):
        found = [
            curve(table, choose, options.budget, 1000 * number + draw)
            for number, table in enumerate(tables)
            for draw in range(options.draws)
        ]
        at = [n for n in (8, 16, 25, 50) if n <= options.budget]
        shares = "  ".join(f"@{n} {statistics.mean(c[n - 1] for c in found):.3f}" for n in at)
        median = statistics.median(map(reached, found))
        print(f"{choose.__name__:10} {shares}  {ENOUGH} after {median:g} (median)", flush=True)


if __name__ == "__main__":
    main()
