"""Times of the configurations that were tried of a candidate before its verdict, as an event of its
run (`timed`): what constants are worth, kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TimedConfig:
    """One configuration: the tunables' values, and median µs by visible case. Empty: it failed."""

    values: Mapping[str, object]
    us: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TimedConfigs:
    """All of candidate `id`: first the file as it was written, then the others as they came.

    Each is timed a few times beside the file as it was written, which chooses and proves nothing.
    """

    id: int
    configs: tuple[TimedConfig, ...]
