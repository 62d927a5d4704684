"""Messages between the agent and the judge's process. `packing` has those with candidates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kagent_sandbox import errors
from kagent_sandbox.data.verdict import CaseError, Passed, Rejected
from kagent_sandbox.errors import KagentError
from kagent_sandbox.process.device_lock import Mode

ERRORS: Mapping[str, type[KagentError]] = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, KagentError)
}
"""Errors by name that a process may report and its client raises again."""


def error_answer(error: KagentError) -> dict[str, Any]:
    """An error, as an answer to a request."""
    names = [c.__name__ for c in type(error).__mro__ if c.__name__ in ERRORS]
    return {"error": names[0], "text": str(error)}


def raise_error(answer: Mapping[str, Any]) -> None:
    """Raise the error that an answer has.

    Raises:
        KagentError: There is one.
    """
    if "error" in answer:
        raise ERRORS[answer["error"]](answer["text"])


AHEAD: Mapping[str, Mode] = {"ahead": "work", "ahead timing": "timing", "ahead work": "work"}
"""Steps of compiling ahead, the first and further ones, and how they need the device."""
USES: Mapping[str, Mode] = {
    **AHEAD,
    **dict.fromkeys(("ceilings", "noise", "baselines", "sweep", "measure", "race"), "timing"),
    **dict.fromkeys(("open", "check", "examine", "health"), "work"),
}
"""Requests for which the device is needed, and how."""


@dataclass(frozen=True)
class CheckAnswer:
    """Answer to a check."""

    result: Rejected | Correct


@dataclass(frozen=True)
class Correct:
    """The candidate is right in every case."""

    errors: tuple[CaseError, ...]


@dataclass(frozen=True)
class SweepAnswer:
    """Answer to a sweep."""

    result: Rejected | Swept


@dataclass(frozen=True)
class Swept:
    """Median µs by case of each configuration; a case is missing where it failed."""

    us: tuple[Mapping[str, float], ...]


@dataclass(frozen=True)
class MeasureAnswer:
    """Answer to a measurement."""

    result: Passed | Rejected | IncumbentRejected


@dataclass(frozen=True)
class IncumbentRejected:
    """The incumbent failed beside the candidate. Nothing is known of the candidate."""

    incumbent: Rejected


@dataclass(frozen=True)
class Entrant:
    """A contender by the key under which the judge keeps it."""

    id: str
    key: str
    choice: Mapping[str, int]


@dataclass(frozen=True)
class MeasureRequest:
    """A candidate to measure, and the incumbent beside it."""

    key: str
    errors: tuple[CaseError, ...]
    incumbent: Entrant | None
    sweep_s: float


@dataclass(frozen=True)
class RaceRequest:
    """The entrants of a race, and its cases."""

    entrants: tuple[Entrant, ...]
    hidden: bool
    baselines: bool
