"""Admission of further devices to a run: they must show the same ratios as the first one.

What is compared are pairs of kernels that both have timed: the seeds, or a seed and torch where
there is only one. Absolute times of two devices are never compared. Noise and ceilings are compared
before that (`kagent.evolve.units`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kagent_sandbox.data.build import Contender
from kagent_sandbox.data.race import BEST_OF_TORCH, Race
from kagent_sandbox.errors import ChildDied, KagentError, MachineError

from kagent.evolve.device_slot import DeviceSlot
from kagent.evolve.judge_pool import JudgeHandle
from kagent.evolve.machine import Unit
from kagent.runs.lineage import stderr_of

RATIOS_APART = 0.015
"""Difference of a pair's log(ratio) from the first device's up to which another is its equal."""
DOUBT = 3.0
"""Standard errors of that difference within which it is chance's."""
MOST_DOUBT = 0.05
"""Chance, so many standard errors, above which a comparison of two devices says nothing."""
SEEDS = 4
"""Kernels that are compared, the fastest ones."""

Pairs = Mapping[tuple[str, str], tuple[float, float]]
"""log(ratio) over all cases and its standard error, by the two kernels' names."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """A device as it compared with the run's first one.

    Attributes:
        unit: Its name.
        apart: Largest difference of a pair's log(ratio).
        squares: Mean square of these differences.
        why_not: Why its times do not count; "": they do.
    """

    unit: str
    apart: float = 0.0
    squares: float = 0.0
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class ComparedUnits:
    """Devices of a session, as the run keeps them."""

    home: str
    others: tuple[Admitted, ...]

    @property
    def spread(self) -> float:
        """Standard deviation of log(ratio) from device to device, chance included."""
        squares = [o.squares for o in self.others if not o.why_not]
        return math.sqrt(sum(squares) / len(squares)) if squares else 0.0


def pairs_of(race: Race) -> Pairs:
    """The pairs of a race of seeds, each once."""
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for name, comparisons in race.overall.items():
        for c in comparisons:
            known = c.against in race.overall or c.against == BEST_OF_TORCH
            if known and (c.against, name) not in found and c.low > 0:
                found[name, c.against] = (math.log(c.ratio), stderr_of(c))
    return found


def compare(unit: str, home: Pairs, mine: Pairs) -> Admitted:
    """Whether a device's ratios are those of the first one.

    Args:
        unit: Its name.
        home: Pairs of the first device.
        mine: Pairs of this one.
    """
    both = sorted(home.keys() & mine.keys())
    if not both:
        return Admitted(unit, why_not="no two kernels ran on both")
    differences = {p: mine[p][0] - home[p][0] for p in both}
    apart = max(map(abs, differences.values()))
    squares = sum(d * d for d in differences.values()) / len(both)
    for pair, difference in differences.items():
        doubt = DOUBT * math.hypot(mine[pair][1], home[pair][1])
        if doubt > MOST_DOUBT:
            return Admitted(
                unit,
                apart,
                squares,
                f"the seeds' ratios are known to {doubt:.1%} only, most {MOST_DOUBT:.0%}: devices "
                "as busy as these cannot be compared",
            )
        if abs(difference) > max(RATIOS_APART, doubt):
            here, there = math.exp(mine[pair][0]), math.exp(home[pair][0])
            return Admitted(
                unit,
                apart,
                squares,
                f"{' beside '.join(f'#{n}' if n.isdecimal() else n for n in pair)} is {here:.3f}× "
                f"there and {there:.3f}× on the first device",
            )
    return Admitted(unit, apart, squares)


async def timed_pairs(
    handle: JudgeHandle, entrants: Sequence[Contender], *, on_trial: bool = False
) -> Pairs:
    """Pairs of these kernels on a judge's device, or of the only one and torch, by a race.

    Raises:
        ChildDied, MachineError: It failed.
    """
    torch = len(entrants) < 2  # a pair is needed
    async with handle.slot.measure():
        race = await handle.call(
            lambda: handle.unit.judge.race(entrants, hidden=False, baselines=torch),
            on_trial=on_trial,
        )
    return pairs_of(race)


async def compare_units(
    home: JudgeHandle, units: Sequence[Unit], entrants: Sequence[Contender]
) -> tuple[ComparedUnits, Pairs]:
    """Each device beside the first one, and the first one's pairs, by a race of the same kernels
    on each.

    Raises:
        ChildDied, MachineError: The first device failed. One of the others that fails is not
            admitted.
    """

    async def raced(handle: JudgeHandle) -> Pairs | KagentError:
        try:
            return await timed_pairs(handle, entrants)
        except (MachineError, ChildDied) as e:
            return e

    handles = [JudgeHandle(unit, DeviceSlot(0, quiet=False)) for unit in units]
    try:
        first, *rest = await asyncio.gather(*map(raced, (home, *handles)))
    finally:
        for handle in handles:
            handle.close()
    if isinstance(first, KagentError):
        raise first
    others = [
        Admitted(unit.name, why_not=str(pairs))
        if isinstance(pairs, KagentError)
        else compare(unit.name, first, pairs)
        for unit, pairs in zip(units, rest, strict=True)
    ]
    return ComparedUnits(home.unit.name, tuple(others)), first
