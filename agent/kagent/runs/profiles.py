"""Profiles of candidates, as data. `kagent.evolve.profile` makes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kagent_sandbox.data.records import from_json, to_json

from kagent.runs.history import History


@dataclass(frozen=True, slots=True)
class KernelProfile:
    """One launch of a plan. `counters` are ncu's, by metric, in µs, bytes and percent; empty
    without it.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    registers: int
    spill_bytes: int
    shared_bytes: int  # static and dynamic
    blocks_per_unit: int  # resident on a multiprocessor
    occupancy: float  # warps resident over the most that there may be, 0 to 1
    limited_by: tuple[str, ...]
    waves: float  # blocks over those that run at once
    load_bytes: Mapping[str, int]  # global load instructions by width
    counters: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Profile:
    """A candidate on one benchmark case."""

    candidate: int
    case: str
    device: str
    kernels: tuple[KernelProfile, ...]
    why_static: str = ""  # why there are no counters


def to_event(profile: Profile) -> Mapping[str, object]:
    """Return the profile as it is stored."""
    stored = to_json(profile)
    assert isinstance(stored, dict)
    return stored


def stored_profiles(history: History) -> dict[tuple[int, str], Profile]:
    """The last profile of each candidate and case of a run."""
    found = (from_json(Profile, e.data) for e in history.events if e.kind == "profiled")
    return {(p.candidate, p.case): p for p in found}
