import io
import re
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from kagent.runs.final_race import FinalRace
from kagent.ui import tables
from kagent.ui.end_of_run import verdict
from kagent.ui.table import Column, TextTable
from kagent_sandbox.data.race import BEST_OF_TORCH, Race, Ratio
from kagent_sandbox.data.verdict import (
    Comparison,
    Passed,
    Rejected,
    SpeedVerdict,
    Stage,
    Status,
    speed_verdict,
)
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text
from synthetic_races import race_case, synthetic_race, timing


def rendered(part, width):
    console = Console(file=io.StringIO(), width=width, markup=False, highlight=False)
    console.print(part)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


@given(
    st.lists(st.tuples(st.integers(1, 30), st.booleans(), st.integers(0, 3)), min_size=1),
    st.integers(20, 120),
)
def test_a_grid_is_never_wider_than_the_terminal(columns, width):
    grid = TextTable([Column(f"c{i}", right, drop) for i, (_, right, drop) in enumerate(columns)])
    grid.add_row(*("x" * size for size, _, _ in columns))
    lines = rendered(grid, width)
    assert all(cell_len(line) <= width for line in lines)
    shown = grid.shown(width)
    kept = [columns[i][2] for i in range(len(columns)) if i in shown]
    gone = [columns[i][2] for i in range(len(columns)) if i not in shown]
    assert all(gone), "a column that may not be left out was"
    assert not gone or min(gone) >= max((k for k in kept if k), default=0)


def test_a_grid_leaves_out_columns_before_it_wraps_and_then_wraps_one():
    grid = TextTable(
        (Column("name"), Column("why", wrap=True), Column("more", drop=1), Column("n", right=True))
    )
    grid.add_row("kernel", "because of " + "many " * 12, "m" * 20, "1.5")
    assert "more" in rendered(grid, 120)[0]
    narrow = rendered(grid, 50)
    assert "more" not in narrow[0]
    assert narrow[2].endswith("1.5")
    assert len(narrow) == 4


def test_markup_in_a_name_is_only_text():
    grid = TextTable((Column("file"),))
    grid.add_row("[red]a[/red]")
    assert rendered(grid, 40)[2] == "[red]a[/red]"


def test_the_best_of_torch_of_a_case_is_its_fastest_baseline_of_torch():
    first, second = synthetic_race().cases
    assert first.fastest_of_torch == "compile"
    assert first.ratio("1", BEST_OF_TORCH).value == 2.0
    assert second.fastest_of_torch == "eager"
    assert second.ratio("1", BEST_OF_TORCH).value == 0.8
    assert first.ratio("1", "expert").value == 0.8
    assert first.ratio("1", "nobody") is None
    assert race_case("c", {"1": 5.0}, {"expert": 4.0}).ratio("1", BEST_OF_TORCH) is None


def test_no_verdict_where_a_way_of_torch_lacked_memory():
    lacking = race_case(
        "hidden_bench_1",
        {"1": 100.0, "0": 90.0},
        {"eager": 80.0},
        missing={"compile": "out of memory"},
        lacking=("compile",),
    )
    first, _ = synthetic_race().cases
    against = (Comparison("eager", 1.4, 1.3, 1.5, 1.0),)
    race = Race((first, lacking), {"1": against, "0": against})
    final = FinalRace((1, 0), 1, race)
    assert lacking.ratio("1", BEST_OF_TORCH) is None
    why = (
        "the best of torch is not known: memory of the device was not enough for compile on 1 of 2 "
        "cases"
    )
    assert tables.headline(final).plain == f"no verdict, {why}"
    assert verdict(final, {"1": "#1 rows"}).plain == f"\nno verdict on #1 rows: {why}"
    assert final.verdict is None


@given(low=st.floats(0.01, 100), width=st.floats(1, 100))
def test_one_rule_says_what_an_interval_means(low, width):
    high = low * width
    verdict = speed_verdict(low, high)
    assert (verdict is SpeedVerdict.FASTER) == (low > 1)
    assert (verdict is SpeedVerdict.SLOWER) == (high < 1)
    assert (verdict is SpeedVerdict.TIE) == (low <= 1 <= high)
    assert Ratio("a", "b", low, low, high).verdict is verdict
    assert Comparison("b", low, low, high, 0.5).verdict is verdict


def test_cases_are_told_by_their_verdict():
    race = synthetic_race()
    slower = race.cases_with("1", SpeedVerdict.SLOWER)
    assert [case.case for case, _ in slower] == ["hidden_bench_1"]
    assert tables.cases_with(race, "1", SpeedVerdict.SLOWER) == ["float32 M=8 N=1024 (0.800×)"]
    assert tables.cases_with(race, "0", SpeedVerdict.SLOWER) == ["float32 M=8 N=1024 (0.889×)"]
    assert tables.cases_with(race, "1", SpeedVerdict.TIE) == []


def test_a_race_at_80_columns_names_everyone_and_compares_every_case():
    labels = {"1": "#1 triton_online+triton_rows", "0": "#0 triton_rows"}
    lines = rendered(tables.race_table(synthetic_race(), matrix=False, labels=labels), 80)
    assert lines[0].split()[:2] == ["case", "kernel"]
    rows = [line for line in lines[2:] if line]
    assert len(rows) == 11
    assert "expert" in rows[0]
    assert "#1 triton_online+triton_rows" in rows[1]
    assert "2.000×" in rows[1]
    assert "1.667×" in rows[2]
    assert [r for r in rows if "0.800×" in r]
    assert rows[-1].startswith("compile max-autotune did not run on float32 M=8 N=1024: out of")
    wide = rendered(tables.race_table(synthetic_race(), matrix=False, labels=labels), 130)
    assert any("1.980–2.020" in line for line in wide)


def test_a_narrow_race_shortens_names_and_no_number():
    labels = {"1": "#1 triton_online+triton_rows", "0": "#0 triton_rows"}
    lines = rendered(tables.race_table(synthetic_race(), matrix=False, labels=labels), 50)
    assert lines[2].startswith("float32")
    assert any("2.000×" in line and "FASTER" in line for line in lines), lines
    assert not re.search(r"[0-9.]…", "\n".join(lines)), lines


def test_times_that_no_race_compared_have_no_ratio():
    passed = Passed((timing("small", 80.0), timing("large", 200.0)), (), 1.0, 0.0)
    lines = rendered(tables.measured_table({"rows": passed}, matrix=False, title="alone"), 80)
    assert lines[0] == "alone"
    assert lines[3].split() == ["rows", "small", "0.0800", "0.0792–0.0808", "100", "50%"]
    assert lines[4].split()[0] == "large"


def test_over_all_cases_the_best_of_torch_comes_first():
    lines = rendered(tables.overall_table(synthetic_race(), only="1", title="all"), 80)
    assert lines[0] == "all"
    assert "best of torch" in lines[3]
    assert "1.265×" in lines[3]
    assert len(lines) == 6


def test_ratios_are_coloured_only_beyond_their_interval():
    first, second = synthetic_race().cases
    assert tables.ratio_text(first.ratio("1", "eager")).style == "green"
    assert tables.ratio_text(second.ratio("1", "eager")).style == "red"
    assert tables.ratio_text(None) == Text("")


def doubt(case, candidate):
    """The case, with an interval about the candidate's ratio that reaches from 0.5 to 1.5."""
    ratios = [replace(r, low=0.5, high=1.5) if r.candidate == candidate else r for r in case.ratios]
    return replace(case, ratios=tuple(ratios))


def test_a_case_within_its_interval_is_a_tie():
    race = synthetic_race()
    won, lost = race.cases
    slow = "float32 M=8 N=1024 (0.800×)"
    assert tables.case_verdicts(race, "1") == f"FASTER on 1 of 2 cases; SLOWER on {slow}"
    assert tables.case_verdicts(replace(race, cases=(won,)), "1") == "FASTER on 1 of 1 cases"
    doubtful = replace(race, cases=(won, doubt(lost, "1")))
    assert tables.case_verdicts(doubtful, "1") == f"FASTER on 1 of 2 cases; TIE on {slow}"
    both = replace(race, cases=(lost, doubt(lost, "1")))
    expected = f"FASTER on 0 of 2 cases; TIE on {slow}; SLOWER on {slow}"
    assert tables.case_verdicts(both, "1") == expected


def test_the_first_failure_is_told_in_full_and_others_in_a_line_each():
    def wrong(case, error, status=Status.INCORRECT_NUMERICAL):
        numbers = f"result y: worst row is {error}, allowed 1 (torch's own 0.5; k = 2); "
        message = f"{numbers}worst element [3, 4]: expected 1, got {error}"
        return Rejected(Stage.CHECK, status, message, case)

    failed = (wrong("one", 7), wrong("two", 8), Rejected(Stage.CHECK, Status.TIMEOUT, "slow", "x"))
    lines = rendered(tables.failures_text("mine.py", failed), 120)
    assert lines[1].startswith("result y: worst row is 7, allowed 1 (torch's own 0.5")
    assert "two          result y: worst row is 8, allowed 1; expected 1, got 8" in lines[-3]
    assert "TIMEOUT: slow" in lines[-2]
    end = "mine.py: 3 cases failed: the first in full, 2 in the table"
    assert lines[-1].strip() == end
    assert "failed" not in rendered(tables.failures_text("mine.py", failed[:1]), 120)[-1]
