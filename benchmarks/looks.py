"""How often looking several times promotes an equal kernel, with normal noise: a simulation.

    python benchmarks/looks.py [--comparisons 400000] [--seed 1]

For each number of cases, on a CPU: how often a kernel that is as fast as the incumbent is called
faster, and how many pairs of blocks of each case that takes on average. docs/measuring.md has it.
"""

import argparse
import math
from statistics import NormalDist

import numpy as np
from kagent_sandbox.blocks import PACES
from kagent_sandbox.timing import LOOK_RESAMPLES
from kagent_sandbox.turns import CLEAR, HOPELESS
from numpy.typing import NDArray

PROMOTION = 0.95


def simulate(cases: int, comparisons: int, rng: np.random.Generator) -> tuple[float, float]:
    """Share of comparisons that promote an equal kernel, and the mean number of pairs of a case."""
    pace = PACES["cpu"]
    more = pace.more(cases)
    assert more is not None
    first = sum(p.pairs for p in pace.phases)
    pairs = first + more.pairs * np.arange(pace.looks + 1)
    steps = np.diff(pairs, prepend=0)
    z = (rng.normal(size=(comparisons, len(pairs))) * np.sqrt(steps)).cumsum(axis=1)
    z /= np.sqrt(pairs)
    going, faster = np.ones(comparisons, bool), np.zeros(comparisons, bool)
    used = np.zeros(comparisons)
    normal = NormalDist()
    for look, n in enumerate(pairs):
        used[going] = n
        last = look == pace.looks
        # An early look counts resamples, which are few beside what it wants to know.
        said = rng.binomial(LOOK_RESAMPLES, _probability(z[:, look])) / LOOK_RESAMPLES
        faster |= going & (z[:, look] > normal.inv_cdf(PROMOTION) if last else said >= CLEAR)
        going &= ~faster & (said > HOPELESS[min(look, len(HOPELESS) - 1)])
    return float(faster.mean()), float(used.mean())


def _probability(z: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(0.5 + 0.5 * np.vectorize(math.erf)(z / math.sqrt(2)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comparisons", type=int, default=400_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    for cases in (1, 2, 6):
        wrong, pairs = simulate(cases, options.comparisons, rng)
        print(
            f"{cases} cases: called faster {wrong:.2%}, after {pairs:.1f} pairs of each on average"
        )


if __name__ == "__main__":
    main()
