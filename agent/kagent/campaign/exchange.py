"""Exchange between runs of one task: kernels to judge anew, never verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kagent.runs.final_race import choose_finalists
from kagent.runs.history import History
from kagent.runs.lineage import Candidate, Operator, Origin, Proposal
from kagent.runs.source_index import SourceIndex, text_identity
from kagent.runs.store import RunStore
from kagent.text import short

_MOST_HYPOTHESIS = 300  # characters


@dataclass(frozen=True, slots=True)
class Migrant:
    """A candidate of one run, as it is given to another.

    Attributes:
        run: Name of its run's folder.
        id: Its number there.
        name: Of its structure.
        source: Its file.
        hypothesis: What it changed.
        models: Who wrote it and what it descends from; empty for seeds and the tuner's work.
        configs: Configurations to build; None: as the run has it.
    """

    run: str
    id: int
    name: str
    source: str
    hypothesis: str
    models: tuple[str, ...] = ()
    configs: int | None = None


def elite_of(run: str, history: History, candidate: Candidate) -> Migrant:
    """A candidate as another run gets it."""
    path = history.lineage.path(candidate.id)
    models = [c.proposal.origin.model for c in path if c.proposal.origin is not None]
    p = candidate.proposal
    return Migrant(
        run, p.id, p.name, p.source, p.hypothesis, tuple(dict.fromkeys(models)), p.configs
    )


def offered(history: History, others: Iterable[tuple[str, History]]) -> list[Migrant]:
    """Choose the migrant for a run: of other runs whose best kernel is ahead by their estimate, the
    best one that the run does not know; at most one, since judging it costs an evaluation.

    Estimates of two runs do not compare. They choose what is judged, and decide nothing else.
    """
    own = history.lineage.incumbent
    if own is None:
        return []
    known = {text_identity(p.source) for p in _proposals(history)}
    found = [
        (other.lineage.log_speed(best.id), name, other, best)
        for name, other in others
        if (best := other.lineage.incumbent) is not None
        and best.proposal.operator is not Operator.SEED
        and other.lineage.log_speed(best.id) > history.lineage.log_speed(own.id)
        and text_identity(best.proposal.source) not in known
    ]
    if not found:
        return []
    _, name, other, best = max(found, key=lambda f: f[0])
    return [elite_of(name, other, best)]


def finalists_of(runs: Iterable[tuple[str, History]]) -> list[Migrant]:
    """All runs' finalists, the fastest by estimate first, each text once."""
    found = [
        (-history.lineage.log_speed(c.id), elite_of(name, history, c))
        for name, history in runs
        for c in choose_finalists(history.lineage)
    ]
    by_text = {text_identity(e.source): e for _, e in sorted(found, key=lambda f: f[0])[::-1]}
    return list(by_text.values())[::-1]


def accept(store: RunStore, elites: Sequence[Migrant]) -> None:
    """Take candidates of other runs into one, to be judged in its next session.

    Raises:
        RunError: The run cannot be written.
    """
    history = store.history()
    known = SourceIndex(_proposals(history))
    proposals = []
    for elite in elites:
        proposal = Proposal(
            id=len(known),
            parents=(),
            operator=Operator.MIGRATE,
            name=elite.name,
            source=elite.source,
            hypothesis=short(f"#{elite.id} of {elite.run}: {elite.hypothesis}", _MOST_HYPOTHESIS),
            seen=len(history.lineage),
            origin=Origin(", ".join(elite.models), calls=0) if elite.models else None,
            configs=elite.configs,
        )
        if known.same(proposal) is None:
            known.add(proposal)
            proposals.append(proposal)
    if proposals:
        store.append("opened", {"by": "campaign"})  # what follows is no part of a session's time
        store.propose(*proposals)


def _proposals(history: History) -> list[Proposal]:
    return [*(c.proposal for c in history.lineage), *history.pending]
