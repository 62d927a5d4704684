"""Results of a race, as data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kagent_sandbox.data.build import Value
from kagent_sandbox.data.verdict import (
    CaseTiming,
    Comparison,
    Rejected,
    SpeedVerdict,
    speed_verdict,
)

EAGER = "eager"
COMPILE_MODES: Mapping[str, str] = {
    "compile": "default",
    "compile max-autotune": "max-autotune-no-cudagraphs",
}
"""Baselines that are torch.compile modes, by name. On the CPU only the default is measured."""

TORCH = (EAGER, *COMPILE_MODES)
"""Baselines of torch alone: candidates are scored against the fastest of them."""

BEST_OF_TORCH = "torch"
"""Name of the comparison with the fastest of eager and the torch.compile modes, case by case."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """Time of `against` / time of `candidate` on one case: above 1, the candidate is faster."""

    candidate: str
    against: str
    value: float
    low: float
    high: float

    @property
    def verdict(self) -> SpeedVerdict:
        """Whether the candidate is faster on this case."""
        return speed_verdict(self.low, self.high)


@dataclass(frozen=True, slots=True)
class RaceCase:
    """One case of a race: what everyone took, and how the candidates compare."""

    case: str
    dtype: str
    dims: Mapping[str, Value]
    candidates: Mapping[str, CaseTiming]
    baselines: Mapping[str, CaseTiming]
    ratios: tuple[Ratio, ...]
    missing: Mapping[str, str] = field(default_factory=dict)  # baseline -> why it did not run
    notes: tuple[str, ...] = ()  # disturbances while it was timed
    lacking: tuple[str, ...] = ()  # of `missing`: may run with memory that others held

    @property
    def lacking_modes(self) -> Sequence[str]:
        """Torch's ways that lacked memory: one of them may be the fastest."""
        return [n for n in TORCH if n in self.lacking]

    @property
    def fastest_of_torch(self) -> str | None:
        """Name of the fastest of eager and the torch.compile modes; None if none of them ran, or
        one lacked memory.
        """
        if self.lacking_modes:
            return None
        ran = [n for n in TORCH if n in self.baselines]
        return min(ran, key=lambda n: self.baselines[n].kernel_us, default=None)

    def ratio(self, candidate: str, against: str) -> Ratio | None:
        """The comparison of a candidate with anyone who ran here, or with `BEST_OF_TORCH`."""
        other = self.fastest_of_torch if against == BEST_OF_TORCH else against
        found = (r for r in self.ratios if (r.candidate, r.against) == (candidate, other))
        return next(found, None)


@dataclass(frozen=True, slots=True)
class Race:
    """A race's result. `overall` compares each candidate with everyone else over all cases.

    `seconds` are what it took: `ahead` to compile baselines side by side, `open` to make them ready
    in the launchers, `other` to time everyone.
    """

    cases: tuple[RaceCase, ...]
    overall: Mapping[str, tuple[Comparison, ...]]
    failed: Mapping[str, Rejected] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def lacking_modes(self) -> Mapping[str, int]:
        """Torch's ways that lacked memory, by the number of cases. The best of torch is not known
        then.
        """
        return Counter(mode for case in self.cases for mode in case.lacking_modes)

    @property
    def disturbed(self) -> Sequence[RaceCase]:
        """Cases in which something else used the device while times were taken."""
        return [case for case in self.cases if case.notes]

    def versus_torch(self, candidate: str) -> Comparison | None:
        """A candidate beside the best of torch, over all cases; None where that is not known."""
        found = self.overall.get(candidate, ())
        return next((c for c in found if c.against == BEST_OF_TORCH), None)

    def cases_with(self, candidate: str, verdict: SpeedVerdict) -> list[tuple[RaceCase, Ratio]]:
        """Cases where a candidate has this verdict beside the best of torch."""
        return [(case, r) for case, r in self._beside_torch(candidate) if r.verdict is verdict]

    def _beside_torch(self, candidate: str) -> list[tuple[RaceCase, Ratio]]:
        ratios = ((case, case.ratio(candidate, BEST_OF_TORCH)) for case in self.cases)
        return [(case, r) for case, r in ratios if r is not None]
