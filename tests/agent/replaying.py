"""Decides everything once more from a run's stored verdicts, and compares with what was decided
then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kagent.evolve.ask_queue import first_new
from kagent.runs.ask import Ask, AskRecord, Proposer, Setting
from kagent.runs.history import History
from kagent.runs.lineage import Lineage, Operator, Proposal
from kagent.runs.source_index import SourceIndex
from kagent.search.recombine import best
from kagent.search.select import select
from kagent_sandbox.data.records import RecordError, from_json
from kagent_sandbox.errors import RunError


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first decision that comes out otherwise. `now` is None if nothing is proposed at all."""

    then: Proposal | AskRecord
    now: Proposal | AskRecord | None


async def replay(
    history: History, setting: Setting, proposer: Proposer | None
) -> Divergence | None:
    """The first difference to the stored run, or None if every decision is the same.

    `setting.budget` is taken from the store, ask by ask. Without a proposer (a model, or answers
    from outside) only what was asked for is compared, not what was answered.

    Raises:
        RunError: An event is damaged.
    """
    known, lineage = SourceIndex(), Lineage()
    by_id = {p.id: p for p in _proposals(history)}
    seeds = [p for p in by_id.values() if p.operator is Operator.SEED]
    open_briefs: dict[int, Ask] = {}
    for kind, number, ask in _steps(history):
        if ask is not None:
            now = select(
                replace(setting, budget=ask.budget),
                lineage.as_of(len(lineage)),
                ask.number,
                list(open_briefs.values()),
                seeds,
            )
            if now.record() != ask:
                return Divergence(ask, now.record())
            open_briefs[ask.number] = now
        elif kind == "dropped":
            open_briefs.pop(number, None)
        elif kind == "proposed":
            then = by_id[number]
            ask = open_briefs.get(then.ask) if then.ask is not None else None
            if ask is not None and proposer is not None:
                found = await first_new(proposer, ask, known, Counter())
                again = None if found is None else found[1].proposal(found[0], then.id)
                if again != then:
                    return Divergence(then, again)
            if then.operator is Operator.RECOMBINE and then.ask is None:
                draft = best(setting, lineage, lambda d: known.same(d) is None)
                again = None if draft is None else draft.unasked(len(lineage), then.id)
                if again != then:
                    return Divergence(then, again)
            known.add(then)
        elif kind == "recorded":
            # The caller's lineage counts, not the events' verdicts: a test may have changed it.
            candidate = history.lineage.as_recorded(number)
            lineage.record(candidate)
            if candidate.proposal.ask is not None:
                open_briefs.pop(candidate.proposal.ask, None)
    return None


def _proposals(history: History) -> list[Proposal]:
    return [*(c.proposal for c in history.lineage), *history.pending]


def _steps(history: History) -> Iterator[tuple[str, int, AskRecord | None]]:
    """Kind, number and, of decisions, the ask, of the events that replaying needs."""
    for event in history.events:
        try:
            if event.kind == "asked":
                ask = from_json(AskRecord, event.data)
                yield event.kind, ask.number, ask
            elif event.kind == "dropped":
                yield event.kind, event.data["ask"], None
            elif event.kind in ("proposed", "recorded"):
                yield event.kind, event.data["id"], None
        except (RecordError, KeyError) as e:
            raise RunError(f"event {event.seq} is damaged: {e}") from None
