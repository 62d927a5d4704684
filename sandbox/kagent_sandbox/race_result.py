"""What a race found, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kagent_sandbox.verdict import CaseTiming, Comparison, Rejected

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


@dataclass(frozen=True, slots=True)
class RaceCase:
    """One case of a race: what everyone took, and how the candidates compare."""

    case: str
    dtype: str
    dims: Mapping[str, int | float | bool]
    candidates: Mapping[str, CaseTiming]
    baselines: Mapping[str, CaseTiming]
    ratios: tuple[Ratio, ...]
    missing: Mapping[str, str] = field(default_factory=dict)  # baseline -> why it did not run


@dataclass(frozen=True, slots=True)
class Race:
    """A race's result. `overall` compares each candidate with everyone else over all cases."""

    cases: tuple[RaceCase, ...]
    overall: Mapping[str, tuple[Comparison, ...]]
    failed: Mapping[str, Rejected] = field(default_factory=dict)
