"""Gains of techniques: the ledger of ideas, by technique and regime of shapes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from kagent_sandbox.data.verdict import Passed

from kagent.runs.lineage import Candidate, Lineage

GAIN = 0.005  # log speed-up over what it was made from that counts as a technique's success
MOST_GAIN = math.log(2)  # that a proposal counts: leaving a bad kernel says little of the next one
SHORT_US = 20.0  # cases with a floor below this are as much about launching as about their work


class Regime(StrEnum):
    """The calls that an effect was seen on."""

    ALL = "all calls"
    SHORT = "short calls"
    """Calls whose work takes less than `SHORT_US` at the roofline."""
    LONG = "long calls"


@dataclass(frozen=True, slots=True)
class Effect:
    """Gains of proposals with one technique in one regime, over their parents.

    Sums, so that the effects of several runs add up.
    """

    technique: str
    regime: Regime
    tries: int  # duplicates left out
    passed: int
    faster: int  # by more than `GAIN`
    log_sum: float = 0.0  # of the log speed-ups of those that passed
    log_squares: float = 0.0
    variance_sum: float = 0.0  # of their comparisons
    gained: float = 0.0  # sum of the log speed-ups above 0, each `MOST_GAIN` at most

    @property
    def gain_sum(self) -> float:
        """`gained`. Records of before that was kept have what follows from the others, at least."""
        if self.gained or not self.faster:
            return self.gained
        return min(max(self.log_sum, GAIN * self.faster), MOST_GAIN * self.faster)

    @property
    def gain(self) -> float | None:
        """Geometric mean of the speed-ups of those that passed; None where none did."""
        return math.exp(self.log_sum / self.passed) if self.passed else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Range that holds the mean speed-up with 95 %: by what comparisons say of themselves, or
        by the spread between proposals where that is larger. None where none passed.
        """
        if not self.passed:
            return None
        mean = self.log_sum / self.passed
        spread = 0.0
        if self.passed > 1:
            spread = max(0.0, self.log_squares - self.passed * mean**2) / (self.passed - 1)
        half = 1.96 * math.sqrt(max(spread, self.variance_sum / self.passed) / self.passed)
        return math.exp(mean - half), math.exp(mean + half)


_Row = tuple[str, Regime, int, int, int, float, float, float, float]
"""Fields of an `Effect`. A run's are added up for each prompt."""


def effects(lineage: Lineage) -> tuple[Effect, ...]:
    """Gains of a run's techniques, by technique and regime. A proposal with two techniques counts
    for both. Only visible cases are in a lineage.
    """
    regimes: dict[int, Mapping[str, Regime]] = {}
    return _total(row for candidate in lineage for row in _rows(candidate, lineage, regimes))


def total(found: Iterable[Effect]) -> tuple[Effect, ...]:
    """Effects of several runs, one for each technique and regime, in the order of their names."""
    return _total(
        (
            e.technique,
            e.regime,
            e.tries,
            e.passed,
            e.faster,
            e.log_sum,
            e.log_squares,
            e.variance_sum,
            e.gain_sum,
        )
        for e in found
    )


def _total(rows: Iterable[_Row]) -> tuple[Effect, ...]:
    sums: dict[tuple[str, Regime], list[float]] = {}
    for technique, regime, *counts in rows:
        if (before := sums.get((technique, regime))) is None:
            sums[technique, regime] = counts
        else:
            sums[technique, regime] = [a + b for a, b in zip(before, counts, strict=True)]
    found = []
    for technique, regime in sorted(sums):
        tries, passed, faster, *logs = sums[technique, regime]
        found.append(Effect(technique, regime, int(tries), int(passed), int(faster), *logs))
    return tuple(found)


def _rows(
    candidate: Candidate, lineage: Lineage, regimes: dict[int, Mapping[str, Regime]]
) -> Iterator[_Row]:
    """Effects of one candidate. `regimes` keeps those of the cases of each base."""
    origin = candidate.proposal.origin
    if origin is None or not origin.card or candidate.is_duplicate:
        return
    base = lineage.base(candidate.id)
    if base is None:
        return
    speed, before = lineage.speed(candidate.id), lineage.speed(base.id)
    if speed is None or before is None:
        for technique in origin.techniques:
            yield technique, Regime.ALL, 1, 0, 0, 0.0, 0.0, 0.0, 0.0
        return
    if base.id not in regimes:
        regimes[base.id] = _regimes(base)
    logs = {Regime.ALL: speed.log - before.log}
    logs.update(_by_regime(regimes[base.id], speed.cases, before.cases))
    variance = speed.stderr**2
    for technique in origin.techniques:
        for regime, log in logs.items():
            gained = min(max(log, 0.0), MOST_GAIN)
            yield technique, regime, 1, 1, int(log > GAIN), log, log * log, variance, gained


def _regimes(base: Candidate) -> Mapping[str, Regime]:
    """The regimes of the cases that a candidate was timed in."""
    timings = base.verdict.timings if isinstance(base.verdict, Passed) else ()
    return {
        t.case: Regime.SHORT if t.kernel_us * t.roofline_share < SHORT_US else Regime.LONG
        for t in timings
        if t.roofline_share > 0
    }


def _by_regime(
    regimes: Mapping[str, Regime], after: Mapping[str, float], before: Mapping[str, float]
) -> Mapping[Regime, float]:
    """Mean log speed-up over the cases of each regime, where there is more than one regime."""
    if len(set(regimes.values())) < 2:
        return {}
    logs: dict[Regime, list[float]] = {}
    for case, regime in regimes.items():
        if case in after and case in before:
            logs.setdefault(regime, []).append(after[case] - before[case])
    if len(logs) < 2:
        return {}
    return {regime: sum(found) / len(found) for regime, found in logs.items()}
