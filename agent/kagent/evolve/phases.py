"""Phases of a session, and how long each is expected to take, by the last times here."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from kagent_sandbox import cache

from kagent.runs.events import Observer, Phase, PhaseBegan

_STORED_FROM_S = 1.0  # what is over sooner found its figures in the cache, and is no typical case
_KEPT = 5  # last times of a phase; their lower median is expected, as busy machines only delay


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Seconds of each phase the last times, the newest last; of the search, per evaluation."""

    seconds: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


class PhaseClock:
    """Tells an observer each phase as it begins, with what it is expected to take."""

    def __init__(
        self,
        observe: Observer,
        *key: object,
        evaluations: int = 0,
        most_search_s: float | None = None,
    ) -> None:
        """Read what is known.

        Args:
            observe: Is told.
            key: What the times depend on: task, device, options. None is stored without a key.
            evaluations: Proposals that the search may evaluate.
            most_search_s: Limit of the search, or None.
        """
        self._observe = observe
        self._name = cache.named("phases", *key) if key else None
        found = cache.load(self._name, PhaseTimes) if self._name is not None else None
        self._known = dict(found.seconds) if found is not None else {}
        self._evaluations = evaluations
        self._most_search_s = most_search_s
        self._phase: Phase | None = None
        self._began_s = 0.0

    def begin(self, phase: Phase) -> None:
        """A phase begins, and so the one before is over."""
        self.end()
        self._phase, self._began_s = phase, time.monotonic()
        order = list(Phase)
        later = [self._expected_s(p) for p in order[order.index(phase) + 1 :]]
        known = [s for s in later if s is not None]
        later_s = sum(known) if len(known) == len(later) else None
        most_s = self._most_search_s if phase is Phase.SEARCH else None
        self._observe(PhaseBegan(phase, self._expected_s(phase), later_s, most_s))

    def end(self, evaluations: int | None = None) -> None:
        """The phase in progress is over, and its time is kept.

        Args:
            evaluations: Of the search, if that was it: its time is kept for each.
        """
        phase, self._phase = self._phase, None
        seconds = time.monotonic() - self._began_s
        if phase is None or self._name is None or seconds < _STORED_FROM_S:
            return
        if phase is Phase.SEARCH:
            if not evaluations:
                return
            seconds /= evaluations
        self._known[phase.name] = (*self._known.get(phase.name, ()), seconds)[-_KEPT:]
        cache.save(self._name, PhaseTimes(self._known))

    def _expected_s(self, phase: Phase) -> float | None:
        times = self._known.get(phase.name, ())
        known = statistics.median_low(times) if times else None
        if phase is not Phase.SEARCH:
            return known
        limits = [known * self._evaluations] if known is not None else []
        limits += [self._most_search_s] if self._most_search_s is not None else []
        return min(limits, default=None)
