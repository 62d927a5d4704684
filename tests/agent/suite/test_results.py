"""Figures of suites, their page, and two suites beside each other: arithmetic on made results."""

import json
import math

import pytest
from kagent.suite import page
from kagent.suite.compare import Pair, SuitePair, pair_json, pair_up, pair_view
from kagent.suite.record import FailedStep, Settings, Suite, read_record, write_record
from kagent.suite.results import SuiteResults, figures, results_json
from kagent.suite.view import results_view
from kagent_sandbox.data.verdict import SpeedVerdict
from kagent_sandbox.errors import RunError
from rich.console import Console
from synthetic_suite import comparison, result, suite_of


def results_of(name, *found):
    groups = dict.fromkeys(r.problem.group for r in found if r.problem.group)
    by_group = tuple(figures(g, [r for r in found if r.problem.group == g]) for g in groups)
    return SuiteResults(name, suite_of(found), tuple(found), figures("", found), by_group)


FOUND = (
    result("level1/a", 4.0, 8.0),
    result("level1/b", 1.0, 2.0),
    result("level2/c", 0.5, 1.5),
    result("level2/d", step=FailedStep.SEARCH),
    result("level2/e"),
)


def text_of(parts):
    console = Console(width=200)
    with console.capture() as seen:
        for part in parts:
            console.print(part)
    return seen.get()


def test_figures_count_failures_and_leave_out_what_is_not_finished():
    found = results_of("s", *FOUND).all
    assert (found.problems, found.finished, found.correct) == (5, 4, 3)
    assert found.failed == {FailedStep.SEARCH: 1}
    assert list(found.verdicts.items()) == [
        (SpeedVerdict.FASTER, 1),
        (SpeedVerdict.TIE, 1),
        (SpeedVerdict.SLOWER, 1),
    ]
    torch, eager = found.beside["torch"], found.beside["eager"]
    assert torch.fast == {1.0: 0.25, 2.0: 0.25}  # exactly 1 is not more than 1
    assert eager.fast == {1.0: 0.75, 2.0: 0.25}
    assert (torch.problems, torch.mean) == (3, pytest.approx(2 ** (1 / 3)))
    assert eager.mean == pytest.approx(math.cbrt(24))
    assert found.beside["compile"].problems == 0
    assert found.beside["compile"].mean is None
    nothing = figures("", [result("e")])
    assert nothing.beside["torch"].fast == {1.0: None, 2.0: None}


def test_results_are_shown_and_printed_for_programs():
    results = results_of("s", *FOUND)
    text = text_of(results_view(results))
    for words in (
        "4 of 5 problems finished: 3 correct, 1 failed (1 search)",
        "budget 4 a problem, language cpp, proposals by tune, on A CPU",
        "level2/d: search: why",
        "not finished: 1; --resume goes on",
        "1.260× of 3",
    ):
        assert words in text, text
    data = json.loads(json.dumps(results_json(results), allow_nan=False))
    assert data["all"]["beside"]["eager"]["fast_p"] == {"1": 0.75, "2": 0.25}
    assert data["groups"]["level1"]["correct"] == 2
    assert [p["state"] for p in data["problems"]] == [*["correct"] * 3, "failed", "waiting"]
    assert data["problems"][0]["beside"]["torch"]["verdict"] == "FASTER"


def test_what_is_not_known_for_lack_of_memory_is_left_out_and_named():
    """The best of the ways that ran is no bar: the one that lacked memory may be the fastest."""
    lacking = result("level2/f", 1.0, 8.0, lacking=("compile max-autotune",))
    without = results_of("s", *FOUND).all
    results = results_of("s", *FOUND, lacking)
    torch, eager = (results.all.beside[o] for o in ("torch", "eager"))
    assert torch.fast == without.beside["torch"].fast
    assert torch.mean == without.beside["torch"].mean
    assert torch.unknown == ("level2/f",)
    assert eager.fast == {1.0: 0.8, 2.0: 0.4}  # it ran on every case
    assert eager.unknown == ()
    assert results.all.verdicts == without.verdicts
    unknown = (
        "Left out of fast_p and of the means, for the other lacked memory of the device: "
        "best of torch: 1 (level2/f); compile max-autotune: 1 (level2/f)"
    )
    note = "compile max-autotune did not run on 1 of 2 cases: it lacked memory of the device, so"
    for text in (text_of(results_view(results)), page.render(results)):
        assert unknown in text
        assert note in text
    data = results_json(results)
    assert data["all"]["beside"]["torch"]["unknown"] == ["level2/f"]
    assert data["problems"][-1]["lacking"] == {"compile max-autotune": 1}
    assert data["problems"][-1]["verdict"] is None


def test_the_page_has_every_problem_and_runs_nothing_of_its_names():
    results = results_of("s", *FOUND, result("<script>alert(1)</script>", 2.0))
    text = page.render(results)
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    for words in ("level1/a", "4.000×", "FASTER", "SLOWER", "level2/d", "waiting", "× eager"):
        assert words in text
    assert "× compile" not in text  # it ran nowhere
    assert page.render(results_of("empty", result("e"))).startswith("<!doctype html>")


def test_a_record_survives_and_a_newer_one_is_refused(tmp_path):
    suite = suite_of(FOUND)
    write_record(tmp_path, suite)
    assert read_record(tmp_path, Suite) == suite
    (tmp_path / "suite.json").write_text('{"format": 9}')
    with pytest.raises(RunError, match="written by a newer kagent"):
        read_record(tmp_path, Suite)
    (tmp_path / "suite.json").write_text("[]")
    with pytest.raises(RunError, match=r"suite\.json"):
        read_record(tmp_path, Suite)
    with pytest.raises(RunError, match="no suite there"):
        read_record(tmp_path / "none", Suite)


@pytest.mark.parametrize("out", ["/tmp/mine", "../mine", "a/../../mine", "a\0b"])
def test_names_in_a_record_lead_nowhere(tmp_path, out):
    """The folder of a problem's task is removed before an import, and runs are written to."""
    write_record(tmp_path, suite_of(FOUND))
    path = tmp_path / "suite.json"
    whole = json.loads(path.read_text())
    some = next(iter(whole["progress"]))
    for keys in (("problems", 0, "name"), ("progress", some, "task"), ("progress", some, "run")):
        changed = json.loads(path.read_text())
        place = changed
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = out
        path.write_text(json.dumps(changed))
        with pytest.raises(RunError, match="leads out of its folder"):
            read_record(tmp_path, Suite)
        path.write_text(json.dumps(whole))


def test_settings_are_options_of_a_run():
    from kagent.config.settings import load_config

    config = load_config(budget=3, lang="cpp", model="a=2,b", max_time="90s")
    settings = Settings.of(config)
    assert Settings.of(load_config(**settings.options)) == settings
    assert settings.max_time == 90.0


def test_what_the_machine_failed_at_is_tried_again():
    suite = suite_of(
        [result("a", 1.0), result("b", step=FailedStep.MACHINE), result("c", step=FailedStep.TASK)]
    )
    assert suite.left == ()
    assert isinstance(suite.again(), Suite)
    assert [p.name for p in suite.again().left] == ["b"]


BEFORE = (
    result("same", 1.0),
    result("solved", step=FailedStep.SEARCH),
    result("lost", 2.0),
    result("task", 1.0, digest="1"),
    result("device", 1.0, key="cpu 1"),
    result("open"),
    result("machine", step=FailedStep.MACHINE),
    result("gone", 1.0),
)
AFTER = (
    result("same", 4.0),
    result("solved", 3.0),
    result("lost", step=FailedStep.SEED),
    result("task", 1.0, digest="2"),
    result("device", 1.0, key="cpu 2"),
    result("open", 1.0),
    result("machine", 1.0),
    result("new", 1.0),
)


def test_only_the_same_problems_on_the_same_device_compare():
    found = pair_up(results_of("x", *BEFORE), results_of("y", *AFTER))
    assert [p.after.name for p in found.pairs] == ["same", "solved", "lost"]
    assert dict(found.excluded) == {
        "task": "its tasks differ",
        "device": "on cpu 1 and on cpu 2",
        "machine": "the machine failed",
        "open": "not finished in both",
        "gone": "not in y",
        "new": "not in x",
    }
    assert [f.correct for f in found.figures] == [2, 2]
    assert found.means == (1, 1.0, 4.0)  # over what both solved, not over what each did
    text = text_of(pair_view(found))
    assert "3 of 9 problems compare" in text
    assert "how much faster one winner is than the other, --race measures" in text
    assert "y beside x" not in text


def test_a_failure_is_of_the_device_of_its_suites_races():
    sides = (
        results_of("x", result("a", 1.0, key="cpu 1"), result("b", step=FailedStep.SEARCH)),
        results_of("y", result("a", 1.0, key="cpu 2"), result("b", 1.0, key="cpu 2")),
    )
    assert pair_up(*sides).pairs == ()


def test_races_of_two_winners_are_shown():
    pair = pair_up(results_of("x", *BEFORE[:3]), results_of("y", *AFTER[:3])).pairs
    raced = Pair(pair[0].before, pair[0].after, comparison("before", 1.5))
    same = Pair(pair[0].before, pair[0].after, None, "the same kernel")
    sides = results_of("x", *BEFORE[:3]), results_of("y", *AFTER[:3])
    found = SuitePair(*sides, (raced, same), ())
    text = text_of(pair_view(found))
    assert "raced now: 1 FASTER, 0 TIE, 0 SLOWER; geometric mean 1.500× of 1" in text
    assert "the same kernel" in text
    data = json.loads(json.dumps(pair_json(found), allow_nan=False))
    assert data["problems"][0]["race"]["verdict"] == "FASTER"
    assert data["before"]["all"]["correct"] == 2
