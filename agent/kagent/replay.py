"""Decides everything once more from a run's stored verdicts, and compares with what was decided
then.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kagent.duplicates import Known
from kagent.flight import first_new
from kagent.lineage import Operator, Proposal
from kagent.propose import Brief, Proposer, Setting
from kagent.select import select
from kagent.store import History


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first proposal that comes out otherwise. `now` is None if nothing is proposed at all."""

    then: Proposal
    now: Proposal | None


async def replay(history: History, setting: Setting, proposer: Proposer) -> Divergence | None:
    """The first difference to the stored run, or None if every decision is the same.

    `setting.budget` is taken from the store, session by session.
    """
    proposals = [*(c.proposal for c in history.lineage), *history.pending]
    known = Known()
    briefs: dict[int, Brief] = {}

    async def earlier() -> Known:
        return known

    for then in proposals:
        if then.operator is not Operator.SEED:
            budget = history.budget_at(then.id)
            pending = [briefs[i] for i in range(then.seen, then.id) if i in briefs]
            brief = select(
                replace(setting, budget=budget), history.lineage.as_of(then.seen), then.id, pending
            )
            briefs[then.id] = brief
            now = await first_new(proposer, brief, earlier)
            if now != then:
                return Divergence(then, now)
        known.add(then)
    return None
