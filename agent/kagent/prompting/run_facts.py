"""Facts that a prompt gives beyond its ask: the device, its ceilings, and torch's times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kagent_sandbox.data.device import Ceilings, DeviceFacts
from kagent_sandbox.data.records import RecordError, from_json
from kagent_sandbox.errors import RunError

from kagent.runs.history import History
from kagent.runs.manifest import Manifest
from kagent.runs.profiles import Profile, stored_profiles


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts of a run that stay the same for all of its prompts, but for profiles, which grow."""

    device: DeviceFacts | None = None  # None: nobody has asked a device yet
    ceilings: Ceilings | None = None
    baselines: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """µs by visible benchmark case and baseline; empty where none was measured."""
    lang: str = "any"  # the run's --lang: what kernels may be written in
    tune: int = 16  # --tune: configurations of a kernel tried before its verdict; 1: none
    profiles: Sequence[Profile] = ()  # of candidates; the last of each case


def run_facts_of(manifest: Manifest, history: History) -> RunFacts:
    """The situation of a stored run.

    Raises:
        RunError: Its records are damaged.
    """
    try:
        measured = history.baselines or {}
        ceilings = measured.get("ceilings")
        return RunFacts(
            device=manifest.facts,
            ceilings=from_json(Ceilings, ceilings) if ceilings is not None else None,
            baselines=_times(measured.get("baselines")),
            lang=manifest.lang,
            profiles=tuple(stored_profiles(history).values()),
        )
    except (RecordError, TypeError, ValueError, AttributeError) as e:
        raise RunError(f"a record of the run is damaged: {e}") from None


def _times(baselines: Mapping[str, Any] | None) -> Mapping[str, Mapping[str, float]]:
    """`Baselines.us` of the stored JSON. (The class itself comes with torch, which takes a second
    to import.)
    """
    us = (baselines or {}).get("us", {})
    return {
        str(case): {str(name): float(value) for name, value in times.items()}
        for case, times in us.items()
    }
