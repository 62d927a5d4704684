import dataclasses
import io
import json
import re
from pathlib import Path

import pytest
from commands import run
from kagent.asktell.views import best_text
from kagent.cli.evolve import exit_code
from kagent.evolve.session import Outcome
from kagent.review import page
from kagent.runs.events import Stop
from kagent.runs.lineage import Facts, Lineage, Operator, find_candidate
from kagent.runs.manifest import FORMAT
from kagent.runs.store import read_history
from kagent.ui import tables
from kagent.ui.candidate_view import candidate_view
from kagent.ui.end_of_run import end_of_run, next_flags, verdict
from kagent.ui.live import clock
from kagent.ui.run_view import exhausted_text, path_view, run_view, runs_json, runs_view
from kagent.ui.tables import candidate_labels
from kagent_sandbox.data.records import from_json, to_json
from kagent_sandbox.data.verdict import Rejected, Stage, Status
from kagent_sandbox.errors import UserError
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text
from simulated_evolution import stored_run
from synthetic_lineages import failure, with_compiler_output
from synthetic_races import synthetic_final

ANSWERED = Path(__file__).parents[3] / "runs" / "softmax-ask-tell"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return stored_run(tmp_path_factory.mktemp("stored"), race=synthetic_final())


def rendered(parts, width):
    console = Console(file=io.StringIO(), width=width, markup=False, highlight=False)
    for part in parts:
        console.print(part)
    return console.file.getvalue()


def test_a_run_shows_its_path_cases_rejections_and_race(folder, monkeypatch, capsys):
    shown = run(monkeypatch, capsys, "show", folder)
    assert shown.code == 0
    assert folder.name in shown.out
    assert f"12 evaluated in {clock(read_history(folder)[1].elapsed_s)}" in shown.out
    for words in ("path", "one of the task's own kernels", "rejected", "INCORRECT_NUMERICAL"):
        assert words in shown.out
    assert (
        "FASTER: #1 cpp_wide beside the best of torch that ran, 1.265× (95 %: 1.200–1.300)"
        in shown.out
    )
    assert "final race: #1, FASTER than torch, 1.265× (95 %: 1.200–1.300)" in shown.out
    assert "FASTER on 1 of 2 cases; SLOWER on float32 M=8 N=1024 (0.800×)" in shown.out


def test_a_run_as_json_is_complete_and_alone_on_stdout(folder, monkeypatch, capsys):
    shown = run(monkeypatch, capsys, "show", folder, "--json")
    data = json.loads(shown.out)
    assert data["run"] == folder.name
    assert len(data["candidates"]) == len(read_history(folder)[1].lineage)
    assert {c["outcome"] for c in data["candidates"]} == {"passed", "rejected"}
    assert "source" not in data["candidates"][0]["proposal"]
    assert data["race"]["winner"] == 1
    assert data["race"]["verdict"] == "FASTER"
    assert data["race"]["race"]["overall"]["1"][0]["verdict"] == "FASTER"
    verdicts = [r["verdict"] for c in data["race"]["race"]["cases"] for r in c["ratios"]]
    assert {"FASTER", "SLOWER"} <= set(verdicts)


def test_every_candidate_can_be_shown(folder, monkeypatch, capsys):
    store, history = read_history(folder)
    for candidate in history.lineage:
        text = rendered([candidate_view(store, history, candidate)], 80)
        assert candidate.proposal.name in text
        assert f"kernels/{candidate.proposal.kernel}.py" in text.replace("\n", "")
        if isinstance(candidate.verdict, Rejected):
            assert candidate.verdict.message in text
        else:
            assert "middle" in text
    seed = run(monkeypatch, capsys, "show", folder, 0).out
    assert "   2 import torch" in seed
    child = next(c for c in history.lineage if c.proposal.parents)
    data = json.loads(run(monkeypatch, capsys, "show", folder, child.id, "--json").out)
    assert data["proposal"]["source"] == child.proposal.source
    shown = run(monkeypatch, capsys, "show", folder, child.id).out
    assert f"--- #{child.proposal.parents[0]}" in shown


def test_what_disturbed_a_measurement_is_shown(folder):
    store, history = read_history(folder)
    found = next(c for c in history.lineage if not isinstance(c.verdict, Rejected))
    noted = dataclasses.replace(found.verdict, notes=("other programs used 1.2 cores",))
    candidate = dataclasses.replace(found, verdict=noted)
    assert "disturbed:" not in rendered([candidate_view(store, history, found)], 80)
    text = rendered([candidate_view(store, history, candidate)], 80)
    assert "disturbed: other programs used 1.2 cores" in text


def test_compilers_words_and_loops_are_kept_and_shown(folder):
    store, history = read_history(folder)
    candidate = with_compiler_output(history.lineage[0])
    again = from_json(Facts, json.loads(json.dumps(to_json(candidate.facts))))
    assert again == candidate.facts
    older = to_json(candidate.facts)
    del older["remarks"], older["loops"]
    assert from_json(Facts, older).loops == ()  # of a run before there were any
    text = rendered([candidate_view(store, history, candidate)], 150)
    assert "rows: ptxas: (C7511) wgmma" in text
    assert "rows at 0x40: 9 instructions" in text


def test_an_unknown_candidate_is_answered_with_the_range(folder, monkeypatch, capsys):
    shown = run(monkeypatch, capsys, "show", folder, 99)
    assert shown.code == 2
    assert "no candidate 99: the run has 0 to " in shown.err
    with pytest.raises(UserError, match="the run has none yet"):
        find_candidate(Lineage(), 0)


def test_runs_are_listed_beside_damaged_and_newer_ones(tmp_path, monkeypatch, capsys):
    folder = stored_run(tmp_path, budget=2)
    newer = tmp_path / "runs" / "newer"
    newer.mkdir()
    text = (folder / "run.json").read_text()
    (newer / "run.json").write_text(text.replace(f'"format": {FORMAT}', f'"format": {FORMAT + 1}'))
    damaged = tmp_path / "runs" / "damaged"
    damaged.mkdir()
    (damaged / "run.json").write_text("{")
    listed = run(monkeypatch, capsys, "runs", "--runs", tmp_path / "runs")
    assert listed.code == 0
    assert f"{folder.name}" in listed.out
    assert "2/2" in listed.out
    assert f"run format {FORMAT + 1}" in listed.out
    assert "update kagent to read it" in listed.out
    rows = json.loads(run(monkeypatch, capsys, "runs", "--runs", tmp_path / "runs", "--json").out)
    assert sorted("error" in row for row in rows) == [False, True, True]
    shown = run(monkeypatch, capsys, "show", "newer", "--runs", tmp_path / "runs")
    assert shown.code == 4
    assert f"run format {FORMAT + 1}" in shown.err


def test_a_run_that_is_answered_from_outside_has_no_budget():
    (row,) = (r for r in runs_json(ANSWERED.parent) if r["run"] == ANSWERED.name)
    assert row["budget"] is None
    line = next(x for x in rendered([runs_view([row])], 150).splitlines() if ANSWERED.name in x)
    assert f"{row['evaluated']}/" not in line
    store, history = read_history(ANSWERED)
    assert f">{row['evaluated']} in " in page.render(ANSWERED.name, store.manifest, history)


def outcome(folder, stop=None):
    _, history = read_history(folder)
    return Outcome(folder, stop or history.stop, history)


def test_what_memory_gave_is_wrapped_between_words(folder, monkeypatch):
    line = "from memory: " + "1.2345× " * 30
    monkeypatch.setattr("kagent.ui.end_of_run.recalled_text", lambda _: Text(line))
    console = Console(file=io.StringIO(), width=80)
    for part in end_of_run(outcome(folder), "toy", matrix=False, flags={}):
        console.print(part, soft_wrap=isinstance(part, Text))  # as `kagent evolve` does
    shown = console.file.getvalue()
    assert shown.count("1.2345×") == 30
    assert all(len(x) <= 80 for x in shown.splitlines() if "1.2345×" in x)


def test_the_end_of_a_run_fits_80_columns_and_says_what_next(folder):
    parts = end_of_run(outcome(folder), "toy", matrix=False, flags={"--runs": "my runs"})
    text = rendered(parts, 80)
    tables = [line for line in text.splitlines() if "winner:" not in line and "next:" not in line]
    assert all(cell_len(line) <= 80 for line in tables)
    for words in ("path", "final race, on hidden cases", "#1 cpp_wide", "SLOWER on", "eager"):
        assert words in text
    assert f"next:   kagent show {folder.name} 1 --runs 'my runs'" in text.replace("\n", " ")
    assert "resume:" not in text


def test_what_was_evaluated_adds_up(folder, monkeypatch, capsys):
    """Seeds are not charged to the budget, and are among those that passed or were rejected."""
    took = clock(read_history(folder)[1].elapsed_s)
    said = f"12 evaluated in {took}, 12 passed, 2 rejected (2 seeds included)"
    end = rendered(end_of_run(outcome(folder), "toy", matrix=False, flags={}), 200)
    for text in (end, run(monkeypatch, capsys, "show", folder).out):
        assert said in " ".join(text.split())


def test_a_baseline_that_did_not_run_is_no_baseline_that_was_beaten(folder):
    text = rendered(end_of_run(outcome(folder), "toy", matrix=False, flags={}), 120)
    assert "the best of torch that ran" in text
    assert "the best of eager and torch.compile" not in text
    assert "compile max-autotune did not run on 1 of 2 cases: this is no result against it" in text


def test_an_interrupted_run_says_how_to_go_on(folder):
    flags = next_flags(folder.parent, folder.parent)
    stop = type(outcome(folder).stop)("interrupted")
    text = rendered(end_of_run(outcome(folder, stop), "toy", matrix=False, flags=flags), 120)
    assert f"resume: kagent evolve toy --resume {folder.name}" in text
    assert "not raced" not in text


def test_a_run_that_was_not_raced_says_whose_figure_it_shows(folder):
    history = dataclasses.replace(outcome(folder).history, race=None)
    ended = Outcome(folder, Stop.INTERRUPTED, history)
    text = rendered(end_of_run(ended, "toy", matrix=False, flags={}), 120)
    assert re.search(r"not raced: \d\.\d{3}× is the search's estimate\n", text)


@pytest.mark.parametrize(
    ("proposer", "said"),
    [
        ("tune", "exhausted after 12 of 30 evaluations: the tuner has no untried value left in the "
         "TUNE of a kernel that passed. For more, begin another run: with a model (kagent evolve "
         "TASK --model NAME), or with a kernel that lists more tunables or values in TUNE"),
        ("replay:old", "exhausted after 12 of 30 evaluations: that is all that old has proposed"),
        ("mine", "exhausted after 12 of 30 evaluations: the proposer mine has proposed all"),
    ],
)  # fmt: skip
def test_an_exhausted_run_says_of_what_and_what_to_do(folder, proposer, said):
    ended = outcome(folder, Stop.EXHAUSTED)
    history = dataclasses.replace(ended.history, stop=Stop.EXHAUSTED, budgets=(30,))
    ended = dataclasses.replace(ended, history=history)
    text = exhausted_text(ended.history, proposer)
    assert said in text.plain
    store, _ = read_history(folder)
    lines = [*end_of_run(ended, "toy", matrix=False, flags={})]
    shown = run_view(store, history)
    for printed in (rendered(lines, 120), rendered([shown], 120)):
        assert "exhausted after 12 of 30 evaluations: " in printed


def test_a_run_of_duplicates_is_exhausted_by_them(folder):
    history = outcome(folder).history
    seed = history.lineage[0]
    rejected = Rejected(Stage.BUILD, Status.DUPLICATE, "the same as #0")
    proposal = dataclasses.replace(seed.proposal, parents=(0,), operator=Operator.TUNE)
    again = [
        dataclasses.replace(seed, proposal=dataclasses.replace(proposal, id=i), verdict=rejected)
        for i in range(1, 41)
    ]
    lineage = Lineage([seed, *again])
    repeats = dataclasses.replace(history, lineage=lineage)
    assert "the last 40 proposals were duplicates" in exhausted_text(repeats, "model").plain


def test_a_run_that_ended_before_anything_was_evaluated_says_so(folder):
    none = dataclasses.replace(outcome(folder).history, lineage=Lineage(), events=(), race=None)
    ended = Outcome(folder, Stop.INTERRUPTED, none)
    text = rendered(end_of_run(ended, "toy", matrix=False, flags={}), 120)
    assert "nothing was evaluated before the run ended" in text
    assert "no candidate passed" not in text


def test_a_race_that_everyone_lost_has_no_winner(folder):
    from dataclasses import replace

    from kagent.ui.end_of_run import race_view
    from kagent_sandbox.data.race import Race

    _, history = read_history(folder)
    labels = candidate_labels(history.lineage)
    nobody = replace(synthetic_final(), winner=None, race=Race((), {}, {}))
    text = rendered(race_view(nobody, history.lineage, matrix=False), 80)
    assert "every finalist failed" in text
    alone = replace(synthetic_final(), race=Race((), {"1": ()}))
    assert "without a baseline" in verdict(alone, labels).plain


def test_a_run_in_which_nothing_passed_can_be_shown():
    lineage = Lineage([failure(0, parents=())])
    assert lineage.incumbent is None
    assert path_view(lineage, lineage[0]).row_count == 1


def doubtful(final):
    """The same race with intervals that contain 1."""
    overall = {
        name: tuple(dataclasses.replace(c, ratio=0.8, low=0.6, high=1.1) for c in comparisons)
        for name, comparisons in final.race.overall.items()
    }
    return dataclasses.replace(final, race=dataclasses.replace(final.race, overall=overall))


def test_a_tie_is_no_win_anywhere(tmp_path, monkeypatch, capsys):
    folder = stored_run(tmp_path, race=doubtful(synthetic_final()))
    text = rendered(end_of_run(outcome(folder), "toy", matrix=False, flags={}), 120)
    assert "winner" not in text
    assert "chosen: " in text
    assert "fastest" not in text
    first = f"{folder}: TIE with torch, 0.800× (95 %: 0.600–1.100); 12 evaluated"
    assert first in " ".join(text.split())
    assert "TIE: #1 cpp_wide beside the best of torch that ran, 0.800×" in text
    one, *others = doubtful(synthetic_final()).race.cases
    noted = dataclasses.replace(one, notes=("other programs used 1.5 cores",))
    crowded = dataclasses.replace(synthetic_final().race, cases=(noted, *others))
    said = tables.headline(dataclasses.replace(synthetic_final(), race=crowded)).plain
    assert said == "FASTER than torch, 1.265× (95 %: 1.200–1.300); disturbed in 1 of 2 cases"
    shown = rendered([tables.race_table(crowded, matrix=False)], 120)
    assert "float32 M=8 N=1024 was disturbed: other programs used 1.5 cores" in shown
    told = best_text(read_history(folder)[1], folder).plain
    assert told.startswith("final race: #1 cpp_wide, TIE with torch, 0.800× (95 %: 0.600–1.100)\n")
    assert "winner" not in told
    rows = json.loads(run(monkeypatch, capsys, "runs", "--runs", folder.parent, "--json").out)
    assert [(r["verdict"], r["race_ratio"]) for r in rows] == [("TIE", 0.8)]
    top = json.loads(run(monkeypatch, capsys, "top", "--runs", folder.parent, "--json").out)
    assert {r["verdict"] for r in top if r["final"]} == {"TIE"}
    assert exit_code(outcome(folder)) == 3


def test_exit_codes_are_the_verdicts(folder):
    found = outcome(folder)
    assert exit_code(found) == 0
    assert exit_code(dataclasses.replace(found, stop=Stop.INTERRUPTED)) == 130
    empty = dataclasses.replace(found.history, lineage=Lineage(), race=None)
    for stop in (Stop.NO_SEED, Stop.TIME):  # time may be up before a seed has passed
        assert exit_code(dataclasses.replace(found, stop=stop, history=empty)) == 1
