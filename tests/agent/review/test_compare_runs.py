"""kagent diff and kagent top, on the recorded runs."""

import io
import json
import shutil
from pathlib import Path

import pytest
from kagent.review import compare
from kagent.runs.store import read_history
from rich.console import Console

RUNS = Path(__file__).parents[3] / "runs"


@pytest.fixture(scope="module")
def lineage():
    return read_history(RUNS / "softmax-ask-tell")[1].lineage


def shown(view):
    console = Console(file=io.StringIO(), width=150, highlight=False)
    console.print(view)
    return console.file.getvalue()


def test_a_diff_has_source_times_and_compiled_code(lineage):
    found = compare.diff_json(lineage, lineage[5], lineage[9])
    json.dumps(found, allow_nan=False)
    assert any(line.startswith("+LONG_WORDS") for line in found["diff"])
    assert [c["case"] for c in found["cases"]] == [t.case for t in lineage[5].verdict.timings]
    product = 1.0
    for case in found["cases"]:
        product *= case["ratio"]
    assert product ** (1 / len(found["cases"])) == pytest.approx(found["speed_up"], rel=1e-6)
    gone = [k for k in found["kernels"] if k["after"] is None]
    assert gone
    assert all(k["before"] is not None for k in gone)
    text = shown(compare.diff_view(lineage, lineage[5], lineage[9], matrix=False))
    assert "#9 cuda_wide_accesses is 0.998×" in text


def test_the_other_way_round_is_the_inverse(lineage):
    forth = compare.diff_json(lineage, lineage[5], lineage[9])["speed_up"]
    back = compare.diff_json(lineage, lineage[9], lineage[5])["speed_up"]
    assert forth * back == pytest.approx(1.0)


@pytest.fixture
def shipped(tmp_path):
    """The recorded runs, without those that somebody made here."""
    for folder in RUNS.glob("*-ask-tell"):
        shutil.copytree(folder, tmp_path / folder.name)
    return tmp_path


def test_top_ranks_what_was_raced_above_what_was_not(shipped):
    rows = compare.top_rows(shipped, None, 5)
    for task in {r["task"] for r in rows}:
        mine = [r for r in rows if r["task"] == task]
        assert len(mine) == 5
        raced = [r["final"] for r in mine if r["final"] is not None]
        assert raced == sorted(raced, reverse=True)
        assert all(r["final"] is None for r in mine[len(raced) :])
    best = next(r for r in rows if r["task"] == "softmax")
    assert (best["candidate"], round(best["final"], 3)) == (14, 1.582)
    assert "1.582×" in shown(compare.top_view(rows))


def test_top_of_one_task_passes_over_damaged_runs(tmp_path):
    shutil.copytree(RUNS / "softmax-ask-tell", tmp_path / "good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "run.json").write_text("{")
    assert {r["run"] for r in compare.top_rows(tmp_path, "softmax", 3)} == {"good"}
    assert compare.top_rows(tmp_path, "gelu", 3) == []
