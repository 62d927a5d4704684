"""Positions on the report's axes, in % of their length: the page draws with them, at any width."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

_STEPS: Sequence[float] = (1, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005)
"""Distances of values on an axis that is short."""
_DIGITS: Sequence[Sequence[float]] = ((1,), (1, 3), (1, 2, 5))
"""Digits of round numbers in each power of ten, on one that is long."""
_MOST = 40  # values that are looked at


@dataclass(frozen=True, slots=True)
class RatioScale:
    """A logarithmic axis of ratios: 2× is as far from 1× as 0.5× is."""

    low: float
    high: float

    @classmethod
    def around(cls, values: Iterable[float | None]) -> RatioScale:
        """The axis that has 1 and all values on it, with a little room. None stands for no value,
        and what has no logarithm is left out.
        """
        logs = [0.0, *(math.log(v) for v in values if v is not None and 0 < v < math.inf)]
        room = max(0.02, 0.04 * (max(logs) - min(logs)))
        return cls(math.exp(min(logs) - room), math.exp(max(logs) + room))

    def at(self, value: float) -> float:
        """Position of a value in %; values beyond an end lie on it."""
        low, high = math.log(self.low), math.log(self.high)
        log = math.log(value) if value > 0 else -math.inf
        return round(100 * (min(max(log, low), high) - low) / (high - low), 2)

    def span(self, first: float, second: float) -> tuple[float, float]:
        """Start and length in % of the stretch between two values, in either order."""
        start, end = sorted((self.at(first), self.at(second)))
        return start, round(end - start, 2)

    def ticks(self, apart: float) -> list[tuple[float, str]]:
        """Values by one rule, with their labels, at least `apart` % from each other; 1 is among
        them: multiples of a round number, or the same digits in each power of ten.
        """
        chosen: list[float] = [1.0]
        for values in self._rules():
            places = [self.at(v) for v in values]
            fits = all(b - a >= apart for a, b in itertools.pairwise(places))
            if fits and len(values) > len(chosen):
                chosen = values
        return [(self.at(v), f"{v:g}×") for v in chosen]

    def _rules(self) -> Iterator[list[float]]:
        """Values on the axis by each rule, the roundest first."""
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for digits in _DIGITS:
            yield self._on_axis(d * 10.0**p for p in powers for d in digits)
        for step in _STEPS:
            first, last = math.ceil(self.low / step), math.floor(self.high / step)
            if last - first < _MOST:
                yield self._on_axis(step * n for n in range(first, last + 1))

    def _on_axis(self, values: Iterable[float]) -> list[float]:
        rounded = (float(f"{v:.6g}") for v in values)
        return [v for v in rounded if self.low <= v <= self.high]


def whole_ticks(last: int, most: int) -> list[int]:
    """Multiples of 1, 2 or 5 times a power of ten from 0 to `last`, at most `most` of them."""
    steps = (d * 10**p for p in range(9) for d in (1, 2, 5))
    step = next(s for s in steps if last // s + 1 <= most)
    return list(range(0, last + 1, step))
