"""Events of a run: one frozen dataclass per kind.

The core prints nothing. `evolve` calls an `Observer` with each event, from its own thread and in
order; an observer must return quickly and must not raise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from kagent.runs.cost import ModelCall, Spent
from kagent.runs.final_race import FinalRace
from kagent.runs.lineage import Candidate, Operator, Proposal, Withdrawal


class Step(StrEnum):
    """The step in progress for a proposal."""

    PROPOSE = "propose"
    WAIT = "wait"  # for a core or for the device
    BUILD = "build"
    CHECK = "check"
    MEASURE = "measure"


class Phase(StrEnum):
    """Phases of a session, in order. Some sessions leave phases out."""

    START = "starting builder and judge"
    BASELINES = "measuring baselines and ceilings"
    SEEDS = "evaluating seeds and waiting candidates"
    SEARCH = "searching"
    RACE = "final race"


class Stop(StrEnum):
    """The reason why a run ended."""

    BUDGET = "budget"
    """The budget is used up."""
    EXHAUSTED = "exhausted"
    """The proposer has nothing left that was not tried, or repeats what was."""
    TIME = "time"
    """The time that was given is over."""
    COST = "cost"
    """The next call of the model could cost more than is left of the money."""
    TOKENS = "tokens"
    """The next call of the model could take more than is left of the tokens."""
    GOAL = "goal"
    """The incumbent reached the share of the roofline that was asked for."""
    SETTLED = "nothing left to gain"
    """The incumbent is at the roofline, or what was not tried promises too little to be seen."""
    ANSWERED = "answered"
    """All answers that were given are judged; nothing was to be asked."""
    INTERRUPTED = "interrupted"
    """Ctrl-C or the like. The run can be resumed."""
    FAILED = "failed"
    """The machine or the disk did; the error says how. The run can be resumed."""
    NO_SEED = "no seed"
    """No seed passed, so that there is nothing to improve."""


@dataclass(frozen=True, slots=True)
class Started:
    """A run begins, or goes on: `recorded` are the verdicts of earlier sessions, in order."""

    run: str
    task: str
    budget: int
    recorded: tuple[Recorded, ...] = ()


@dataclass(frozen=True, slots=True)
class PhaseBegan:
    """A phase begins. Seconds are what it took before on this machine; None: not known."""

    phase: Phase
    expected_s: float | None = None
    later_s: float | None = None  # all phases after this one
    most_s: float | None = None  # limit of the phase


@dataclass(frozen=True, slots=True)
class Progress:
    """A long step before or after the search: baselines, ceilings, the final race."""

    text: str


@dataclass(frozen=True, slots=True)
class Asked:
    """An ask was put to the proposer."""

    ask: int
    operator: Operator


@dataclass(frozen=True, slots=True)
class Called:
    """A model's call is over; `spent` is what all calls of the run have cost by now."""

    call: ModelCall
    spent: Spent


@dataclass(frozen=True, slots=True)
class CallFailed:
    """A call gave nothing usable, for the `in_a_row`-th time."""

    error: str
    in_a_row: int


@dataclass(frozen=True, slots=True)
class Answered:
    """An ask is no longer open: accepted as a candidate, or dropped (None)."""

    ask: int
    proposal_id: int | None


@dataclass(frozen=True, slots=True)
class Working:
    """A proposal entered a step."""

    proposal_id: int
    step: Step


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The incumbent was found wrong, or failed, beside a candidate; `left` is held up instead."""

    withdrawal: Withdrawal
    left: int | None


@dataclass(frozen=True, slots=True)
class Proposed:
    """A proposal was accepted: it is no duplicate in text or syntax tree, and it is in the
    store.
    """

    proposal: Proposal


@dataclass(frozen=True, slots=True)
class Recorded:
    """A verdict was committed."""

    candidate: Candidate
    promoted: bool  # it is the new incumbent
    counted: int  # evaluations charged to the budget so far
    speed_up: float  # over the best of torch, as the lineage's comparisons have it; 0: rejected


@dataclass(frozen=True, slots=True)
class Raced:
    """The final race is over."""

    result: FinalRace


@dataclass(frozen=True, slots=True)
class Finished:
    """The run is over."""

    stop: Stop


Event: TypeAlias = (
    Started
    | PhaseBegan
    | Progress
    | Asked
    | Called
    | CallFailed
    | Answered
    | Working
    | Withdrawn
    | Proposed
    | Recorded
    | Raced
    | Finished
)
Observer: TypeAlias = Callable[[Event], None]


def progress_to(observe: Observer) -> Callable[[str], None]:
    """Return a function that tells an observer each line of progress that it is given."""
    return lambda text: observe(Progress(text))
