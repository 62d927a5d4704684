"""Rows of a run's log as events, strictly read: a run's folder may come from anybody."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

from kagent_sandbox.data.records import RecordError
from kagent_sandbox.errors import RunError

from kagent.runs.checksums import LogRow

_MOST_EVENT_CHARS = 32 << 20  # a race of many cases has one MiB
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
MANIFEST = "manifest"
"""Kind of the event with the checksum of run.json."""
DAMAGE = (RecordError, KeyError, ValueError, TypeError, IndexError, AssertionError, OverflowError)
"""Exceptions that reading an event raises if no kagent wrote it: a run's folder may come from
anybody.
"""


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """One row of the log. `data` is JSON."""

    seq: int
    at: float  # seconds since the epoch, by the wall clock when its process opened the run
    kind: str
    data: Mapping[str, Any]


def checked_event(folder: Path, row: LogRow) -> StoredEvent:
    """A row of the log as an event.

    Raises:
        RunError: It is not what was written, or no kagent wrote it.
    """
    if row.fault:
        raise damaged_event(folder, row, row.fault)
    try:
        return event_of(row.seq, row.at, row.kind, row.data)
    except (ValueError, RecursionError) as e:
        raise damaged_event(folder, row, str(e)) from None


def damaged_event(folder: Path, row: LogRow, why: str) -> RunError:
    """The error of a row that is not what was written."""
    return RunError(
        f"{folder}: event {row.seq} is damaged: {why}. Put lineage.sqlite back from a copy, or "
        f"start a new run; kagent verify {folder.name} lists all that is damaged"
    )


def event_of(seq: object, at: object, kind: object, data: object) -> StoredEvent:
    """A row of the log.

    Raises:
        ValueError: No kagent wrote it.
    """
    if not isinstance(data, str) or len(data) > _MOST_EVENT_CHARS:
        raise ValueError(f"expected at most {_MOST_EVENT_CHARS} characters of JSON")
    data.encode()  # bytes that are no text end here
    value = json.loads(data, parse_constant=_no_constant)
    if _SURROGATE.search(data):
        json.dumps(value, ensure_ascii=False).encode()  # half a character could not be shown
    whole = isinstance(seq, int) and isinstance(kind, str) and isinstance(value, dict)
    if not whole or not isinstance(at, float | int) or not math.isfinite(at):
        raise ValueError("a row of other types than events have")
    return StoredEvent(cast("int", seq), at, cast("str", kind), value)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
