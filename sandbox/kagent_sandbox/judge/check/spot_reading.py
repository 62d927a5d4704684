"""Reading of spot checks from the arena, and their errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kagent_sandbox.data.plan import ITEMSIZE
from kagent_sandbox.device.plan_ops import dtype_of
from kagent_sandbox.judge.check import numerics
from kagent_sandbox.judge.check.spot_checks import ROWS, SpotChecks

if TYPE_CHECKING:
    from kagent_sandbox.data.arguments import ResultSpec
    from kagent_sandbox.device.interface import Arena
    from kagent_sandbox.judge.arena.placement import PlanPlacement
    from kagent_sandbox.judge.check.inputs import InputSet

LEAST_PER_ROW = 2
MOST_READ = 256
"""Elements of each result that one sample reads, as far as it executes that few plans: on a CPU
they are read on the clock."""


class SpotReading:
    """The places of the plans that one sample executes, one after the other."""

    def __init__(
        self,
        arena: Arena,
        placements: Sequence[PlanPlacement],
        spot_checks: Sequence[Sequence[SpotChecks]],
        results: Sequence[ResultSpec],
        draws: Sequence[InputSet],
    ) -> None:
        """`spot_checks` are those of each placement's draw, result by result."""
        self.draws = draws
        self._arena = arena
        self._dtypes = [dtype_of(t.dtype) for t in placements[0].plan.outputs]
        sizes = [ITEMSIZE[t.dtype] for t in placements[0].plan.outputs]
        per_row = max(LEAST_PER_ROW, MOST_READ // (ROWS * len(placements)))
        self.spot_checks: list[SpotChecks] = []
        self._places: list[list[torch.Tensor]] = []  # by result and placement: flat numbers
        offsets: dict[int, list[torch.Tensor]] = {}
        for i in range(len(results)):
            some = [p[i].some(per_row) for p in spot_checks]
            found = [s.words(i, p.index.flatten()) for s, p in zip(placements, some, strict=True)]
            offsets.setdefault(sizes[i], []).append(_cat(found))
            self.spot_checks.append(_joined(some))
            self._places.append([p.index.flatten() for p in some])
        self.accepted: list[torch.Tensor | None] = [None] * len(results)
        """Places of each result at which another value is as right, bool [places]; None: none."""
        self._offsets = {size: _cat(parts) for size, parts in offsets.items()}
        self._sizes = sizes
        self._words: dict[int, torch.Tensor] = {}

    def read(self) -> None:
        """Take what is in the arena now. On a GPU the device is idle; on a CPU the clock runs."""
        for size, offsets in self._offsets.items():
            self._words[size] = torch.take(self._arena.words(size), offsets)

    def values(self) -> list[torch.Tensor]:
        """Return the values that were read, of each result, in its own dtype, [places]."""
        taken = dict.fromkeys(self._words, 0)
        found = []
        for spot_checks, size, dtype in zip(
            self.spot_checks, self._sizes, self._dtypes, strict=True
        ):
            start = taken[size]
            taken[size] = start + spot_checks.expected.numel()
            found.append(self._words[size][start : taken[size]].view(dtype))
        return found

    def counts(self, result: int) -> list[int]:
        """Places of a result that were read, of each placement."""
        return [len(p) for p in self._places[result]]

    def places(self, number: int) -> list[torch.Tensor]:
        """Flat numbers of the elements that were read of one placement, of each result, [n]."""
        return [places[number] for places in self._places]

    def hold_against(self, number: int, exact: Sequence[SpotChecks]) -> None:
        """Take the reference's values for what was read of one placement.

        Args:
            number: Of the placement.
            exact: Spot checks of its `places`, result by result.
        """
        for i, found in enumerate(exact):
            part = self._part(i, number)
            expected = self.spot_checks[i].expected.to(found.expected.dtype, copy=True)
            magnitude = self.spot_checks[i].magnitude.clone()
            expected[part], magnitude[part] = found.expected, found.magnitude
            self.spot_checks[i] = SpotChecks(self.spot_checks[i].index, expected, magnitude)

    def _part(self, result: int, number: int) -> slice:
        """Places of one placement among all that were read of a result."""
        counts = self.counts(result)
        start = sum(counts[:number])
        return slice(start, start + counts[number])

    def unequal(self) -> list[int]:
        """Numbers of the placements with a value that is not the reference's."""
        found: set[int] = set()
        for i, values in enumerate(self.values()):
            wrong = values != self.spot_checks[i].expected.to(values.dtype)
            parts = torch.split(wrong, self.counts(i))
            found |= {number for number, part in enumerate(parts) if bool(part.any())}
        return sorted(found)

    def accept(
        self, number: int, outputs: Sequence[torch.Tensor], masks: Sequence[torch.Tensor | None]
    ) -> None:
        """Accept what was read of one placement, where a rule accepts the same values.

        Args:
            number: Of the placement.
            outputs: The whole results that the rule has seen.
            masks: Where it accepts them, bool of their shapes; None: nowhere.
        """
        for i, (values, mask) in enumerate(zip(self.values(), masks, strict=True)):
            if mask is None:
                continue
            at = self._places[i][number]
            part = self._part(i, number)
            seen = outputs[i].reshape(-1)[at]
            accepted = self.accepted[i]
            if accepted is None:
                accepted = self.accepted[i] = torch.zeros_like(values, dtype=torch.bool)
            accepted[part] = mask.reshape(-1)[at] & (seen == values[part])


def _joined(parts: Sequence[SpotChecks]) -> SpotChecks:
    """All places of several draws as one row."""
    return SpotChecks(
        _cat([p.index.flatten() for p in parts]),
        _cat([p.expected.flatten() for p in parts]),
        _cat([p.magnitude.flatten() for p in parts]),
    )


def _cat(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor of all parts; on a GPU every sample has one part, and a copy costs a launch."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def element_errors(readings: Sequence[SpotReading]) -> list[torch.Tensor]:
    """Return the error of each element of each result, over its magnitude, [places]: reading by
    reading and draw by draw. It is infinite where a NaN or an infinity is not where it should be,
    and where integers differ. Places that a task's rule accepts have none.
    """
    found: list[torch.Tensor] = []
    for i, values in enumerate(zip(*(r.values() for r in readings), strict=True)):
        errors = numerics.element_errors(
            torch.cat(values),
            torch.cat([r.spot_checks[i].expected for r in readings]),
            torch.cat([r.spot_checks[i].magnitude for r in readings]),
        )
        accepted = [r.accepted[i] for r in readings]
        if any(a is not None for a in accepted):
            masks = [
                torch.zeros_like(v, dtype=torch.bool) if a is None else a
                for v, a in zip(values, accepted, strict=True)
            ]
            errors = errors.masked_fill(torch.cat(masks), 0.0)
        found.append(errors)
    return found


def differing(
    readings: Sequence[SpotReading], errors: Sequence[torch.Tensor], limits: Sequence[float]
) -> list[tuple[SpotReading, int]]:
    """Return the readings, each with the number of a placement, of which an element of any result
    differs from torch's by more than that result's limit, or torch's is not finite: it overflows
    where the reference does not.

    Args:
        readings: The readings.
        errors: As `element_errors` has them.
        limits: Of each result.
    """
    over = [~(e <= limit) for e, limit in zip(errors, limits, strict=True)]  # NaN is over
    for i, wrong in enumerate(over):
        torchs = torch.cat([r.spot_checks[i].expected for r in readings])
        if torchs.dtype.is_floating_point:
            wrong |= ~torchs.isfinite()
    if not any(bool(o.any()) for o in over):
        return []
    draws = [(r, n) for r in readings for n in range(len(r.draws))]
    parts = [_by_draw(readings, i, o) for i, o in enumerate(over)]
    return [
        draw
        for draw, own in zip(draws, zip(*parts, strict=True), strict=True)
        if any(bool(part.any()) for part in own)
    ]


def worst_by_draw(
    readings: Sequence[SpotReading], result: int, errors: torch.Tensor
) -> list[tuple[float, InputSet]]:
    """Return the largest error of a result's elements on each draw, the largest first.

    Args:
        readings: The readings.
        result: Number of the result.
        errors: Its errors, as `element_errors` has them.
    """
    parts = _by_draw(readings, result, errors.nan_to_num(nan=torch.inf, posinf=torch.inf))
    worst = [float(p.amax()) if p.numel() else 0.0 for p in parts]
    pairs = zip(worst, (d for r in readings for d in r.draws), strict=True)
    return sorted(pairs, key=lambda pair: -pair[0])


def _by_draw(
    readings: Sequence[SpotReading], result: int, values: torch.Tensor
) -> Sequence[torch.Tensor]:
    """Values of a result's elements as `element_errors` has them, apart for each draw."""
    return torch.split(values, [n for r in readings for n in r.counts(result)])
