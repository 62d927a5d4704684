"""Timer of the phases during which a candidate holds the device."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator


class PhaseTimer:
    """Seconds by part. Of nested parts only the innermost counts, so that parts add up to the
    whole.

    Of a candidate: `check` (all of it), `start` of a launcher, `prepare` plans, `wait` for the
    device to be quiet, `inputs` and poison, `samples`, `compare` results, `wall` clock, `close` of
    the launcher, `guest` for the visit of native code, and `other`: statistics and messages. Of a
    race: see `Race.seconds`.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._seconds: dict[str, float] = {}
        self._now = now
        self._open: list[str] = []
        self._since = 0.0

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by part, of parts that have ended."""
        return dict(self._seconds)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time inside as `name`, except for nested parts."""
        self._mark()
        self._open.append(name)
        try:
            yield
        finally:
            self._mark()
            self._open.pop()

    def _mark(self) -> None:
        """Account for the time since the last mark to the innermost part that is open."""
        now = self._now()
        if self._open:
            part = self._open[-1]
            self._seconds[part] = self._seconds.get(part, 0.0) + now - self._since
        self._since = now
