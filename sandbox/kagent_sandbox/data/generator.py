"""Generators of hidden cases: the draw of sizes within a cost and under constraints."""

from __future__ import annotations

import bisect
import itertools
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Self

import pydantic
from pydantic import Field

from kagent_sandbox.data.build import Value
from kagent_sandbox.data.case import CaseDtype, StrictModel
from kagent_sandbox.data.formula import evaluate
from kagent_sandbox.data.ranges import ListRange, Range, is_prime

MOST_REDRAWS = 50
"""Draws of dimensions until some meet the constraints."""
MOST_NEAR = 512
"""Values of a range that are tried around one that does not."""

FIELDS = ("dtype", "inputs", "scale", "noncontiguous", "offset")
"""Fields of a case beside its dimensions."""


class Generator(StrictModel):
    """Draws `count` hidden cases.

    Every value of `dims` is a list to choose from or a range. Of each list the cases get all values
    equally often, as far as it goes; a range they divide among them, see `draw_hidden`. With
    `cost`, a formula that grows with every dimension, it lies between `least` and `most`, evenly in
    the logarithm.
    """

    count: int = Field(ge=1, le=32)
    dtype: tuple[CaseDtype, ...] = Field(min_length=1)
    inputs: tuple[str, ...] = Field(default=("normal",), min_length=1)
    scale: tuple[float, ...] = Field(default=(1.0,), min_length=1)
    noncontiguous: tuple[bool, ...] = Field(default=(False,), min_length=1)
    offset: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(0,), min_length=1)
    dims: Mapping[str, Annotated[tuple[Value, ...], Field(min_length=1)] | Range | ListRange]
    cost: str | None = None
    least: float = 0.0
    most: float = math.inf

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.least > self.most:
            raise ValueError(f"least is {self.least:g}, and most {self.most:g}")
        if self.cost is None and (self.least > 0 or self.most < math.inf):
            raise ValueError("least and most need a cost")
        if self.cost is not None:
            lowest = {n: self._costliest(v) for n, v in self.dims.items()}
            if (value := evaluate(self.cost, lowest)) > self.most:
                raise ValueError(f"the cost is {value:g} at least, and most {self.most:g}")
        return self

    @staticmethod
    def _costliest(values: Sequence[Any] | Range | ListRange) -> Any:
        """Values that a case may need of a dimension, whatever is drawn."""
        if isinstance(values, Range):
            return values.min
        if isinstance(values, ListRange):
            each = values.max if values.total is None else values.total // values.count
            return (each,) * values.count
        numbers = all(isinstance(v, int | float) for v in values)
        return max(values) if numbers else values[0]


def corners(low: dict[str, Any], high: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Values of which each is at one of its ends: all such of up to four dimensions, and of more
    those in which one alone is at the other end, so that of any two each is low beside the other.
    """
    names = [n for n in low if low[n] != high[n]]
    few = len(names) <= 4
    for count in range(len(names) + 1) if few else (0, len(names), 1, len(names) - 1):
        for ups in itertools.combinations(names, count):
            yield {n: high[n] if n in ups else low[n] for n in low}


Unmet = Callable[[Mapping[str, Any], str], Iterator[str]]
"""The constraints that dimensions in a dtype do not meet."""


def draw_fields(generator: Generator, rng: random.Random, unmet: Unmet) -> Iterable[dict[str, Any]]:
    """Fields of a generator's cases.

    Raises:
        ValueError: No dimensions were found that meet the constraints.
    """
    count = generator.count
    columns = {f: _dealt(getattr(generator, f), count, rng) for f in FIELDS}
    ranges: dict[str, tuple[Range, list[float]]] = {}
    for name, values in generator.dims.items():
        if isinstance(values, ListRange):
            columns[name] = [values.draw(rng) for _ in range(count)]
        elif isinstance(values, Range):
            shift = rng.random()
            ranges[name] = values, rng.sample([(i + shift) / count for i in range(count)], count)
        else:
            columns[name] = _dealt(values, count, rng)
    goals = [(i + rng.random()) / count for i in rng.sample(range(count), count)]
    for i in range(count):
        case = {name: values[i] for name, values in columns.items()}
        dims = {n: v for n, v in case.items() if n in generator.dims}
        limits = _limits(generator, goals[i])
        order = rng.sample(list(ranges), len(ranges))  # any may be small where the cost is large
        at = {n: (r, positions[i]) for n, (r, positions) in ranges.items()}
        dims = _sized(generator.cost, limits, dims, at, order)
        dims = _constrained(generator, dims, case["dtype"], rng, unmet)
        yield {**case, **{n: dims[n] for n in generator.dims}}


def draw_corners(generator: Generator, unmet: Unmet) -> Iterator[dict[str, Any]]:
    """Fields of cases at the ends of a generator's dimensions (`corners`), or as near to them as
    its cost and the constraints let it draw. All but the sizes are the first that it has.
    """
    rng = random.Random(0)  # noqa: S311 - no secret
    first = {f: getattr(generator, f)[0] for f in FIELDS}
    low, high = ({n: _end(v, k, rng) for n, v in generator.dims.items()} for k in (0, 1))
    ranges = {n: v for n, v in generator.dims.items() if isinstance(v, Range)}
    for ends in corners(low, high):
        at = {n: (r, float(ends[n] == high[n])) for n, r in ranges.items()}
        limits = generator.least, generator.most
        dims = _sized(generator.cost, limits, ends, at, list(ranges))
        met = _nearest(generator, dims, first["dtype"], rng, unmet)
        if met is not None:
            yield {**first, **met}


def _end(values: Sequence[Any] | Range | ListRange, end: int, rng: random.Random) -> Any:
    """The least (0) or the largest (1) of a dimension's values, or the first or the last one where
    these are no numbers; of lists any.
    """
    if isinstance(values, ListRange):
        return values.draw(rng)
    if isinstance(values, Range):
        return (values.min, values.max)[end]
    numbers = all(isinstance(v, int | float) for v in values)
    return (min, max)[end](values) if numbers else values[-end]


def _sized(
    cost: str | None,
    limits: tuple[float, float],
    dims: dict[str, Any],
    ranges: Mapping[str, tuple[Range, float]],
    order: Iterable[str],
) -> dict[str, Any]:
    """The dimensions with sizes at positions of their ranges, each within what the ones before it
    in `order` leave of a cost (`_size`).
    """
    dims = dict(dims)
    least = dims | {n: r.min for n, (r, _) in ranges.items()}
    most = dims | {n: r.max for n, (r, _) in ranges.items()}
    for n in order:
        r, position = ranges[n]
        least[n] = most[n] = dims[n] = _size(cost, limits, r, n, least, most, position)
    return dims


def _limits(generator: Generator, position: float) -> tuple[float, float]:
    """The least and the largest cost of the case at `position` in [0, 1): around a cost that is
    drawn evenly in the logarithm. Else many dimensions together would hardly ever be large.
    """
    least, most = generator.least, generator.most
    if not least or most == math.inf:
        return least, most
    goal = least * (most / least) ** position
    return max(least, goal / 2), min(most, 2 * goal)


def _constrained(
    generator: Generator,
    dims: dict[str, Any],
    dtype: str,
    rng: random.Random,
    unmet: Unmet,
) -> dict[str, Any]:
    """The dimensions, or ones near them that meet the constraints (`nearest_met`); where there are
    none, those that a broken constraint names are drawn again.

    Raises:
        ValueError: None were found.
    """
    if not any(unmet(dims, dtype)):
        return dims
    for _ in range(MOST_REDRAWS):
        if (found := _nearest(generator, dims, dtype, rng, unmet)) is not None:
            return found
        broken = list(unmet(dims, dtype))
        named = [n for n in dims if any(re.search(rf"\b{n}\b", c) for c in broken)] or list(dims)
        dims = dims | {n: _any_of(generator.dims[n], rng) for n in named}
    broken = list(unmet(dims, dtype)) or ["the cost"]
    raise ValueError(f"nothing was found in its dimensions for which {' and '.join(broken)}")


def _nearest(
    generator: Generator, dims: dict[str, Any], dtype: str, rng: random.Random, unmet: Unmet
) -> dict[str, Any] | None:
    """See `nearest_met`: within a generator's cost."""

    def fits(found: Mapping[str, Any]) -> bool:
        affordable = generator.cost is None or evaluate(generator.cost, found) <= generator.most
        return affordable and not any(unmet(found, dtype))

    return nearest_met(generator.dims, dims, dtype, rng, unmet, fits)


def nearest_met(
    ranges: Mapping[str, Sequence[Any] | Range | ListRange],
    dims: dict[str, Any],
    dtype: str,
    rng: random.Random,
    unmet: Unmet,
    fits: Callable[[Mapping[str, Any]], bool],
) -> dict[str, Any] | None:
    """The dimensions if they fit, or ones in which one of those that a broken constraint names has
    the nearest value with which they do; None if there are no such.
    """
    if fits(dims):
        return dims
    broken = list(unmet(dims, dtype))
    named = [n for n in dims if any(re.search(rf"\b{n}\b", c) for c in broken)]
    for name in rng.sample(named, len(named)):
        for value in _near(ranges[name], dims[name]):
            if fits({**dims, name: value}):
                return {**dims, name: value}
    return None


def _near(values: Sequence[Any] | Range | ListRange, value: Any) -> Iterable[Any]:
    """Values of a dimension, the nearest first, and not all of a large range."""
    if isinstance(values, ListRange):
        return ()
    if not isinstance(values, Range):
        return values
    step = values.multiple
    steps = ((k + 1) // 2 * (step if k % 2 else -step) for k in range(1, MOST_NEAR))
    near = (value + s for s in steps)
    return (n for n in near if values.min <= n <= values.max and (not values.prime or is_prime(n)))


def _any_of(values: Sequence[Any] | Range | ListRange, rng: random.Random) -> Any:
    """Any value of a dimension."""
    if isinstance(values, ListRange):
        return values.draw(rng)
    if not isinstance(values, Range):
        return rng.choice(values)
    at = values.min * ((values.max + 1) / values.min) ** rng.random()
    return values.nearest(at, values.max)


def _dealt(values: Sequence[Any], count: int, rng: random.Random) -> list[Any]:
    """`count` of the values in random order, none twice more often than another."""
    rounds = [rng.sample(values, len(values)) for _ in range(-(-count // len(values)))]
    return [v for values in rounds for v in values][:count]


def _size(
    cost: str | None,
    limits: tuple[float, float],
    sizes: Range,
    name: str,
    least: Mapping[str, Any],
    most: Mapping[str, Any],
    position: float,
) -> int:
    """The size at `position` in [0, 1) of what the limits of a cost leave of a range.

    `least` and `most` are the dimensions drawn already, with the smallest and the largest of the
    others: with some of those the cost lies between the limits.
    """
    low, high = sizes.min, sizes.max
    if cost is not None:
        rest = range(low, high + 1)
        dims = dict(least)

        def costs(size: int) -> float:
            dims[name] = size
            return evaluate(cost, dims)

        high = rest[max(bisect.bisect_right(rest, limits[1], key=costs) - 1, 0)]
        dims.update(most)
        low = rest[min(bisect.bisect_left(rest, limits[0], key=costs), len(rest) - 1)]
        low = min(low, high)
    found = sizes.nearest(low * ((high + 1) / low) ** position, high)
    return sizes.min if found is None else found
