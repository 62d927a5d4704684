"""Ranges of task.toml: sizes and lists of sizes that hidden cases are drawn from."""

from __future__ import annotations

import math
import random
from typing import Self

import pydantic
from pydantic import Field

from kagent_sandbox.data.case import StrictModel
from kagent_sandbox.data.formula import MOST_NUMBERS

MOST_SIZE = 1 << 48  # of a range: no device has memory for more elements
MOST_PRIME = (1 << 31) - 1  # finding a prime near it takes a moment


class Range(StrictModel):
    """Whole numbers from min to max, evenly in the logarithm; multiples of one, or primes only."""

    min: int = Field(ge=1)
    max: int = Field(ge=1, le=MOST_SIZE)
    multiple: int = Field(default=1, ge=1)
    prime: bool = False

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.prime and self.multiple > 1:
            raise ValueError("prime or multiple, not both")
        if self.prime and self.max > MOST_PRIME:
            raise ValueError(f"max is {self.max}: expected {MOST_PRIME} at most where prime is set")
        if self.min > self.max:
            raise ValueError(f"min is {self.min}, and max {self.max}: expected min <= max")
        if self.nearest(self.min, self.max) is None:
            raise ValueError(f"nothing to draw from {self.min} to {self.max}")
        return self

    def nearest(self, value: float, limit: int) -> int | None:
        """The largest number of the range that is at most `value`, else the smallest above it.

        None if there is none up to `limit`.
        """
        start = min(max(math.floor(value), self.min), limit)
        step = self.multiple
        below = range(start // step * step, self.min - 1, -step)
        above = range((start // step + 1) * step, limit + 1, step)
        for candidates in (below, above):
            for n in candidates:
                if not self.prime or is_prime(n):
                    return n
        return None


class ListRange(StrictModel):
    """`count` whole numbers from min to max, evenly in the logarithm; with `total`, their sum."""

    count: int = Field(ge=1, le=MOST_NUMBERS)
    min: int = Field(ge=0)
    max: int = Field(ge=1, le=MOST_SIZE)
    total: int | None = Field(default=None, ge=1)

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min is {self.min}, and max {self.max}: expected min <= max")
        least, most = self.count * self.min, self.count * self.max
        if self.total is not None and not least <= self.total <= most:
            raise ValueError(
                f"total is {self.total}: {self.count} numbers from {self.min} to {self.max} have "
                f"sums from {least} to {most}"
            )
        return self

    def draw(self, rng: random.Random) -> tuple[int, ...]:
        """Draw the numbers."""
        low, high = max(1, self.min), self.max + 1
        found = [int(low * (high / low) ** rng.random()) for _ in range(self.count)]
        if self.min == 0:  # one in eight: an empty one is a case of its own
            found = [0 if rng.random() < 1 / 8 else n for n in found]
        found = [min(n, self.max) for n in found]
        if self.total is None:
            return tuple(found)
        scale = self.total / max(1, sum(found))
        found = [min(self.max, max(self.min, int(n * scale))) for n in found]
        left = self.total - sum(found)
        while left:  # what rounding and the bounds have left over
            places = [i for i, n in enumerate(found) if self.min < n + (left > 0) <= self.max]
            share = max(1, abs(left) // len(places))
            for i in rng.sample(places, min(len(places), abs(left))):
                room = self.max - found[i] if left > 0 else found[i] - self.min
                step = min(share, room, abs(left))
                found[i] += step if left > 0 else -step
                left += -step if left > 0 else step
        return tuple(found)


def is_prime(n: int) -> bool:
    """Whether a number is a prime, by trial."""
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))
