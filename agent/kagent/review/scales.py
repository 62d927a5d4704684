"""Positions on the report's axes, in % of their length: the page draws with them, at any width."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

_ROUND: Sequence[Sequence[float]] = (
    (1,),
    (2, 5),
    (1.5, 3, 7),
    range(1, 10),
    [1 + i / 5 for i in range(5)],
    [1 + i / 2 for i in range(18)],
    [1 + i / 10 for i in range(10)],
    [1 + i / 10 for i in range(90)],
    [1 + i / 100 for i in range(900)],
)
"""Digits of round numbers, the roundest first."""


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
        """Round values with their labels, at least `apart` % from each other; 1 is among them.

        Three quarters of those that have room are enough: less round ones come only where there are
        fewer.
        """
        chosen = [1.0]
        for digits in _ROUND:
            for value in self._multiples(digits):
                if all(abs(self.at(value) - self.at(other)) >= apart for other in chosen):
                    chosen.append(value)
            if len(chosen) >= 0.75 * (100 / apart - 1):
                break
        return [(self.at(v), f"{v:g}×") for v in sorted(chosen)]

    def _multiples(self, digits: Sequence[float]) -> Iterator[float]:
        """Values on the axis that are one of `digits` times a power of ten."""
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        values = (float(f"{d * 10.0**p:.6g}") for p in powers for d in digits)
        return (v for v in values if self.low <= v <= self.high)


def whole_ticks(last: int, most: int) -> list[int]:
    """Multiples of 1, 2 or 5 times a power of ten from 0 to `last`, at most `most` of them."""
    steps = (d * 10**p for p in range(9) for d in (1, 2, 5))
    step = next(s for s in steps if last // s + 1 <= most)
    return list(range(0, last + 1, step))
