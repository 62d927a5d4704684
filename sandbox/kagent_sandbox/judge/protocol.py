"""Messages between the agent and the judge's process: plans and binaries travel as blobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kagent_sandbox import errors
from kagent_sandbox.data.build import Built
from kagent_sandbox.data.plan_json import dump_plan, parse_plan
from kagent_sandbox.data.verdict import CaseError, Passed, Rejected
from kagent_sandbox.errors import KagentError

ERRORS: Mapping[str, type[KagentError]] = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, KagentError)
}
"""Errors by name that the judge's process may report and the client raises again."""


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


@dataclass(frozen=True)
class Header:
    """A `Built` without its plans and binaries; `plans` says which blob is whose plan."""

    source_hash: str
    tree_hash: str
    target: str
    configs: tuple[Mapping[str, object], ...]
    build_s: float
    plans: tuple[PlanAt, ...]
    binaries: tuple[str, ...]  # hashes of the last blobs, in order


@dataclass(frozen=True)
class PlanAt:
    """Blob `blob` is the plan of a configuration on a case."""

    config: int
    case: str
    blob: int


def pack(built: Built) -> tuple[Header, list[bytes]]:
    """A candidate as a header and blobs; equal plans are sent once."""
    blobs: list[bytes] = []
    index: dict[bytes, int] = {}
    where: list[PlanAt] = []
    for (config, case), plan in built.plans.items():
        data = dump_plan(plan)
        if data not in index:
            index[data] = len(blobs)
            blobs.append(data)
        where.append(PlanAt(config, case, index[data]))
    header = Header(
        built.source_hash,
        built.tree_hash,
        built.target,
        built.configs,
        built.build_s,
        tuple(where),
        tuple(built.binaries),
    )
    return header, [*blobs, *built.binaries.values()]


def unpack(header: Header, blobs: Sequence[bytes]) -> Built:
    """The candidate again. Every plan is validated anew.

    Raises:
        PlanError: A plan is malformed.
    """
    count = len(blobs) - len(header.binaries)
    plans = [parse_plan(b) for b in blobs[:count]]
    return Built(
        source_hash=header.source_hash,
        tree_hash=header.tree_hash,
        target=header.target,
        configs=header.configs,
        plans={(p.config, p.case): plans[p.blob] for p in header.plans},
        binaries=dict(zip(header.binaries, blobs[count:], strict=True)),
        build_s=header.build_s,
    )
