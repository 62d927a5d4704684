"""Shapes that an export would serve and no case of a task can lie near.

An exported library hands a kernel every shape between the least and the largest that was checked
(docs/export.md). So the cases have to come near all of those. A kernel that is wrong in one window
only, of a factor of `WINDOW` in the size of a dimension and in the number of elements, is a wrong
result like others. If no case that a run could draw lies in the window, it passes.

The factor is four: in the middle of an empty window no case is within a factor of two. Windows
begin half a window apart, so that an empty range of a factor of eight always holds one. Windows of
a dimension and the product of all dimensions show what single dimensions hide: few rows of every
length and any number of short rows leave out many long rows.

A library calls torch below the smallest benchmark. What it has kernels for may be less than a
window wide in the product, and the cases of a window all below that. So there are windows of the
products from the smallest benchmark to the largest case, too.

An export leaves calls that break a constraint of the task to torch. So a window counts if most of
the shapes in it meet the constraints. Of a window that they cut, a neighbour holds the rest.
"""

from __future__ import annotations

import bisect
import itertools
import math
import operator
import random
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, cast

from kagent_sandbox.data.generator import nearest_met
from kagent_sandbox.data.ranges import Range
from kagent_sandbox.data.task import draw_hidden

if TYPE_CHECKING:
    from kagent_sandbox.data.build import Value
    from kagent_sandbox.data.case import Case
    from kagent_sandbox.data.kind import Kind
    from kagent_sandbox.data.task import Task

WINDOW = 4
"""Width of a window: its largest size over its smallest."""
FIRST_RUNS, MOST_RUNS = 25, 1600
"""Runs whose hidden cases are drawn: some, and twice as many as long as windows are empty. Where no
case of the most lies, none can lie, or hardly ever does."""
LEAST_PART = 1.25
"""Width of a window of served products, at least, where less than `WINDOW` is left."""
SHAPES = 16
"""Shapes of an empty window that are held against the task's constraints."""
NEAR = 32
"""Most that a size may be moved to meet the constraints: the nearest multiple of 64 will do."""
FEW = 3
"""Distinct sizes up to which a dimension of a call must be one of those that were checked."""

Sizes: TypeAlias = "Mapping[str, Value]"


def ranged_dims(cases: Iterable[Sizes]) -> list[str]:
    """Dimensions that a checked kernel serves from the least to the largest size: those that have
    more than `FEW` sizes, all of them positive whole numbers. The others must be as checked.
    """
    sizes: dict[str, set[Value]] = defaultdict(set)
    for dims in cases:
        for name, value in dims.items():
            sizes[name].add(value)
    return [
        name
        for name, values in sizes.items()
        if len(values) > FEW
        and all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in values)
    ]


@dataclass(frozen=True)
class Window:
    """Calls of one dtype, by the size of a dimension and the product of all sizes."""

    dtype: str
    dim: str
    least: float  # size
    least_product: float = 0.0
    most_product: float = math.inf

    def holds(self, size: float, product: float) -> bool:
        """Whether a call of such sizes lies in it."""
        inside = self.least_product <= product <= self.most_product
        return inside and self.least <= size <= WINDOW * self.least


def find_gaps(task: Task, kind: Kind) -> tuple[int, list[str]]:
    """Look for windows of shapes in which no case can lie.

    Args:
        task: The task.
        kind: Whose cases.

    Returns:
        The number of windows, and a line for each dtype and dimension with empty ones.
    """
    cases = task.cases(kind)
    checked, timed = list(cases.check), list(cases.bench)
    most = MOST_RUNS if cases.hidden_check or cases.hidden_bench else 0
    runs, wanted = 0, min(FIRST_RUNS, most)
    served: dict[Window, bool] = {}
    while True:
        for seed in range(runs, wanted):
            checked += draw_hidden(task, kind, "check", seed)
            timed += draw_hidden(task, kind, "bench", seed)
        count, empty = _look(task, checked, timed, served)
        if not empty or wanted == most:
            return count, [_line(kind, windows) for windows in empty]
        runs, wanted = wanted, min(2 * wanted, most)


def _look(
    task: Task, checked: Sequence[Case], timed: Sequence[Case], served: dict[Window, bool]
) -> tuple[int, list[list[Window]]]:
    """The number of windows, and the empty ones of each dtype and dimension that has any.

    Args:
        task: The task.
        checked: Check cases that were drawn.
        timed: Benchmark cases that were drawn, in which kernels are checked, too.
        served: Whether an export serves a window, for empty ones; what is found out is added.
    """
    cases = [*checked, *timed]
    ranged = ranged_dims(c.dims for c in cases)

    def sizes_of(case: Case) -> tuple[int, ...]:
        return tuple(int(cast("int", case.dims[n])) for n in ranged)

    by_dtype: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for case in cases:
        by_dtype[case.dtype].add(sizes_of(case))
    smallest = min((math.prod(sizes_of(c)) for c in timed), default=math.inf)
    others = [{n: v for n, v in c.dims.items() if n not in ranged} for c in cases]
    count, found = 0, []
    for dtype, sizes in sorted(by_dtype.items()):
        region = _Region(task, dtype, ranged, sizes, others)
        for position, dim in enumerate(ranged):
            points = sorted((s[position], math.prod(s)) for s in sizes)
            windows = list(_windows(dtype, dim, position, sizes, smallest))
            empty = [w for w in windows if not _any_in(w, points)]
            for window in empty:
                if window not in served:
                    served[window] = not task.constraints or region.serves(window)
            count += len(windows) - sum(not served[w] for w in empty)
            if empty := [w for w in empty if served[w]]:
                found.append(empty)
    return count, found


def _any_in(window: Window, points: Sequence[tuple[int, int]]) -> bool:
    """Whether a window holds one of some points (size, product), in the order of their sizes."""
    at = bisect.bisect_left(points, window.least, key=operator.itemgetter(0))
    for size, product in itertools.islice(points, at, None):
        if size > WINDOW * window.least:
            return False
        if window.holds(size, product):
            return True
    return False


class _Region:
    """The shapes of a dtype that an export would have a kernel for, as far as it was checked."""

    def __init__(
        self,
        task: Task,
        dtype: str,
        ranged: Sequence[str],
        sizes: Collection[tuple[int, ...]],
        others: Sequence[Sizes],
    ) -> None:
        """`others`: values of the dimensions that are not ranged."""
        columns = zip(ranged, zip(*sizes, strict=True), strict=True)
        self._ranges = {n: Range(min=min(each), max=max(each)) for n, each in columns}
        self._task, self._dtype, self._others = task, dtype, others

    def serves(self, window: Window) -> bool:
        """Whether at least half of a window's shapes meet the constraints, or have a neighbour in
        it that does.
        """
        rng = random.Random(repr(window))  # noqa: S311 - no secret
        met = 0
        for tried in range(SHAPES):
            if 2 * met >= SHAPES or 2 * (tried - met) > SHAPES:
                break
            met += self._meets(window, rng)
        return 2 * met >= SHAPES

    def _meets(self, window: Window, rng: random.Random) -> bool:
        shape, others = self._draw(window, rng), rng.choice(self._others)
        ranges: dict[str, Range | tuple[Value, ...]] = {n: (v,) for n, v in others.items()}
        for name, each in self._ranges.items():
            near, far = shape[name] - NEAR, shape[name] + NEAR
            ranges[name] = Range(min=max(each.min, near), max=min(each.max, far))

        def fits(dims: Mapping[str, Value]) -> bool:
            found = [cast("int", dims[n]) for n in self._ranges]
            inside = window.holds(cast("int", dims[window.dim]), math.prod(found))
            return inside and not any(self._task.unmet(dims, self._dtype))

        dims = {**others, **shape}
        return nearest_met(ranges, dims, self._dtype, rng, self._task.unmet, fits) is not None

    def _draw(self, window: Window, rng: random.Random) -> dict[str, int]:
        """A shape of the window, evenly in the logarithm, but for what is rounded off."""
        size = _between(rng, window.least, WINDOW * window.least)
        shape = {window.dim: size}
        others = rng.sample([n for n in self._ranges if n != window.dim], len(self._ranges) - 1)
        # Product of those that are left to draw.
        least, most = window.least_product / size, window.most_product / size
        for i, name in enumerate(others):
            rest = [self._ranges[n] for n in others[i + 1 :]]
            own = self._ranges[name]
            low = max(own.min, least / math.prod(r.max for r in rest))
            high = min(own.max, most / math.prod(r.min for r in rest))
            shape[name] = _between(rng, min(low, own.max), max(high, own.min))
            least, most = least / shape[name], most / shape[name]
        return shape


def _between(rng: random.Random, low: float, high: float) -> int:
    """A whole number, evenly in the logarithm."""
    size: float = low * (max(high, low) / low) ** rng.random()
    return round(size)


def _windows(
    dtype: str, dim: str, position: int, sizes: Collection[tuple[int, ...]], smallest: float
) -> Iterator[Window]:
    """Windows, half a window apart, all of which lies in the range that an export could have; of
    served products, those that a size in the middle of the window can have.

    Args:
        dtype: Of the calls.
        dim: A dimension.
        position: Its place among the sizes.
        sizes: Of the cases.
        smallest: Product of the sizes of the smallest benchmark.
    """
    low = [min(each) for each in zip(*sizes, strict=True)]
    high = [max(each) for each in zip(*sizes, strict=True)]
    most = max(map(math.prod, sizes))
    fewest_others = math.prod(low) / low[position]
    most_others = math.prod(high) / high[position]
    usual_others = most_others / 2 ** max(0, len(high) - 2)  # hardly ever are all at their largest
    starts = list(_steps(low[position], high[position]))
    for size in starts:
        yield Window(dtype, dim, size)
    for size in starts:
        least, largest = WINDOW * size * fewest_others, min(most, size * most_others)
        for product in _steps(least, largest):
            yield Window(dtype, dim, size, product, WINDOW * product)
        middle = math.sqrt(WINDOW) * size
        least, largest = max(smallest, middle * fewest_others), min(most, middle * usual_others)
        if least * LEAST_PART <= largest:
            for product in list(_steps(least, largest)) or [least]:
                yield Window(dtype, dim, size, product, min(WINDOW * product, largest))
            if least * WINDOW < largest:
                yield Window(dtype, dim, size, largest / WINDOW, largest)


def _steps(low: float, high: float) -> Iterator[float]:
    for step in itertools.count():
        start = low * WINDOW ** (step / 2)
        if start * WINDOW > high:
            return
        yield start


def _line(kind: Kind, empty: Sequence[Window]) -> str:
    first, more = empty[0], len(empty) - 1
    product = _range(first.least_product, first.most_product) if first.least_product else ""
    inside = f" and the product of the dimensions {product}" if product else ""
    others = f" (and in {more} more such windows)" if more else ""
    return (
        f"task.toml: {kind}: a {first.dtype} kernel that is wrong where {first.dim} is "
        f"{_range(first.least, WINDOW * first.least)}{inside}{others} passes every case, visible "
        "or hidden, and an export would use it there: add a hidden_check generator"
    )


def _range(least: float, most: float) -> str:
    return f"{math.ceil(least):,} to {math.floor(most):,}"
