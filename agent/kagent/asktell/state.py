"""The events that asking and telling add to a run's log, and reading them back.

opened    {by}          a command works on the run, outside of any session
asked     `AskRecord`         a decision (as in every run)
prompted  `Prompted`    with it: its prompt is in prompts/
proposed                an answer was accepted (as in every run); it waits for its verdict
told      `Told`        with it: what the answer was
looked    `Precheck`      what a machine without the device could say about it
machine   {environment} the device that judges the run, from its first session on
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kagent_sandbox.data.language import TRITON
from kagent_sandbox.data.records import from_json
from kagent_sandbox.data.verdict import Rejected
from kagent_sandbox.errors import RunError

from kagent.runs.ask import Ask, AskRecord, Setting
from kagent.runs.history import History
from kagent.runs.lineage import Operator, Proposal
from kagent.runs.stored_event import DAMAGE
from kagent.search.select import restored_ask


@dataclass(frozen=True, slots=True)
class Prompted:
    """An ask's prompt was written. `card` names the technique in it."""

    ask: int
    card: str


@dataclass(frozen=True, slots=True)
class Told:
    """Candidate `id` came from outside. `text` identifies the answer's whole text."""

    id: int
    ask: int | None
    text: str
    label: str  # the file's name


@dataclass(frozen=True, slots=True)
class Precheck:
    """Findings from building candidate `id` and interpreting it. This is no verdict: nothing was
    timed.
    """

    id: int
    target: str
    build_s: float | None = None  # None: it does not build
    rejected: Rejected | None = None
    interpreted: bool = False  # by what its languages have: not CUDA, C++, and too large cases
    skipped: tuple[str, ...] = ()  # cases that are too large for it
    unchecked: str = ""  # why none of its values was checked, though it was built
    where: str = TRITON.interpreter  # what interpreted it


@dataclass(frozen=True)
class AskTellState:
    """A run as asking and telling sees it."""

    history: History
    asks: Mapping[int, AskRecord]  # all, in order
    under_way: tuple[AskRecord, ...]  # without a verdict: what the next decision takes into account
    cards: Mapping[int, str]  # by ask
    told: tuple[Told, ...]
    looked: Mapping[int, Precheck]  # by candidate, the last one

    @property
    def open(self) -> tuple[AskRecord, ...]:
        """Asks that nobody has answered."""
        return self.history.asks

    @property
    def proposals(self) -> list[Proposal]:
        """All that were accepted, by id."""
        lineage, pending = self.history.lineage, self.history.pending
        return [*(c.proposal for c in lineage), *pending]

    @property
    def seeds(self) -> list[Proposal]:
        """The run's seeds, with or without a verdict."""
        return [p for p in self.proposals if p.operator is Operator.SEED]

    def ask(self, setting: Setting, number: int) -> Ask:
        """An ask as it was put."""
        return restored_ask(setting, self.history.lineage, self.asks[number], self.seeds)


def read_state(history: History) -> AskTellState:
    """The state of asking and telling.

    Raises:
        RunError: An event is damaged.
    """
    asks: dict[int, AskRecord] = {}
    under_way: dict[int, AskRecord] = {}
    cards: dict[int, str] = {}
    told: list[Told] = []
    looked: dict[int, Precheck] = {}
    for event in history.events:
        try:
            if event.kind == "asked":
                ask = from_json(AskRecord, event.data)
                asks[ask.number] = under_way[ask.number] = ask
            elif event.kind == "dropped":
                under_way.pop(event.data["ask"], None)
            elif event.kind == "recorded":
                answered = history.lineage[event.data["id"]].proposal.ask
                under_way.pop(-1 if answered is None else answered, None)
            elif event.kind == "prompted":
                prompted = from_json(Prompted, event.data)
                cards[prompted.ask] = prompted.card
            elif event.kind == "told":
                told.append(from_json(Told, event.data))
            elif event.kind == "looked":
                found = from_json(Precheck, event.data)
                looked[found.id] = found
        except DAMAGE as e:
            raise RunError(f"event {event.seq} is damaged: {e}") from None
    return AskTellState(history, asks, tuple(under_way.values()), cards, tuple(told), looked)
