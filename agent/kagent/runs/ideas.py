"""Gains of techniques: the ledger of ideas, by technique and regime of shapes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from kagent_sandbox.data.verdict import Passed

from kagent.runs.lineage import Candidate, Lineage

GAIN = 0.005  # log speed-up over what it was made from that counts as a technique's success
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

    def plus(self, other: Effect) -> Effect:
        """The sum of both."""
        return replace(
            self,
            tries=self.tries + other.tries,
            passed=self.passed + other.passed,
            faster=self.faster + other.faster,
            log_sum=self.log_sum + other.log_sum,
            log_squares=self.log_squares + other.log_squares,
            variance_sum=self.variance_sum + other.variance_sum,
        )


def effects(lineage: Lineage) -> tuple[Effect, ...]:
    """Gains of a run's techniques, by technique and regime. A proposal with two techniques counts
    for both. Only visible cases are in a lineage.
    """
    return total(e for candidate in lineage for e in _of(candidate, lineage))


def total(found: Iterable[Effect]) -> tuple[Effect, ...]:
    """Effects of several runs, one for each technique and regime, in the order of their names."""
    sums: dict[tuple[str, Regime], Effect] = {}
    for effect in found:
        key = effect.technique, effect.regime
        sums[key] = sums[key].plus(effect) if key in sums else effect
    return tuple(sums[key] for key in sorted(sums))


def _of(candidate: Candidate, lineage: Lineage) -> Iterator[Effect]:
    origin, base = candidate.proposal.origin, lineage.base(candidate.id)
    if origin is None or candidate.is_duplicate or base is None:
        return
    speed, before = lineage.speed(candidate.id), lineage.speed(base.id)
    for technique in origin.techniques:
        if speed is None or before is None:
            yield Effect(technique, Regime.ALL, 1, 0, 0)
            continue
        regimes = {
            Regime.ALL: speed.log - before.log,
            **_by_regime(base, speed.cases, before.cases),
        }
        for regime, log in regimes.items():
            yield Effect(technique, regime, 1, 1, int(log > GAIN), log, log * log, speed.stderr**2)


def _by_regime(
    base: Candidate, after: Mapping[str, float], before: Mapping[str, float]
) -> Mapping[Regime, float]:
    """Mean log speed-up over the cases of each regime, where there is more than one regime."""
    timings = base.verdict.timings if isinstance(base.verdict, Passed) else ()
    floors = {t.case: t.kernel_us * t.roofline_share for t in timings if t.roofline_share > 0}
    logs: dict[Regime, list[float]] = {}
    for case, floor_us in floors.items():
        if case in after and case in before:
            regime = Regime.SHORT if floor_us < SHORT_US else Regime.LONG
            logs.setdefault(regime, []).append(after[case] - before[case])
    if len(logs) < 2:
        return {}
    return {regime: sum(found) / len(found) for regime, found in logs.items()}
