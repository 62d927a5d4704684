"""What looking several times costs and finds, with normal noise: a simulation.

    python benchmarks/looks.py [--comparisons 400000] [--seed 1]

For numbers of cases and standard deviations of pairs, on a CPU: how often a kernel that is as fast
as the incumbent is called faster, how often one that is faster by 5 %, and how many pairs of blocks
of each case that takes on average. docs/measuring.md has it.
"""

import argparse
import math
from statistics import NormalDist

import numpy as np
from kagent_sandbox.device.cpu.traits import TRAITS
from kagent_sandbox.judge.timing.estimates import LOOK_RESAMPLES
from kagent_sandbox.judge.timing.versus_incumbent import CLEAR, HOPELESS, WORTHWHILE
from numpy.typing import NDArray

PROMOTION = 0.95
GAINS = (1.0, 1.05)


def simulate(
    cases: int, pair_sd: float, gain: float, comparisons: int, rng: np.random.Generator
) -> tuple[float, float]:
    """Share of comparisons that promote a kernel which is faster by `gain` on each case, and the
    mean number of pairs of a case.

    `pair_sd` is the standard deviation of log(ratio) from pair to pair of blocks, of one case.
    """
    pace = TRAITS.schedule
    more = pace.more(cases)
    assert more is not None
    first = sum(p.pairs for p in pace.rounds)
    pairs = first + more.pairs * np.arange(pace.interim_looks + 1)
    steps = np.diff(pairs, prepend=0) * cases
    noise = pair_sd * rng.normal(size=(comparisons, len(pairs))) * np.sqrt(steps)
    estimates = math.log(gain) + noise.cumsum(axis=1) / (pairs * cases)
    going, faster = np.ones(comparisons, bool), np.zeros(comparisons, bool)
    used = np.zeros(comparisons)
    normal = NormalDist()
    for look, n in enumerate(pairs):
        used[going] = n
        last = look == pace.interim_looks
        error = pair_sd / math.sqrt(n * cases)
        z = estimates[:, look] / error
        high = estimates[:, look] + normal.inv_cdf(0.975) * error
        # An early look counts resamples, which are few beside what it wants to know.
        said = rng.binomial(LOOK_RESAMPLES, _probability(z)) / LOOK_RESAMPLES
        faster |= going & (z > normal.inv_cdf(PROMOTION) if last else said >= CLEAR)
        hopeless = HOPELESS[min(look, len(HOPELESS) - 1)]
        going &= ~faster & ~((said <= hopeless) & (high < math.log(WORTHWHILE)))
    return float(faster.mean()), float(used.mean())


def _probability(z: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(0.5 + 0.5 * np.vectorize(math.erf)(z / math.sqrt(2)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comparisons", type=int, default=400_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    print("cases | a pair | equal called faster | pairs | 5 % found | pairs")
    for cases in (1, 2, 6):
        for pair_sd in (0.05, 0.1, 0.15, 0.2):
            found = [simulate(cases, pair_sd, g, options.comparisons, rng) for g in GAINS]
            shown = " | ".join(f"{share:.1%} | {pairs:.1f}" for share, pairs in found)
            print(f"{cases} | {pair_sd:.0%} | {shown}")


if __name__ == "__main__":
    main()
