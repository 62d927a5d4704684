"""A run as it happens: a live panel on a terminal, plain lines elsewhere. Both are observers."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from kagent_sandbox.data.verdict import Passed, Rejected
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kagent.runs.cost import Spent
from kagent.runs.events import (
    Answered,
    Asked,
    Called,
    CallFailed,
    Event,
    Finished,
    Phase,
    PhaseBegan,
    Progress,
    Proposed,
    Raced,
    Recorded,
    Started,
    Step,
    Withdrawn,
    Working,
)
from kagent.runs.lineage import Candidate, Operator, Proposal, roofline_share

_RECENT = 8  # verdicts that the panel shows
_BAR = 50  # characters
_LABEL, _GAP = 9, 2  # characters: of the longest label, and beside it
_FLYING = 6  # lines
_PLACE = 13  # characters of a verdict's line before the candidate's name


def speed_text(speed_up: float) -> str:
    """'1.234×', the speed-up over the best of torch; '–' where there is none (0)."""
    return f"{speed_up:.3f}×" if speed_up > 0 else "–"


def clock(seconds: float) -> str:
    """'1:05' or '1:02:03'."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def spent_text(spent: Spent, max_dollars: float | None = None) -> str:
    """'$0.41 of $2.00, 12 calls (1 failed), 61,204 tokens in, 9,518 out'."""
    dollars = f"${spent.dollars:.2f}" if spent.dollars or not spent.unpriced else ""
    if dollars and max_dollars is not None:
        dollars += f" of ${max_dollars:.2f}"
    if dollars and spent.unpriced:
        dollars += f" without {spent.unpriced} calls of unknown price"
    failed = f" ({spent.failed} failed)" if spent.failed else ""
    parts = [
        dollars,
        f"{spent.calls} calls{failed}",
        f"{spent.input_tokens:,} tokens in",
        f"{spent.output_tokens:,} out",
    ]
    return ", ".join(p for p in parts if p)


def first_line(verdict: Rejected) -> str:
    """The beginning of a rejection's message."""
    return (verdict.message.strip().splitlines() or [""])[0]


def outcome(candidate: Candidate, speed_up: float, *, promoted: bool = False) -> tuple[str, str]:
    """Describe a candidate's outcome in a few words, with a colour."""
    verdict = candidate.verdict
    if isinstance(verdict, Rejected):
        where = f" ({verdict.case})" if verdict.case else ""
        return f"{verdict.stage} {verdict.status}{where}: {first_line(verdict)}", "red"
    speed = speed_text(speed_up)
    speed += " after a few samples" if verdict.screened and not promoted else ""
    speed += ", disturbed" if verdict.notes else ""
    if promoted:
        return (
            f"{speed}, {roofline_share(verdict):.0%} of the roofline, new incumbent",
            "bold green",
        )
    if verdict.screened:
        return speed, "dim"
    if verdict.versus is not None:
        return f"{speed}, {verdict.versus.ratio:.3f}× the incumbent", "default"
    return speed, "default"


@dataclass(frozen=True, slots=True)
class InFlight:
    """An ask or a candidate on its way to a verdict."""

    name: str
    step: Step
    since_s: float  # of `time.monotonic`


class DisplayState:
    """The sum of the events so far. Both displays share it."""

    def __init__(self) -> None:
        self.started: Started | None = None
        self.began_s = time.monotonic()
        self.incumbent: Recorded | None = None
        self.promoted: dict[int, Recorded] = {}
        self.counted = 0
        self.first_counted: int | None = None  # of this session
        self.search_began_s: float | None = None
        self.rejected: Counter[str] = Counter()
        self.passed = 0
        self.in_flight: dict[tuple[str, int], InFlight] = {}  # asks, and candidates
        self.phase: PhaseBegan | None = None
        self.phase_began_s = self.began_s
        self.spent = Spent()
        self.note = ""
        self.names: dict[int, str] = {}

    def see(self, event: Event) -> None:
        """Take an event in."""
        match event:
            case Started():
                self.started = event
                for past in event.recorded:
                    self._count(past)
            case PhaseBegan():
                self.phase, self.phase_began_s, self.note = event, time.monotonic(), ""
            case Progress(text):
                self.note = text
            case Asked(ask, operator):
                self._enter("ask", ask, f"ask {ask} ({operator})", Step.PROPOSE)
            case Answered(ask, _):
                self.in_flight.pop(("ask", ask), None)
            case Called(_, spent):
                self.spent = spent
            case CallFailed(error, in_a_row):
                self.note = f"{error} ({in_a_row} in a row)"
            case Working(proposal_id, step):
                name = f"#{proposal_id} {self.names.get(proposal_id, '')}".rstrip()
                self._enter("candidate", proposal_id, name, step)
            case Proposed(proposal):
                self.names[proposal.id] = proposal.name
            case Withdrawn():
                self.note = withdrawn_text(event)
                self.incumbent = None if event.left is None else self.promoted.get(event.left)
            case Recorded():
                self._recorded(event)
            case Raced() | Finished():
                self.in_flight.clear()

    def _enter(self, kind: str, number: int, name: str, step: Step) -> None:
        self.in_flight[kind, number] = InFlight(name, step, time.monotonic())

    def _recorded(self, event: Recorded) -> None:
        candidate = event.candidate
        if self.search_began_s is None and candidate.counts:
            self.search_began_s = time.monotonic()
            self.first_counted = event.counted
        self.in_flight.pop(("candidate", candidate.id), None)
        self.note = ""
        self._count(event)

    def _count(self, event: Recorded) -> None:
        candidate = event.candidate
        self.counted = event.counted
        if event.promoted:
            self.incumbent = self.promoted[candidate.id] = event
        if isinstance(candidate.verdict, Rejected):
            self.rejected[candidate.verdict.stage.value] += 1
        else:
            self.passed += 1

    @property
    def budget(self) -> int:
        """Evaluations that the run may use."""
        return self.started.budget if self.started else 0

    def remaining_s(self) -> float | None:
        """Estimate of what is left, by the pace of this session's search, else by what phases are
        expected to take; None where neither is known.
        """
        if self.phase is None:
            return self._search_left_s()
        gone = time.monotonic() - self.phase_began_s
        left, searching = self.phase.expected_s, self.phase.phase is Phase.SEARCH
        left = None if left is None else max(0.0, left - gone)
        if searching and (by_pace := self._search_left_s()) is not None:
            left = by_pace
        if self.phase.most_s is not None:
            most = max(0.0, self.phase.most_s - gone)
            left = most if left is None else min(left, most)
        if left is None or (self.phase.later_s is None and not searching):
            return None
        return left + (self.phase.later_s or 0.0)

    def _search_left_s(self) -> float | None:
        if self.search_began_s is None or self.first_counted is None:
            return None
        done = self.counted - self.first_counted
        if done <= 0:
            return None
        return (time.monotonic() - self.search_began_s) / done * (self.budget - self.counted)

    def step_text(self) -> str:
        """'measuring baselines and ceilings, 0:12 of about 0:41'."""
        if self.phase is None:
            return self.note or "–"
        text = f"{self.phase.phase}, {clock(time.monotonic() - self.phase_began_s)}"
        if self.phase.expected_s is not None:
            text += f" of about {clock(self.phase.expected_s)}"
        return text

    def flight_lines(self) -> list[str]:
        """'#7 cpp_rows: build, 0:03': asks, then candidates, by number."""
        now = time.monotonic()
        flying = [f for _, f in sorted(self.in_flight.items())]
        lines = [f"{f.name}: {f.step.value}, {clock(now - f.since_s)}" for f in flying[:_FLYING]]
        more = len(flying) - _FLYING
        return [*lines, *([f"and {more} more"] if more > 0 else [])]

    def incumbent_text(self) -> Text:
        """The best so far, and how fast it is."""
        if self.incumbent is None or not isinstance(self.incumbent.candidate.verdict, Passed):
            return Text("none yet")
        best = self.incumbent.candidate
        text = Text(f"#{best.id} {best.proposal.name}", "bold")
        text.append(f"  {speed_text(self.incumbent.speed_up)} the best of torch", "green")
        return text.append(
            f", {roofline_share(self.incumbent.candidate.verdict):.0%} of the roofline", "default"
        )

    def rejected_text(self) -> str:
        """'3 build, 1 check'."""
        return ", ".join(f"{n} {stage}" for stage, n in self.rejected.items()) or "none"


def withdrawn_text(event: Withdrawn) -> str:
    """Describe a withdrawal: the candidate, the reason, and the new incumbent."""
    gone, verdict = event.withdrawal.id, event.withdrawal.verdict
    left = "none" if event.left is None else f"#{event.left}"
    told = " ".join(verdict.message.split())
    return (
        f"#{gone} is withdrawn: beside a candidate it was {verdict.status}: {told}; "
        f"the incumbent is {left}"
    )


def record_line(event: Recorded, budget: int | None) -> Text:
    """One line per verdict. `budget` is None where the run has no limit."""
    candidate = event.candidate
    proposal = candidate.proposal
    text, style = outcome(candidate, event.speed_up, promoted=event.promoted)
    number = str(event.counted) if budget is None else f"{event.counted}/{budget}"
    place = "seed" if proposal.operator is Operator.SEED else number
    line = Text(f"#{candidate.id:<3} {place:>6}  ")
    line.append(f"{proposal.name[:24]:<20} ", "cyan")
    line.append(text, style)
    if proposal.operator is not Operator.SEED:
        line.append(f"  {proposal.operator.value}: {_one_line(proposal)}", "dim")
    line.no_wrap = True
    line.overflow = "ellipsis"
    return line


def record_lines(event: Recorded, budget: int, width: int) -> Text:
    """`record_line` on a second line, too, where the first has no room for what changed."""
    line = record_line(event, budget)
    if line.cell_len <= width:
        return line
    head, rest = line.divide([_PLACE])
    room = max(width - _PLACE, 1)
    first, *others = rest.wrap(Console(width=room), room)
    second = Text(" ").join(others)
    second.truncate(room, overflow="ellipsis")
    return head.append_text(first).append("\n" + " " * _PLACE).append_text(second)


def _one_line(proposal: Proposal) -> str:
    """Hypothesis and, where one was made, prediction."""
    said = " ".join(proposal.hypothesis.split()) or "(no hypothesis)"
    return said if proposal.predicted is None else f"[{proposal.predicted:.2f}× predicted] {said}"


class PlainDisplay:
    """A line per event, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._state = DisplayState()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return

    def __call__(self, event: Event) -> None:
        """Show an event."""
        self._state.see(event)
        if isinstance(event, Recorded):
            line = record_line(event, self._state.budget)
            self._console.print(line, soft_wrap=True, crop=False)
        elif isinstance(event, PhaseBegan):
            last = "" if event.expected_s is None else f" (about {clock(event.expected_s)})"
            self._console.print(Text(f"{event.phase}{last}"), soft_wrap=True)
        elif isinstance(event, Progress):
            self._console.print(Text(event.text), soft_wrap=True)
        elif isinstance(event, Withdrawn):
            self._console.print(Text(withdrawn_text(event), "red"), soft_wrap=True)
        elif isinstance(event, CallFailed):
            self._console.print(Text(f"{event.error} ({event.in_a_row} in a row)"), soft_wrap=True)


class LiveDisplay:
    """A panel that stays at the bottom while the last verdicts scroll above it."""

    def __init__(self, console: Console, max_dollars: float | None = None) -> None:
        self._console = console
        self._max_dollars = max_dollars
        self._state = DisplayState()
        self._recent: list[Text] = []
        self._live = Live(
            console=console, get_renderable=self._render, refresh_per_second=5, transient=True
        )

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def __call__(self, event: Event) -> None:
        """Show an event."""
        self._state.see(event)
        if isinstance(event, Withdrawn):  # stays on the screen
            self._console.print(Text(withdrawn_text(event), "red"), soft_wrap=True)
        elif isinstance(event, Recorded):
            budget = self._state.budget
            if event.promoted or event.candidate.proposal.operator is Operator.SEED:
                line = record_lines(event, budget, self._console.width)  # stays on the screen
                self._console.print(line, no_wrap=True, overflow="ellipsis")
            else:
                self._recent = [*self._recent[-_RECENT + 1 :], record_line(event, budget)]

    def _render(self) -> RenderableType:
        state = self._state
        left = state.remaining_s()
        remaining = "" if left is None else f", about {clock(left)} remaining"
        flying = state.flight_lines()
        table = Table.grid(padding=(0, _GAP))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(no_wrap=True, overflow="ellipsis", max_width=self._room)
        table.add_row("step", Text(state.step_text()))
        if state.note and state.phase is not None:
            table.add_row("", Text(state.note, "dim"))
        for i, line in enumerate(flying):
            table.add_row("in flight" if i == 0 else "", Text(line))
        if state.started is not None:
            self._add_search(table)
        if state.spent.calls:
            table.add_row("spent", Text(spent_text(state.spent, self._max_dollars)))
        table.add_row("time", f"{clock(time.monotonic() - state.began_s)} elapsed{remaining}")
        return Group(*self._recent, Text(), table)

    @property
    def _room(self) -> int:
        """Characters beside the labels."""
        return max(1, self._console.width - _LABEL - _GAP)

    def _add_search(self, table: Table) -> None:
        """Rows about what was found so far."""
        state = self._state
        table.add_row("incumbent", state.incumbent_text())
        width = min(_BAR, self._room)
        bar = ProgressBar(total=max(state.budget, 1), completed=state.counted, width=width)
        table.add_row("", bar)
        table.add_row("evaluated", f"{state.counted} of {state.budget}")
        table.add_row("passed", f"{state.passed}, seeds included")
        table.add_row("rejected", state.rejected_text())


def display_for(console: Console, max_dollars: float | None = None) -> PlainDisplay | LiveDisplay:
    """Live on a terminal, plain elsewhere. `max_dollars`: shown beside what was spent."""
    return LiveDisplay(console, max_dollars) if console.is_terminal else PlainDisplay(console)
