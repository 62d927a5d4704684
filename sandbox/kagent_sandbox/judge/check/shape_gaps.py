"""Shapes that an export would serve and no case of a task can lie near.

An exported library hands a kernel every shape between the least and the largest that was checked
(docs/export.md). So the cases have to come near all of those. A kernel that is wrong in one window
only, of a factor of `WINDOW` in the size of a dimension and in the number of elements, is a wrong
result like others. If no case that a run could draw lies in the window, it passes.

The factor is four: in the middle of an empty window no case is within a factor of two. Windows
begin half a window apart, so that an empty range of a factor of eight always holds one. Windows of
a dimension and the product of all dimensions show what single dimensions hide: few rows of every
length and any number of short rows leave out many long rows.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, cast

from kagent_sandbox.data.task import draw_hidden

if TYPE_CHECKING:
    from kagent_sandbox.data.build import Value
    from kagent_sandbox.data.task import Case, Kind, Task

WINDOW = 4
"""Width of a window: its largest size over its smallest."""
FIRST_RUNS, MOST_RUNS = 25, 1600
"""Runs whose hidden cases are drawn: some, and twice as many as long as windows are empty. Where no
case of the most lies, none can lie, or hardly ever does."""
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
    """Calls of one dtype, by the size of a dimension and the product of all sizes (None: any)."""

    dtype: str
    dim: str
    least: float  # size
    least_product: float | None

    def holds(self, size: float, product: float) -> bool:
        """Whether a call of such sizes lies in it."""
        return self.least <= size <= WINDOW * self.least and (
            self.least_product is None
            or self.least_product <= product <= WINDOW * self.least_product
        )


def find_gaps(task: Task, kind: Kind) -> tuple[int, list[str]]:
    """Look for windows of shapes in which no case can lie.

    Args:
        task: The task.
        kind: Whose cases.

    Returns:
        The number of windows, and a line for each dtype and dimension with empty ones.
    """
    cases = task.cases(kind)
    drawn = [*cases.check, *cases.bench]
    most = MOST_RUNS if cases.hidden_check or cases.hidden_bench else 0
    runs, wanted = 0, min(FIRST_RUNS, most)
    while True:
        for seed in range(runs, wanted):
            drawn += draw_hidden(task, kind, "check", seed)
            drawn += draw_hidden(task, kind, "bench", seed)
        count, empty = _look(drawn)
        if not empty or wanted == most:
            return count, [_line(kind, windows) for windows in empty]
        runs, wanted = wanted, min(2 * wanted, most)


def _look(cases: Sequence[Case]) -> tuple[int, list[list[Window]]]:
    """The number of windows, and the empty ones of each dtype and dimension that has any."""
    ranged = ranged_dims(c.dims for c in cases)
    by_dtype: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for case in cases:
        by_dtype[case.dtype].add(tuple(int(cast("int", case.dims[n])) for n in ranged))
    count, found = 0, []
    for (dtype, sizes), (position, dim) in itertools.product(
        sorted(by_dtype.items()), enumerate(ranged)
    ):
        points = [(s[position], math.prod(s)) for s in sizes]
        windows = list(_windows(dtype, dim, position, sizes))
        count += len(windows)
        if empty := [w for w in windows if not any(w.holds(*p) for p in points)]:
            found.append(empty)
    return count, found


def _windows(
    dtype: str, dim: str, position: int, sizes: Collection[tuple[int, ...]]
) -> Iterator[Window]:
    """Windows, half a window apart, all of which lies in the range that an export could have."""
    low = [min(each) for each in zip(*sizes, strict=True)]
    high = [max(each) for each in zip(*sizes, strict=True)]
    most = max(map(math.prod, sizes))
    fewest_others = math.prod(low) / low[position]
    most_others = math.prod(high) / high[position]
    starts = list(_steps(low[position], high[position]))
    for size in starts:
        yield Window(dtype, dim, size, None)
    for size in starts:
        least = WINDOW * size * fewest_others
        largest = min(most, size * most_others)
        for product in _steps(least, largest):
            yield Window(dtype, dim, size, product)


def _steps(low: float, high: float) -> Iterator[float]:
    for step in itertools.count():
        start = low * WINDOW ** (step / 2)
        if start * WINDOW > high:
            return
        yield start


def _line(kind: Kind, empty: Sequence[Window]) -> str:
    first, more = empty[0], len(empty) - 1
    product = first.least_product
    inside = f" and the product of the dimensions {_range(product)}" if product else ""
    others = f" (and in {more} more such windows)" if more else ""
    return (
        f"task.toml: {kind}: a {first.dtype} kernel that is wrong where {first.dim} is "
        f"{_range(first.least)}{inside}{others} passes every case, visible or hidden, and an "
        "export would use it there: add a hidden_check generator"
    )


def _range(least: float) -> str:
    return f"{math.ceil(least):,} to {math.floor(WINDOW * least):,}"
