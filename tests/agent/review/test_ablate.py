"""What bought what: edits taken back, on the tests' simulated landscape."""

import asyncio
import math
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kagent.review import ablate
from kagent.review.ablation_view import ranked
from kagent.review.plots import ablation_plot
from kagent.runs.lineage import Operator
from kagent.runs.store import RunStore, read_history
from kagent_sandbox.errors import RunError
from simulated_evolution import SEEDS, evolution
from simulated_landscape import case_times, toy_source
from simulated_machine import machine

RUNS = Path(__file__).parents[3] / "runs"
texts = st.lists(st.sampled_from("abc"), max_size=8).map(lambda ls: "".join(f"{x}\n" for x in ls))


@given(texts, texts)
def test_a_merge_with_one_changed_side_is_that_side(base, changed):
    assert ablate.merged(base, base, changed) == changed
    assert ablate.merged(base, changed, base) == changed


def test_edits_of_one_line_conflict():
    assert ablate.merged("a\nb\nc\n", "a\nx\nc\n", "a\ny\nc\n") is None
    assert ablate.merged("a\nb\nc\nd\n", "x\nb\nc\nd\n", "a\nb\nc\ny\n") == "x\nb\nc\ny\n"


STEPS = (
    ("wider", {"x": 16}),
    ("deeper", {"x": 16, "y": 3}),
    ("a comment", {"x": 16, "y": 3, "extra": "\n\nNOTE = 1"}),
)


class Scripted:
    """Proposes one step after the other, whatever it is asked."""

    name = "scripted"
    operators = (Operator.STRUCTURE,)
    at_once = 1
    resamples = 1

    def __init__(self):
        self.left = list(STEPS)

    async def propose(self, ask):
        from kagent.runs.ask import Draft

        if not self.left:
            return None
        text, values = self.left.pop(0)
        parent = ask.parent
        return Draft((parent.id,), Operator.STRUCTURE, "cpp_plain", toy_source(**values), text)


@pytest.fixture
def run(tmp_path):
    """A run whose incumbent came by the steps, one on another."""
    search, store = evolution(
        tmp_path / "task", tmp_path / "runs", proposer=Scripted(), budget=3, seeds=SEEDS[:1],
        in_flight=1, machine=machine(jobs=1),
    )  # fmt: skip
    with store:
        asyncio.run(search.run())
        yield store


def worth(contribution):
    return round(contribution.ratio, 2) if contribution.ratio is not None else None


def test_each_edit_is_worth_what_the_landscape_says(run):
    lineage = run.history().lineage
    winner = lineage.incumbent
    found = ablate.Ablator(machine(), lineage, lambda text: None).run(winner, "toy")
    by_label = {c.label.partition(":")[2].strip() or c.label: c for c in found.contributions}
    assert worth(by_label[ablate.CONTROL]) == 1.0
    path = lineage.path(winner.id)
    assert len(path) >= 3

    def ratio(without, having):
        a, b = case_times(without), case_times(having)
        return math.exp(sum(math.log(a[c] / b[c]) for c in a) / len(a))

    deeper = by_label["deeper"]
    assert deeper.in_place
    without = toy_source(x=16, extra="\n\nNOTE = 1") if "NOTE" in winner.proposal.source else (
        toy_source(x=16)
    )  # fmt: skip
    assert worth(deeper) == round(ratio(without, winner.proposal.source), 2) > 1.0
    tunables = {c.label: c for c in found.contributions if c.step is None}
    assert set(tunables) == {ablate.CONTROL, "X = 16 instead of 1", "Y = 3 instead of 1"}
    assert tunables["X = 16 instead of 1"].ratio > 1.2
    assert ranked(found)[0].label == ablate.CONTROL


def test_it_is_stored_and_reported(run):
    lineage = run.history().lineage
    found = ablate.Ablator(machine(), lineage, lambda text: None).run(lineage.incumbent, "toy")
    run.append("ablated", ablate.to_event(found))
    history = run.history()
    assert ablate.stored_ablation(history) == found
    assert len(ablation_plot(history).groups[0].rows) == len(found.contributions)


def test_a_step_that_later_ones_changed_is_timed_where_it_was_made():
    _, history = read_history(RUNS / "softmax-ask-tell")
    lineage = history.lineage
    found = ablate.reverts(lineage, lineage[14])
    assert [r.step for r in found] == [None, 5, 9, 14]
    by_step = {r.step: r for r in found}
    assert by_step[5].source is None  # a rewrite, on which all later steps build
    assert by_step[14].source == lineage[9].proposal.source

    asked = []

    class Judge:
        def check(self, built):
            return ()

        def measure(self, built, errors, incumbent=None, against="", *, choice=None):
            from dataclasses import replace

            from kagent_sandbox.data.verdict import Comparison

            asked.append((built.source_hash, incumbent.source_hash, against))
            return replace(lineage[1].verdict, versus=Comparison(against, 0.5, 0.4, 0.8, 0.0, {}))

    toy = machine(judge=Judge())
    worths = ablate.Ablator(toy, lineage, lambda text: None).run(lineage[14], "toy").contributions
    rewrite = next(c for c in worths if c.step == 5)
    assert not rewrite.in_place
    assert (rewrite.ratio, rewrite.low, rewrite.high) == (2.0, 1.25, 2.5)
    assert ("5" in {a for _, _, a in asked}) == (rewrite.ratio is not None)


def test_a_winner_that_no_longer_builds_is_an_error(run):
    lineage = run.history().lineage
    winner = lineage.incumbent

    class Broken:
        def build(self, request):
            from kagent_sandbox.data.verdict import Rejected, Stage, Status

            return Rejected(Stage.BUILD, Status.COMPILE_ERROR, "another compiler")

    with pytest.raises(RunError, match=f"candidate {winner.id} no longer builds"):
        ablate.Ablator(machine(builder=Broken()), lineage, lambda text: None).run(winner, "toy")


def test_a_report_shows_it(tmp_path):
    from kagent.review.page import render

    folder = tmp_path / "run"
    shutil.copytree(RUNS / "softmax-ask-tell", folder)
    part = ablate.Contribution("#14 structure: <b>one row</b>", 14, True, 1.2, 1.1, 1.3)
    with RunStore.open(folder) as store:
        store.append("ablated", ablate.to_event(ablate.Ablation(14, "toy", (part,))))
        text = render("run", store.manifest, store.history())
    assert "1.200×" in text
    assert "&lt;b&gt;one row" in text
    assert "taken from the kernel" in text  # who need not have won anything
