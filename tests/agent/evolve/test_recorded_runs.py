"""The runs that ship in runs/: readable, decided again alike, and repeatable without a model."""

import asyncio
import io
from pathlib import Path

import pytest
import rich.console
from kagent.config.settings import load_config
from kagent.evolve.proposers import recording
from kagent.evolve.replayed import RecordedProposer
from kagent.evolve.stored_run import setting_of
from kagent.export.import_rewrite import as_shipped
from kagent.export.winners import find_winner
from kagent.llm.reply import read_reply
from kagent.runs.lineage import Lineage, Operator, kernel_id
from kagent.runs.manifest import list_runs
from kagent.runs.store import RunStore, read_history
from kagent.search.select import select
from kagent.tasks import find_task
from kagent.ui.run_view import run_view
from kagent_sandbox.data.verdict import Passed, SpeedVerdict
from replaying import replay

RUNS = Path(__file__).parents[3] / "runs"
NAMES = ("cross_entropy-ask-tell", "softmax-ask-tell")


@pytest.fixture(scope="module", params=NAMES)
def run(request):
    return read_history(RUNS / request.param)


def test_they_are_all_that_ship():
    shipped = [p.name for p in list_runs(RUNS) if p.name in NAMES]
    assert sorted(shipped) == list(NAMES)


def test_at_least_twelve_prompts_were_answered_and_judged(run):
    store, history = run
    answered = [c for c in history.lineage if c.proposal.ask is not None]
    assert len({c.proposal.ask for c in answered}) >= 12
    assert all(c.proposal.origin.model == "ask/tell" for c in answered)
    assert history.pending == ()
    assert history.race.winner is not None
    assert store.manifest.environment["device"] == "NVIDIA H100 80GB HBM3"


def test_they_name_who_answered(run):
    store, history = run
    assert store.manifest.answered_by.startswith("language models")
    printed = io.StringIO()
    rich.console.Console(file=printed, width=200).print(run_view(store, history))
    assert f"answered by {store.manifest.answered_by}" in printed.getvalue()


def test_their_winners_can_be_exported_under_todays_tasks(run):
    """All that is decided without a GPU; the rest is a judgement of today's."""
    store, _ = run
    winner = find_winner(RUNS, store.folder.name)
    assert winner.versus_torch.verdict is SpeedVerdict.FASTER
    assert winner.task == find_task(store.manifest.task)
    assert "language models" in winner.origin.proposer
    as_shipped(winner.source)


def test_no_file_names_a_place_of_the_machine_that_made_it(run):
    store, _ = run
    for path in store.folder.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert not any(p in data for p in (b"/work/", b"/root/", b"/home/", b"/tmp/")), path


def test_what_was_asked_is_selected_again(run):
    store, history = run
    task = find_task(store.manifest.task)
    with RunStore.open(store.folder, write=False) as opened:
        setting = setting_of(opened, task)
    assert asyncio.run(replay(history, setting, None)) is None


def test_replies_read_as_the_kernels_that_were_judged(run):
    store, history = run
    entry = find_task(store.manifest.task).entry
    for candidate in history.lineage:
        proposal = candidate.proposal
        if proposal.ask is None:
            continue
        texts = store.folder.glob(f"replies/{proposal.ask:04}*.md")
        sources = [read_reply(t.read_text(), entry).source for t in texts]
        assert proposal.kernel in [kernel_id(s) for s in sources]


def test_the_same_proposals_and_measurements_give_the_same_lineage(run):
    """`--proposer replay:RUN`, with a machine that measures what was measured then."""
    store, history = run
    task = find_task(store.manifest.task)
    found = recording(load_config(runs=RUNS, proposer=f"replay:{store.folder.name}"), task.name)
    assert found.evaluations == history.lineage.counted
    proposer = RecordedProposer(found.name, found.history)
    with RunStore.open(store.folder, write=False) as opened:
        setting = setting_of(opened, task)
    again = Lineage(c for c in history.lineage if c.proposal.operator is Operator.SEED)
    seeds = len(again)
    for number in range(len(proposer)):
        ask = select(setting, again.as_of(len(again)), number)
        draft = asyncio.run(proposer.propose(ask))
        then = history.lineage[seeds + number]
        proposal = draft.proposal(ask, seeds + number)
        assert (proposal.source, proposal.parents) == (then.proposal.source, then.proposal.parents)
        again.record(type(then)(proposal, then.verdict, then.facts))
    assert [c.id for c in again.promotions] == [c.id for c in history.lineage.promotions]
    assert again.incumbent.id == history.race.winner


def test_the_winners_beat_torch_on_every_hidden_case(run):
    _, history = run
    race, winner = history.race.race, str(history.race.winner)
    assert all(not case.missing.keys() & {"eager", "compile"} for case in race.cases)
    for case in race.cases:
        ours = case.candidates[winner].kernel_us
        assert all(t.kernel_us > ours for t in case.baselines.values())
    assert isinstance(history.lineage[history.race.winner].verdict, Passed)
