import io
import re
from types import SimpleNamespace

import pytest
from kagent.runs.events import (
    Asked,
    Finished,
    Phase,
    PhaseBegan,
    Progress,
    Proposed,
    Recorded,
    Started,
    Step,
    Stop,
    Working,
)
from kagent.runs.lineage import Candidate, Operator, Proposal
from kagent.ui.live import (
    DisplayState,
    LiveDisplay,
    PlainDisplay,
    clock,
    display_for,
    outcome,
    record_lines,
)
from kagent_sandbox.data.verdict import Comparison, Rejected, Stage, Status
from rich.cells import cell_len
from rich.console import Console
from synthetic_lineages import passed


@pytest.fixture(autouse=True)
def _clock_stands_still(monkeypatch):
    monkeypatch.setattr("kagent.ui.live.time", SimpleNamespace(monotonic=lambda: 0.0))


def recorded(number, verdict, *, operator=Operator.TUNE, promoted=False, counted=0, speed_up=1.0):
    proposal = Proposal(number, (), operator, "cpp_rows", f"x = {number}", "BLOCK 1 → 2 " * 8)
    return Recorded(Candidate(proposal, verdict), promoted, counted, speed_up)


LONG = "element [0, 3] differs\nsecond line"
EVENTS = [
    Started("toy-1", "toy", 10),
    Progress("baselines"),
    Working(0, Step.BUILD),
    recorded(0, passed({"a": 90.0}), operator=Operator.SEED, promoted=True, speed_up=1.111),
    Working(1, Step.MEASURE),
    Working(2, Step.BUILD),
    recorded(1, Rejected(Stage.CHECK, Status.INCORRECT_NUMERICAL, LONG, "a"), counted=1),
    recorded(
        3,
        passed({"a": 80.0}, versus=Comparison("0", 1.125, 1.1, 1.2, 0.99)),
        promoted=True,
        counted=2,
        speed_up=1.25,
    ),
]


def test_what_earlier_sessions_found_is_shown_at_once():
    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=40)
    before = tuple(e for e in EVENTS if isinstance(e, Recorded))
    with LiveDisplay(console) as display:
        display(Started("toy-1", "toy", 10, before))
        panel = Console(file=io.StringIO(), width=100)
        panel.print(display._render())
    text = panel.file.getvalue()
    assert "#3 cpp_rows" in text
    assert "2 of 10" in text
    assert "2, seeds included" in text


def live(width):
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=40)
    with LiveDisplay(console) as display:
        for event in EVENTS:
            display(event)
        panel = Console(file=io.StringIO(), width=width)
        panel.print(display._render())
    return console.file.getvalue(), panel.file.getvalue()


def test_the_panel_says_where_a_run_stands():
    for width in (80, 100):
        screen, panel = live(width)
        assert "#3 cpp_rows  1.250× the best of torch, 50% of the roofline" in panel
        assert "2 of 10" in panel
        assert "1 check" in panel
        assert "in flight  #2: build, 0:00" in panel
        assert "remaining" in panel
        assert "INCORRECT_NUMERICAL (a): element [0, 3]" in panel
        assert "second line" not in panel
        assert "new incumbent" in screen
        assert all(cell_len(line) <= width for line in panel.splitlines())


def test_a_verdict_takes_one_line_at_80_columns():
    _, panel = live(80)
    assert sum("BLOCK" in line or "#1" in line for line in panel.splitlines()) == 1


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_what_stays_on_the_screen_has_what_changed(width):
    line = record_lines(EVENTS[-1], 10, width).plain
    first, second = line.split("\n")
    assert first.startswith("#3     2/10  cpp_rows")
    assert second.startswith(" " * 13)
    assert max(cell_len(first), cell_len(second)) <= width
    if width >= 80:
        assert "new incumbent" in " ".join(line.split())
        assert "tune: " in line
    wide = record_lines(EVENTS[-1], 10, 400).plain
    assert "\n" not in wide


def test_elsewhere_than_on_a_terminal_a_line_per_verdict():
    console = Console(file=io.StringIO(), width=40)
    with PlainDisplay(console) as display:
        for event in [*EVENTS, Finished(Stop.BUDGET)]:
            display(event)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[0] == "baselines"
    assert lines[1].startswith("#0     seed  cpp_rows             1.111×, 50% of the roofline, new")
    assert "#1     1/10  cpp_rows" in lines[2]
    assert "\x1b" not in console.file.getvalue()


def test_the_display_fits_the_console():
    assert isinstance(display_for(Console(file=io.StringIO())), PlainDisplay)
    assert isinstance(display_for(Console(file=io.StringIO(), force_terminal=True)), LiveDisplay)


def test_remaining_time_needs_two_verdicts():
    state = DisplayState()
    state.see(EVENTS[0])
    assert state.remaining_s() is None
    state.see(EVENTS[3])
    state.see(EVENTS[6])
    assert state.remaining_s() is None
    state.see(EVENTS[7])
    assert state.remaining_s() >= 0


def test_what_became_of_a_candidate_in_words():
    tied = passed({"a": 80.0}, versus=Comparison("0", 0.99, 0.9, 1.1, 0.4))
    assert outcome(recorded(1, tied).candidate, 1.2) == ("1.200×, 0.990× the incumbent", "default")
    screened = passed({"a": 300.0}, screened=True)
    assert outcome(recorded(1, screened).candidate, 0.3) == ("0.300× after a few samples", "dim")
    noisy = passed({"a": 300.0}, screened=True, notes=("disturbed",))
    said = outcome(recorded(1, noisy).candidate, 0.3)
    assert said == ("0.300× after a few samples, disturbed", "dim")
    noisy = passed({"a": 300.0}, notes=("disturbed",))
    assert outcome(recorded(1, noisy).candidate, 0.3)[0] == "0.300×, disturbed"
    assert clock(65) == "1:05"
    assert clock(3723) == "1:02:03"


def test_names_of_proposals_are_text_not_markup():
    console = Console(file=io.StringIO(), width=80)
    with PlainDisplay(console) as display:
        display(Started("r", "t", 1))
        display(Progress("[bold]baseline[/bold]"))
        display(Proposed(EVENTS[3].candidate.proposal))
    assert console.file.getvalue() == "[bold]baseline[/bold]\n"


def panel_of(display):
    panel = Console(file=io.StringIO(), width=100)
    panel.print(display._render())
    return panel.file.getvalue()


def test_a_narrow_terminal_shortens_what_is_said_and_no_label():
    _, panel = live(40)
    for label in ("in flight", "incumbent", "evaluated", "passed", "rejected", "time"):
        assert re.search(rf"^{label} +\S", panel, re.MULTILINE), panel
    assert max(map(len, panel.splitlines())) <= 40


def test_the_panel_says_from_the_first_moment_what_is_being_done():
    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=40)
    with LiveDisplay(console) as display:
        display(Progress("asking tiny at localhost for one word"))
        assert "step  asking tiny at localhost for one word" in panel_of(display)
        display(PhaseBegan(Phase.START, 8.0, 300.0))
        display(Progress("timing a kernel against itself"))
        said = panel_of(display)
        assert "step  starting builder and judge, 0:00 of about 0:08" in said
        assert "timing a kernel against itself" in said
        assert "0:00 elapsed, about 5:0" in said
        assert "incumbent" not in said
        display(EVENTS[0])
        display(PhaseBegan(Phase.SEARCH, None, 60.0, 120.0))
        display(Asked(7, Operator.REWRITE))
        said = panel_of(display)
        assert "ask 7 (rewrite): propose, 0:00" in said
        assert "timing a kernel" not in said
        assert "about 3:00 remaining" in said


def test_what_is_in_flight_is_listed_and_the_rest_counted():
    state = DisplayState()
    for number in range(9):
        state.see(Working(number, Step.BUILD))
    lines = state.flight_lines()
    assert lines[0] == "#0: build, 0:00"
    assert lines[-1] == "and 3 more"
    state = DisplayState()
    state.see(Working(11, Step.BUILD))
    state.see(Working(2, Step.MEASURE))
    state.see(Asked(14, Operator.REWRITE))
    assert [line.split(":")[0] for line in state.flight_lines()] == [
        "ask 14 (rewrite)",
        "#2",
        "#11",
    ]
