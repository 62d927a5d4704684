"""Search over the configurations of a file's tunables.

Ridge regression on main effects says what each value of each tunable is worth, and expected
improvement which configuration to try next. A space of at most `WHOLE` configurations is tried in
full, the nearest to the declared one first.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Config: TypeAlias = tuple[int, ...]
"""Index of the value of each tunable."""

WHOLE = 16
LISTED = 4096  # configurations that are considered in larger spaces
NOISE = 0.01  # standard deviation of one measured log speed, at least
EFFECT = 0.8  # prior standard deviation of a value's effect, over that of the measured log speeds
LEAST_SPREAD, FIRST_SPREAD = 0.03, 0.1  # of the log speeds, while few are known
FAILED = 0.1  # log speed by which what was rejected counts as slower than the slowest


class ConfigSearch:
    """Knowledge of one space, and the next try. The order of additions does not matter."""

    def __init__(self, sizes: Sequence[int], start: Config, rng: random.Random) -> None:
        """Begin with nothing known.

        Args:
            sizes: Number of values of each tunable.
            start: The declared configuration.
            rng: Breaks ties, and picks the configurations that are considered in a large space.
        """
        self._start = start
        self._size = math.prod(sizes)
        listed = _all(sizes) if self._size <= LISTED else _near(sizes, start, rng)
        ranked = [(_changes(c, start), rng.random(), c) for c in listed]
        self._listed = [config for *_, config in sorted(ranked)]  # the nearest first
        self._places = {config: place for place, config in enumerate(self._listed)}
        self._rows = np.array(self._listed)
        self._known: dict[Config, float | None] = {}

    def add(self, config: Config, log_speed: float | None) -> None:
        """Tell what was measured: log speed over anything fixed; None if it was rejected."""
        self._known[config] = log_speed

    def knows(self, config: Config) -> bool:
        """Whether it was told the result of a configuration."""
        return config in self._known

    @property
    def best(self) -> Config:
        """The fastest that is known; the declared one while there is none."""
        passed = {c: s for c, s in self._known.items() if s is not None}
        return max(passed, key=lambda c: passed[c], default=self._start)

    def next(self, pending: Sequence[Config] = ()) -> Config | None:
        """The configuration to try next, or None when all were tried.

        Args:
            pending: Configurations that are being tried: taken to be what is expected of them.
        """
        taken = {*self._known, *pending}
        left = self._left(taken)
        if not len(left):
            return None
        first: Config = self._listed[left[0]]
        if first == self._start or self._size <= WHOLE:
            return first
        none_passed = all(s is None for s in self._known.values())
        if none_passed or len(taken) <= len(self._start) // 2 + 1:
            worth = self._news(self._rows[left], taken)
        else:
            worth = self._expected_gains(self._rows[left], pending)
        found: Config = self._listed[left[int(np.argmax(worth))]]
        return found

    def _left(self, taken: Collection[Config]) -> NDArray[np.int64]:
        """Places of the configurations that are not taken, the nearest first."""
        free = np.ones(len(self._listed), np.bool_)
        free[[self._places[c] for c in taken if c in self._places]] = False
        return np.flatnonzero(free)

    def most_expected_gain(self, over: float, tried: Sequence[Config] = ()) -> float:
        """Largest expected gain over a log speed among configurations that were not tried; 0 where
        nothing is left. Something must be known to have passed.
        """
        left = self._left({*self._known, *tried})
        if not len(left):
            return 0.0
        return float(np.max(self._expected_gains(self._rows[left], over=over)))

    def _news(self, rows: NDArray[np.int64], taken: Collection[Config]) -> NDArray[np.float64]:
        """Novelty of configurations: the sum over their values of one over the value's count,
        float64 (n,).
        """
        counts = sum(np.equal(rows, np.array(t)).astype(np.float64) for t in taken)
        return np.asarray(np.sum(1 / (1 + 2 * counts), axis=1))

    def _expected_gains(
        self,
        rows: NDArray[np.int64],
        pending: Sequence[Config] = (),
        over: float | None = None,
    ) -> NDArray[np.float64]:
        """Expected improvement in log speed of n configurations, float64 (n,), over a log speed;
        None: over the best that is known.
        """
        known = self._known_speeds()
        passed = [s for s in self._known.values() if s is not None]
        spread = max(LEAST_SPREAD, float(np.std(passed)) if len(passed) > 1 else FIRST_SPREAD)
        best = max(passed) if over is None else over
        model = _Ridge(known, spread)
        if pending:
            means, _ = model.predict(np.array(pending))
            model = _Ridge({**known, **dict(zip(pending, means, strict=True))}, spread)
        mean, deviation = model.predict(rows)
        z = (mean - best) / deviation
        below = 1 / (1 + np.exp(-np.clip(1.5976 * z + 0.07056 * z**3, -40, 40)))  # Φ to 2e-4
        density = np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        return np.maximum(0.0, (mean - best) * below + deviation * density)

    def _known_speeds(self) -> Mapping[Config, float]:
        slowest = min(s for s in self._known.values() if s is not None) - FAILED
        return {c: slowest if s is None else s for c, s in self._known.items()}


class _Ridge:
    """Main effects of the values, and the noise that explains the rest best (leave one out)."""

    def __init__(self, known: Mapping[Config, float], spread: float) -> None:
        self._configs = np.array(list(known))
        speeds = np.array(list(known.values()))
        self._effect = (EFFECT * spread) ** 2
        self._mean = float(speeds.mean())
        same = self._covariance(self._configs)
        best = -math.inf
        for variance in (NOISE**2, (0.25 * spread) ** 2, (0.5 * spread) ** 2):
            inverse = np.linalg.inv(same + variance * np.eye(len(speeds)))
            weights = inverse @ (speeds - self._mean)
            left_out = 1 / np.diag(inverse)
            errors = weights * left_out
            likelihood = float(-0.5 * np.sum(np.log(left_out) + errors**2 / left_out))
            if likelihood > best:
                best = likelihood
                self._variance, self._inverse, self._weights = variance, inverse, weights

    def _covariance(self, configs: NDArray[np.int64]) -> NDArray[np.float64]:
        shared = sum(
            np.equal.outer(configs[:, i], self._configs[:, i]) for i in range(configs.shape[1])
        )
        return 100.0 * self._effect + self._effect * np.asarray(shared, np.float64)

    def predict(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean and standard deviation of n configurations' log speeds, float64 (n,)."""
        cross = self._covariance(rows)
        own = (100.0 + rows.shape[1]) * self._effect
        explained = np.sum((cross @ self._inverse) * cross, axis=1)
        variance = np.maximum(1e-9, own - explained + self._variance)
        return self._mean + cross @ self._weights, np.sqrt(variance)


def _changes(config: Config, start: Config) -> int:
    return sum(a != b for a, b in zip(config, start, strict=True))


def _all(sizes: Sequence[int]) -> Iterator[Config]:
    return itertools.product(*map(range, sizes))


def _near(sizes: Sequence[int], start: Config, rng: random.Random) -> set[Config]:
    """The declared configuration, all that differ in one tunable, and others at random."""
    found = {start}
    for i, size in enumerate(sizes):
        found.update((*start[:i], value, *start[i + 1 :]) for value in range(size))
    while len(found) < LISTED:
        found.add(tuple(rng.randrange(size) for size in sizes))
    return found
