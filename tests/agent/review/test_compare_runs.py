"""kagent diff and kagent top, on the recorded runs."""

import io
import json
import math
import shutil
from pathlib import Path

import pytest
from commands import run
from kagent.review import compare
from kagent.runs.store import read_history
from rich.console import Console
from simulated_evolution import stored_run
from synthetic_races import synthetic_final

RUNS = Path(__file__).parents[3] / "runs"


@pytest.fixture(scope="module")
def history():
    return read_history(RUNS / "softmax-ask-tell")[1]


def shown(view, width=150):
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(view)
    return console.file.getvalue()


def test_a_diff_has_source_ratios_and_compiled_code(history):
    lineage = history.lineage
    found = compare.diff_json(history, lineage[5], lineage[9])
    json.dumps(found, allow_nan=False)
    assert any(line.startswith("+LONG_WORDS") for line in found["diff"])
    cases = found["search"]["cases"]
    assert list(cases) == [t.case for t in lineage[5].verdict.timings]
    mean = math.prod(cases.values()) ** (1 / len(cases))
    assert mean == pytest.approx(found["search"]["ratio"], rel=1e-6)
    assert found["race"] is None
    gone = [k for k in found["kernels"] if k["after"] is None]
    assert gone
    assert all(k["before"] is not None for k in gone)
    text = shown(compare.diff_view(history, lineage[5], lineage[9], matrix=False))
    assert "#9 cuda_wide_accesses is 0.998× (95 %: 0.992–1.004) as fast as #5" in text
    assert " ms" not in text  # times of different moments do not compare
    lines = [line.strip() for line in text.removesuffix("\n").split("\n")]
    assert lines[-1]  # no empty line at the end
    assert ["", ""] not in [lines[i : i + 2] for i in range(len(lines))]


@pytest.mark.parametrize(("one", "other"), [(5, 9), (9, 14)])
def test_the_other_way_round_is_the_inverse(history, one, other):
    lineage = history.lineage
    forth = compare.searched(lineage, lineage[one], lineage[other])
    back = compare.searched(lineage, lineage[other], lineage[one])
    assert forth.ratio * back.ratio == pytest.approx(1.0)
    assert (forth.low is None) == ((one, other) == (9, 14))  # those two were never interleaved
    if forth.low is not None:
        assert forth.low * back.high == pytest.approx(1.0)


def test_a_diff_of_two_finalists_has_the_race_apart_from_the_search(tmp_path):
    history = read_history(stored_run(tmp_path, race=synthetic_final()))[1]
    pair = history.lineage[0], history.lineage[1]
    found = compare.diff_json(history, *pair)
    assert [c["verdict"] for c in found["race"]["cases"]] == ["FASTER", "SLOWER"]
    for case in found["race"]["cases"]:
        assert case["before_us"] / case["after_us"] == pytest.approx(case["ratio"])
    assert found["race"]["overall"]["verdict"] == "FASTER"
    text = shown(compare.diff_view(history, *pair, matrix=False))
    assert "cpp_wide is FASTER than #0 cpp_plain, 1.100× (95 %: 1.050–1.150)" in text
    assert text.index("in the final race") < text.index("in the search, on visible cases")


@pytest.fixture
def shipped(tmp_path):
    """The recorded runs, without those that somebody made here."""
    for folder in RUNS.glob("*-ask-tell"):
        shutil.copytree(folder, tmp_path / folder.name)
    return tmp_path


def test_top_ranks_what_was_raced_above_what_was_not(shipped):
    rows, unread = compare.top_rows(shipped, None, 5)
    assert not unread
    for task in {r["task"] for r in rows}:
        mine = [r for r in rows if r["task"] == task]
        assert len(mine) == 5
        raced = [r["final"] for r in mine if r["final"] is not None]
        assert raced == sorted(raced, reverse=True)
        assert all(r["final"] is None for r in mine[len(raced) :])
    best = next(r for r in rows if r["task"] == "softmax")
    assert (best["candidate"], round(best["final"], 3)) == (14, 1.582)
    assert "1.582×" in shown(compare.top_view(rows))


def test_top_names_the_device_and_the_run_at_80_columns(shipped):
    rows, _ = compare.top_rows(shipped, "softmax", 2)
    text = shown(compare.top_view([*rows, *({**r, "device": "another GPU"} for r in rows)]), 80)
    titles = [line for line in text.splitlines() if line.startswith("softmax on ")]
    assert titles == [f"softmax on {rows[0]['device']}", "softmax on another GPU"]
    assert text.count("softmax-ask-tell") == 4


def test_top_passes_over_damaged_runs_and_says_so(tmp_path, monkeypatch, capsys):
    shutil.copytree(RUNS / "softmax-ask-tell", tmp_path / "my runs" / "good")
    bad = tmp_path / "my runs" / "bad"
    bad.mkdir()
    (bad / "run.json").write_text("{")
    monkeypatch.chdir(tmp_path)
    found = run(monkeypatch, capsys, "top", "softmax", "--runs", "my runs", "--json")
    assert {r["run"] for r in json.loads(found.out)} == {"good"}
    told = "1 run cannot be read: kagent runs --runs 'my runs' says why"
    assert told in " ".join(found.err.split())
    none = run(monkeypatch, capsys, "top", "gelu", "--runs", "my runs")
    assert none.code == 0
    assert "no finished candidates of gelu" in none.out
    assert told in " ".join(none.err.split())
    (tmp_path / "my runs").rename(tmp_path / "runs")
    assert "cannot be read: kagent runs says why" in run(monkeypatch, capsys, "top").err
