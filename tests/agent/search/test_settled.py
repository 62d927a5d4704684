import asyncio
from dataclasses import replace

import pytest
from kagent.evolve.loop import Limits
from kagent.llm.proposer import ModelProposer
from kagent.runs.events import Stop
from kagent.runs.lineage import Lineage
from kagent.search.settled import nothing_to_gain
from kagent.search.tunables import read_tunables
from kagent.search.tuner import Tuner
from kagent_sandbox.data.verdict import Comparison
from simulated_evolution import SEEDS, evolution, setting
from simulated_landscape import toy_task
from synthetic_lineages import SEED, child


def test_a_tuned_run_ends_when_untried_constants_promise_nothing(tmp_path):
    search, store = evolution(
        tmp_path / "task",
        tmp_path / "runs",
        proposer=Tuner(),
        budget=500,
        seeds=SEEDS[:1],
        limits=Limits(early_stop=True),
    )
    with store:
        assert asyncio.run(search.run()) is Stop.SETTLED
    assert 8 <= search.lineage.counted < 23
    best = read_tunables(search.lineage.incumbent.proposal.source)
    assert best.current == (16, 3)


@pytest.mark.parametrize(
    ("share", "settled"), [(0.995, True), (1.04, True), (0.98, False), (1.27, False)]
)
def test_at_the_roofline_there_is_nothing_to_gain(tmp_path, share, settled):
    timings = tuple(replace(t, roofline_share=share) for t in SEED.verdict.timings)
    lineage = Lineage([replace(SEED, verdict=replace(SEED.verdict, timings=timings))])
    run = setting(toy_task(tmp_path), ModelProposer)
    assert nothing_to_gain(run, lineage) is settled


def test_where_intervals_reach_zero_no_gain_could_be_seen(tmp_path):
    versus = Comparison("0", 1.1, 0.0, 1.2, 0.9)
    lineage = Lineage([SEED, *(child(i, 100.0, versus=versus) for i in range(1, 12))])
    assert nothing_to_gain(setting(toy_task(tmp_path), Tuner), lineage) is True
