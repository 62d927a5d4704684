"""A run as read from its log: every event replayed, in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kagent_sandbox.data.records import from_json
from kagent_sandbox.data.verdict import Verdict
from kagent_sandbox.errors import RunError

from kagent.runs.analyses import analyses_path, read_analyses
from kagent.runs.ask import AskRecord
from kagent.runs.cost import ModelCall, Spent
from kagent.runs.events import Stop
from kagent.runs.files import MEND
from kagent.runs.final_race import FinalRace
from kagent.runs.kernel_files import read_kernel
from kagent.runs.lineage import (
    FREE,
    Candidate,
    Facts,
    Lineage,
    Operator,
    Origin,
    Proposal,
    Withdrawal,
)
from kagent.runs.recalled import Recalled
from kagent.runs.stored_event import DAMAGE, StoredEvent, event_of
from kagent.runs.timed_configs import TimedConfig, TimedConfigs


@dataclass(frozen=True, slots=True)
class StoredProposal:
    """A proposal without its text, which is in kernels/."""

    id: int
    parents: tuple[int, ...]
    operator: Operator
    name: str
    kernel: str
    hypothesis: str
    predicted: float | None
    seen: int
    attempt: int
    ask: int | None = None
    origin: Origin | None = None
    fault: str = ""
    configs: int | None = None
    works: float | None = None


@dataclass(frozen=True, slots=True)
class StoredVerdict:
    """The verdict on a proposal, as an event stores it."""

    id: int
    verdict: Verdict
    facts: Facts | None
    withdrawals: tuple[Withdrawal, ...] = ()
    tuned: str = ""  # kernel id of the file with tuned constants, where it is another one
    unit: str = ""  # device that gave it, where the run has several


@dataclass(frozen=True)
class History:
    """A run as read from its log."""

    lineage: Lineage
    pending: tuple[Proposal, ...]  # accepted, without a verdict: the process ended in between
    asks: tuple[AskRecord, ...]  # open: neither answered nor dropped
    answered: Mapping[int, AskRecord]  # by candidate: what proposals without a verdict answer
    asked: int  # asks so far: the number of the next one
    budgets: tuple[int, ...]  # per session
    spent: Spent
    baselines: Mapping[str, Any] | None  # as measured at the last session's start
    race: FinalRace | None  # the last one
    stop: Stop | None  # why the last session ended; None if it was killed or goes on
    elapsed_s: float  # working time over all sessions, without asking and telling
    attempts: Mapping[int, int] = field(default_factory=dict)  # by ask: calls of a model for it
    recalled: Recalled | None = None  # what the run took from memory; None: it was not asked
    told: Mapping[int, int] = field(default_factory=dict)
    """Answers from outside to the same ask before it, by candidate that such an answer is."""
    timed_configs: Mapping[int, tuple[TimedConfig, ...]] = field(default_factory=dict)
    """Configurations that were timed before a candidate's verdict, by candidate."""
    events: tuple[StoredEvent, ...] = field(default=(), repr=False)  # then the analyses

    @property
    def waiting(self) -> int:
        """Evaluations that are charged and have no verdict: a session ended in between."""
        return sum(p.operator not in FREE for p in self.pending)

    @property
    def budget(self) -> int:
        """The budget of the last session, 0 before the first one."""
        return self.budgets[-1] if self.budgets else 0


def replay_events(folder: Path, run: str, events: Sequence[StoredEvent]) -> History:
    """Replay a run's log into its history.

    Args:
        folder: Of the run.
        run: Its id, by which its analyses are found.
        events: All of the log.

    Raises:
        RunError: An event, a kernel or an analysis is damaged.
    """
    proposals: dict[int, Proposal] = {}
    lineage = Lineage()
    asks: dict[int, AskRecord] = {}  # open
    every: dict[int, AskRecord] = {}
    asked = 0
    attempts: dict[int, int] = {}
    spent = Spent()
    budgets: list[int] = []
    race: FinalRace | None = None
    recalled: Recalled | None = None
    timed: dict[int, tuple[TimedConfig, ...]] = {}
    told: dict[int, int] = {}
    answers: Counter[int] = Counter()  # by ask
    baselines: Mapping[str, Any] | None = None
    stop: Stop | None = None
    for event in events:
        try:
            if event.kind == "session":
                budgets.append(_number(event.data["budget"]))
                stop = None
            elif event.kind == "proposed":
                proposal = _proposal(folder, from_json(StoredProposal, event.data))
                proposals[proposal.id] = proposal
                asks.pop(-1 if proposal.ask is None else proposal.ask, None)
            elif event.kind == "asked":
                ask = from_json(AskRecord, event.data)
                asks[ask.number] = every[ask.number] = ask
                asked = max(asked, ask.number + 1)
            elif event.kind == "dropped":
                asks.pop(_number(event.data["ask"]), None)
            elif event.kind in ("call", "tried"):
                call = from_json(ModelCall, event.data)
                spent = spent.and_call(call)
                if event.kind == "call":
                    attempts[call.ask] = max(attempts.get(call.ask, 0), call.attempt + 1)
            elif event.kind == "recorded":
                row = from_json(StoredVerdict, event.data)
                lineage.record(_candidate(folder, proposals.pop(row.id), row))
            elif event.kind == "told" and event.data["ask"] is not None:
                number = _number(event.data["ask"])
                told[_number(event.data["id"])] = answers[number]
                answers[number] += 1
            elif event.kind == "baselines":
                baselines = event.data
            elif event.kind == "race":
                race = from_json(FinalRace, event.data)
            elif event.kind == "recalled":
                recalled = from_json(Recalled, event.data)
            elif event.kind == "timed":
                configs = from_json(TimedConfigs, event.data)
                timed[configs.id] = configs.configs
            elif event.kind == "stopped":
                stop = Stop(event.data["stop"])
        except DAMAGE as e:
            raise RunError(
                f"{folder}/lineage.sqlite: event {event.seq} is damaged: {e}: {MEND}"
            ) from None
    pending = tuple(proposals[i] for i in sorted(proposals))
    return History(
        lineage=lineage,
        pending=pending,
        asks=tuple(asks.values()),
        answered={p.id: every[p.ask] for p in pending if p.ask in every},
        asked=asked,
        budgets=tuple(budgets),
        spent=spent,
        baselines=baselines,
        race=race,
        stop=stop,
        elapsed_s=_working_s(events),
        attempts=attempts,
        recalled=recalled,
        told=told,
        timed_configs=timed,
        events=(*events, *_analyses(folder, run, events[-1].seq if events else 0)),
    )


def _analyses(folder: Path, run: str, last: int) -> Iterator[StoredEvent]:
    """Analyses, as events that follow the log's last one."""
    rows = read_analyses(folder, run)
    for seq, (at, kind, data) in enumerate(rows, last + 1):
        try:
            yield event_of(seq, at, kind, data)
        except ValueError as e:
            raise RunError(f"{analyses_path(folder)}: damaged: {e}") from None


def _candidate(folder: Path, proposal: Proposal, row: StoredVerdict) -> Candidate:
    written = ""
    if row.tuned:
        written = proposal.kernel
        proposal = replace(proposal, source=read_kernel(folder, row.tuned))
    return Candidate(proposal, row.verdict, row.facts, row.withdrawals, written, row.unit)


def _proposal(folder: Path, row: StoredProposal) -> Proposal:
    source = read_kernel(folder, row.kernel)
    fields = {n: getattr(row, n) for n in StoredProposal.__dataclass_fields__ if n != "kernel"}
    proposal = Proposal(**fields, source=source)
    if any(not 0 <= parent < row.id for parent in row.parents):
        raise ValueError(f"candidate {row.id} cannot have the parents {row.parents}")
    return proposal


def _number(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"expected a number, got {value!r:.40}")
    return value


_BEFORE_SESSIONS = ("tried", "isolation")
"""Kinds of events that come before the session that they are part of, long after the one before."""


def _working_s(events: Iterable[StoredEvent]) -> float:
    """Seconds in sessions. Asking and telling (`opened`) are no part of one."""
    total = began = latest = 0.0
    inside = False
    for event in events:
        if event.kind in ("session", "opened", "stopped"):
            end = event.at if event.kind == "stopped" else latest  # a killed one has no end
            # Runs of earlier versions have times of the wall clock, which may have been set back.
            total += max(0.0, end - began) if inside else 0.0
            began, inside = event.at, event.kind == "session"
        if event.kind not in _BEFORE_SESSIONS:
            latest = event.at
    return total + (max(0.0, latest - began) if inside else 0.0)
