"""The seam between the loop and whatever invents kernels: a brief goes in, a draft comes out."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

from kagent_sandbox.task import Kind, Task

from kagent.lineage import Candidate, Lineage, Operator, Origin, Proposal


@dataclass(frozen=True, slots=True)
class Setting:
    """What stays the same for all decisions of a run."""

    task: Task
    kind: Kind
    target: str
    budget: int
    seed: int
    in_flight: int  # proposals worked on at once
    operators: tuple[Operator, ...]  # those that the proposer can carry out


@dataclass(frozen=True, slots=True)
class Brief:
    """One decision of `select`, with all that a proposer may base its answer on.

    `pending` holds the texts of accepted proposals that `lineage` does not hold yet. It is empty on
    the first attempt, so that several briefs can be worked on at once, and complete on later ones.
    """

    setting: Setting
    id: int
    lineage: Lineage  # as it stood when the decision was taken; not to be appended to
    operator: Operator
    parent: Candidate
    elites: tuple[Candidate, ...]  # the incumbent first
    progress: float  # share of the budget used up, 0 to 1
    attempt: int = 0  # drafts for this brief that were duplicates
    pending: tuple[str, ...] = ()

    def rng(self) -> random.Random:
        """This brief's own random numbers: the same on every replay."""
        stream = f"{self.setting.seed}/{self.id}/propose/{self.attempt}"
        return random.Random(stream)  # noqa: S311 - a search, not a secret


@dataclass(frozen=True, slots=True)
class Draft:
    """A proposer's answer. It may have used other parents or another operator than the brief asked
    for.
    """

    parents: tuple[int, ...]
    operator: Operator
    name: str
    source: str
    hypothesis: str
    predicted: float | None = None
    origin: Origin | None = None
    fault: str = ""
    configs: int | None = None

    def proposal(self, brief: Brief) -> Proposal:
        """The draft as the proposal of the brief's id."""
        return Proposal(
            id=brief.id,
            parents=self.parents,
            operator=self.operator,
            name=self.name,
            source=self.source,
            hypothesis=self.hypothesis,
            predicted=self.predicted,
            seen=len(brief.lineage),
            attempt=brief.attempt,
            origin=self.origin,
            fault=self.fault,
            configs=self.configs,
        )


class Proposer(Protocol):
    """Invents kernels. Given equal briefs it gives equal drafts, from `brief.rng()` or stored
    replies.
    """

    name: str
    operators: tuple[Operator, ...]

    async def propose(self, brief: Brief) -> Draft | None:
        """A draft, or None when there is nothing left that was not tried."""
