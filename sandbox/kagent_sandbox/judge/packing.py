"""A built candidate as a header in JSON and blobs: plans and binaries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kagent_sandbox.data.build import Built
from kagent_sandbox.data.packed_plans import Key, PackedPlans, texts_of
from kagent_sandbox.data.plan import Plan
from kagent_sandbox.data.plan_json import parse_plan


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
    for (config, case), data in texts_of(built.plans).items():
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
    texts, binaries = _parted(header, blobs)
    parsed = {text: parse_plan(text) for text in set(texts.values())}
    return _built(header, {key: parsed[text] for key, text in texts.items()}, binaries)


def unpack_unread(header: Header, blobs: Sequence[bytes], work_hash: str) -> Built:
    """The candidate again, its plans unparsed: for those who pass it on.

    Args:
        header: As it was packed.
        blobs: As they were packed.
        work_hash: The candidate's, where its plans were parsed last.
    """
    texts, binaries = _parted(header, blobs)
    return _built(header, PackedPlans(texts, work_hash), binaries)


def _parted(
    header: Header, blobs: Sequence[bytes]
) -> tuple[Mapping[Key, bytes], Mapping[str, bytes]]:
    """Plans and binaries."""
    count = len(blobs) - len(header.binaries)
    texts = {(p.config, p.case): blobs[p.blob] for p in header.plans if p.blob < count}
    if len(texts) < len(header.plans):
        raise ValueError("a header that names blobs which are not there")
    return texts, dict(zip(header.binaries, blobs[count:], strict=True))


def _built(header: Header, plans: Mapping[Key, Plan], binaries: Mapping[str, bytes]) -> Built:
    return Built(
        source_hash=header.source_hash,
        tree_hash=header.tree_hash,
        target=header.target,
        configs=header.configs,
        plans=plans,
        binaries=binaries,
        build_s=header.build_s,
    )
