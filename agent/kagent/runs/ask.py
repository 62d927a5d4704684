"""The seam between the loop and whatever invents kernels: an ask goes in, a draft comes out."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.task import Task

from kagent.runs.events import Stop
from kagent.runs.ideas import Effect
from kagent.runs.lineage import Candidate, Lineage, Operator, Origin, Proposal


@dataclass(frozen=True, slots=True)
class Setting:
    """Facts that stay the same for all decisions of a run."""

    task: Task
    kind: Kind
    target: str
    budget: int
    seed: int
    in_flight: int  # proposals between their selection and their verdict
    operators: tuple[Operator, ...]  # those that the proposer can carry out
    priors: tuple[Effect, ...] = ()  # what techniques did in earlier runs


@dataclass(frozen=True, slots=True)
class AskRecord:
    """A decision of `select` as it is stored: with the lineage it gives the same ask again."""

    number: int  # counts the decisions of a run; asks that nobody answers leave gaps in nothing
    seen: int  # records in the lineage when it was taken
    budget: int  # of the run at that time
    operator: Operator
    parent: int


@dataclass(frozen=True, slots=True)
class Ask:
    """One decision of `select`, with all that a proposer may base its answer on.

    While nothing has passed, the lineage goes on with seeds that wait for their verdicts, as they
    are assumed to be (`kagent.runs.lineage.assumed`); the parent is one of them.

    `pending` holds the texts of accepted proposals that `lineage` does not hold yet. It is empty
    until a draft is a duplicate, so that several asks can be worked on at once, and complete then.
    """

    setting: Setting
    id: int  # number of the ask; an answer becomes the candidate whose turn it is when it comes
    lineage: Lineage  # as it stood when the decision was taken; not to be appended to
    operator: Operator
    parent: Candidate
    elites: tuple[Candidate, ...]  # the incumbent first
    progress: float  # share of the budget used up, 0 to 1
    attempt: int = 0  # attempts at this ask before: drafts that were duplicates, failed calls
    pending: tuple[str, ...] = ()
    ideas: int = 1  # techniques to ask for at once

    def rng(self, use: str = "propose") -> random.Random:
        """This ask's own random numbers for one use of them: the same on every replay."""
        stream = f"{self.setting.seed}/{self.id}/{use}/{self.attempt}"
        return random.Random(stream)  # noqa: S311 - a search, not a secret

    @property
    def seen(self) -> int:
        """Records that it was taken on: those of the lineage that are not merely assumed."""
        return sum(not c.is_assumed for c in self.lineage)

    def record(self) -> AskRecord:
        """The decision, to be stored."""
        return AskRecord(self.id, self.seen, self.setting.budget, self.operator, self.parent.id)


@dataclass(frozen=True, slots=True)
class Draft:
    """A proposer's answer. It may have used other parents or another operator than the ask asked
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
    works: float | None = None

    def unasked(self, seen: int, number: int) -> Proposal:
        """The draft as candidate `number` that nobody was asked for, made of `seen` records."""
        return Proposal(
            id=number,
            parents=self.parents,
            operator=self.operator,
            name=self.name,
            source=self.source,
            hypothesis=self.hypothesis,
            predicted=self.predicted,
            seen=seen,
        )

    def proposal(self, ask: Ask, number: int) -> Proposal:
        """The draft as the answer to an ask, and candidate `number`."""
        return Proposal(
            id=number,
            parents=self.parents,
            operator=self.operator,
            name=self.name,
            source=self.source,
            hypothesis=self.hypothesis,
            predicted=self.predicted,
            seen=ask.seen,
            attempt=ask.attempt,
            ask=ask.id,
            origin=self.origin,
            fault=self.fault,
            configs=self.configs,
            works=self.works,
        )


class CapReached(Exception):  # noqa: N818 - no error: the run ends as it was told to
    """A limit on money or tokens leaves no room for another call."""

    def __init__(self, stop: Stop) -> None:
        super().__init__(stop.value)
        self.stop = stop


class Nobody:
    """The proposer of sessions that only judge what was answered before."""

    name = "ask/tell"
    operators: tuple[Operator, ...] = ()
    at_once = 0
    resamples = 0

    async def propose(self, ask: Ask) -> Draft | None:
        """Nothing: it is never asked."""
        raise AssertionError(ask)


class Proposer(Protocol):
    """Invents kernels. Given equal asks it gives equal drafts, from `ask.rng()` or stored
    replies; a model need not, but what it answered is stored.
    """

    name: str
    operators: tuple[Operator, ...]
    at_once: int
    """Asks that it works on at once. With 1, a run is the same whatever the work's timing."""
    resamples: int
    """Drafts for one ask before a duplicate is taken for an answer."""

    async def propose(self, ask: Ask) -> Draft | None:
        """A draft, or None when there is nothing left that was not tried.

        Raises:
            CapReached: A limit on money or tokens leaves no room for another call.
            ModelError: The model cannot be reached, or does not answer.
        """


@dataclass(frozen=True, slots=True)
class Prompt:
    """One system and one user message."""

    system: str
    user: str
    card: str = ""  # name of the technique card in it
