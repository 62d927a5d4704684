"""Sizes at which an operation can be tried: found by running it, not by guessing."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kagent_sandbox.data.generator import corners

from kagent.authoring.tracing.trace import TracedOperation

Sizes = dict[str, int]
_STEPS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024)
_LADDER = (1, 2, 3, 4, 5, 6, 8, 11, 16, 23, 32, 45, 64, 96, 128, 192, 256, 384, 512)
_BETWEEN = 8
"""Sizes between the ends of ranges that are tried beside the corners."""


@dataclass(frozen=True, slots=True)
class Room:
    """Sizes of each dimension: multiples of a step, from a least size on.

    Attributes:
        trace: The operation.
        steps: Step of each dimension.
        least: Least size of each; all of them together fit, too.
    """

    trace: TracedOperation
    steps: Mapping[str, int]
    least: Mapping[str, int]

    def shrunk(self, cost: Callable[[Sizes], float], most: float) -> Sizes:
        """The example's sizes, the largest halved until a cost is at most `most`, or nearly."""
        sizes = dict(self.trace.dims)
        stuck: set[str] = set()
        while cost(sizes) > most and len(stuck) < len(sizes):
            name = max((n for n in sizes if n not in stuck), key=lambda n: sizes[n] / self.least[n])
            smaller = {**sizes, name: self.rounded(name, sizes[name] / 2)}
            if smaller[name] < sizes[name] and self.trace.fits(smaller):
                sizes = smaller
            else:
                stuck.add(name)
        return sizes

    def rounded(self, name: str, size: float) -> int:
        """The nearest size that a dimension may have, at most `size` where there is one."""
        step = self.steps[name]
        return max(self.least[name], int(size) // step * step)

    def changed(self, sizes: Sizes, rule: Callable[[int], int]) -> Sizes | None:
        """Sizes of which as many as possible follow a rule for a size over its step; None if none
        can.
        """
        wanted = {
            n: max(self.least[n], rule(max(1, s // self.steps[n])) * self.steps[n])
            for n, s in sizes.items()
        }
        names = list(sizes)
        groups = (names, *([n] for n in reversed(names)))
        for group in groups:
            tried = {n: wanted[n] if n in group else s for n, s in sizes.items()}
            if tried != sizes and self.trace.fits(tried):
                return tried
        return None


def explore(trace: TracedOperation) -> tuple[Room | None, list[str]]:
    """Find out what each dimension may be.

    Returns:
        The room that there is, and the names of dimensions that must stay as in the example; where
        there are such, no room: they are no dimensions.
    """
    steps, fixed = {}, []
    for name, size in trace.dims.items():
        step = _step(trace, name, size)
        if step is None:
            fixed.append(name)
        else:
            steps[name] = step
    if fixed:
        return None, fixed
    least = {name: _least(trace, name, steps[name]) for name in trace.dims}
    ladder = 0
    while not trace.fits(least) and any(least[n] < s for n, s in trace.dims.items()):
        ladder += 1
        least = {n: min(trace.dims[n], _above(least[n], steps[n])) for n in least}
    return Room(trace, steps, least), []


def find_equal(room: Room, cost: Callable[[Sizes], float], most: float) -> list[tuple[str, str]]:
    """Find dimensions that must have one size although torch's shapes alone do not say so: some of
    its operations check that only on real tensors, as the gradient of a layer norm does.

    Args:
        room: What the shapes allow.
        cost: Of sizes.
        most: Cost at which the operation is run on real tensors, at most.

    Returns:
        Pairs of dimensions. None where nothing could be run.
    """
    trace, share = room.trace, 1
    sizes = dict(trace.dims)
    while cost(sizes) > most and share < max(trace.dims.values(), default=1):
        share *= 2  # of all alike, so that equal sizes stay equal
        sizes = {n: room.rounded(n, s / share) for n, s in trace.dims.items()}
    if len(sizes) < 2 or cost(sizes) > most or not trace.works(sizes):
        return []
    found: list[tuple[str, str]] = []
    for name in sizes:
        # What the shapes refuse is no dimension of its own, and none of one size stands alone.
        others = [n for n in sizes if n != name and trace.dims[n] == trace.dims[name]]
        if not others or any(name in pair for pair in found):
            continue
        step = max(room.steps[n] for n in (name, *others))
        changes = (sizes[name] + k * step for k in (1, -1))
        size = next((s for s in changes if s > 0 and trace.fits({**sizes, name: s})), None)
        if size is None or trace.works({**sizes, name: size}):
            continue
        tied = (n for n in others if trace.works({**sizes, name: size, n: size}))
        if (other := next(tied, None)) is not None:
            found.append((name, other))
    return found


def _above(size: int, step: int) -> int:
    return -(-size * 3 // 2 // step) * step if size >= 2 * step else size + step


def _step(trace: TracedOperation, name: str, size: int) -> int | None:
    """The least step by which a size may differ from the example's; None if it must not."""
    for step in _STEPS:
        if size % step or step > size // 2:
            continue
        others = (size - step, size + step, size + 3 * step, size - size // step // 3 * step)
        if all(trace.fits({**trace.dims, name: n}) for n in others if n > 0):
            return step
    return None


def _least(trace: TracedOperation, name: str, step: int) -> int:
    for size in (k * step for k in _LADDER):
        if size < trace.dims[name] and trace.fits({**trace.dims, name: size}):
            return size
    return trace.dims[name]


def prime(size: int) -> int:
    """The largest prime that is at most four fifths of `size`, or 2."""
    found = (
        n for n in range(size * 4 // 5, 1, -1) if all(n % d for d in range(2, int(n**0.5) + 1))
    )
    return next(found, 2)


def below_power(size: int) -> int:
    """One less than a power of two."""
    return max(1, (1 << max(1, size.bit_length() - 1)) - 1)


def above_power(size: int) -> int:
    """One more than a power of two."""
    return (1 << max(1, size.bit_length() - 1)) + 1


def widest(
    room: Room, low: Mapping[str, int], high: Mapping[str, int], inside: Mapping[str, int]
) -> tuple[Sizes, Sizes]:
    """The ends between which each dimension may be drawn apart from the others: `low` and `high`,
    or those that some sizes `inside` can be widened to, one end after the other.
    """
    if _boxes(room, low, high):
        return dict(low), dict(high)
    least, most = dict(inside), dict(inside)
    for name in inside:
        if low[name] < least[name] and _boxes(room, {**least, name: low[name]}, most):
            least[name] = low[name]
        if high[name] > most[name] and _boxes(room, least, {**most, name: high[name]}):
            most[name] = high[name]
    return least, most


def _boxes(room: Room, low: Mapping[str, int], high: Mapping[str, int]) -> bool:
    """Whether sizes that are drawn apart from each other fit: corners, and some between."""
    rng = random.Random(0)  # noqa: S311 - no secret
    between = (
        {n: max(low[n], rng.randint(low[n], high[n]) // s * s) for n, s in room.steps.items()}
        for _ in range(_BETWEEN)
    )
    tried = itertools.chain(corners(dict(low), dict(high)), between)
    return all(room.trace.fits(sizes) for sizes in tried)
