"""The proposer that repeats a stored run: the same proposals in the same order, without a model.

What was proposed is taken as it was; measurements are made anew. On another device the same
proposals may therefore win or lose otherwise, and given equal measurements the lineage is the same.
"""

from __future__ import annotations

from kagent.runs.ask import Ask, Draft
from kagent.runs.history import History
from kagent.runs.lineage import Operator, Proposal


class RecordedProposer:
    """A `Proposer`. The ask counts for nothing but its place in the order."""

    operators: tuple[Operator, ...] = (Operator.TUNE,)  # the operator of an ask does not matter
    at_once = 1
    resamples = 0  # an earlier duplicate is one again

    def __init__(self, name: str, history: History) -> None:
        """Read the proposals of a run; `name` is how the user named it."""
        self.name = f"replay:{name}"
        proposals = [*(c.proposal for c in history.lineage), *history.pending]
        self._seeds = {p.id: p.kernel for p in proposals if p.operator is Operator.SEED}
        self._proposals = [p for p in proposals if p.operator is not Operator.SEED]
        self._places = {p.id: place for place, p in enumerate(self._proposals)}

    def __len__(self) -> int:
        return len(self._proposals)

    async def propose(self, ask: Ask) -> Draft | None:
        """The proposal whose turn it is, or None after the last one."""
        if ask.id >= len(self._proposals):
            return None
        then = self._proposals[ask.id]
        return Draft(
            parents=self._parents(then, ask),
            operator=then.operator,
            name=then.name,
            source=then.source,
            hypothesis=then.hypothesis,
            predicted=then.predicted,
            origin=then.origin,
            fault=then.fault,
            configs=then.configs,
            works=then.works,
        )

    def _parents(self, then: Proposal, ask: Ask) -> tuple[int, ...]:
        """The parents by their ids here: there may be other seeds by now, or in another order.

        A parent that is no seed any more is left out.
        """
        seeds = {s.proposal.kernel: s.id for s in ask.lineage.seeds}
        here = (
            seeds.get(self._seeds[parent])
            if parent in self._seeds
            else len(ask.lineage.seeds) + self._places[parent]
            for parent in then.parents
        )
        return tuple(p for p in here if p is not None)
