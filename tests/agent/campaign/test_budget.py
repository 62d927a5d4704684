"""Where the next slice goes, and what runs give each other: pure, on made campaigns."""

import asyncio
from dataclasses import replace

import pytest
from kagent.campaign.budget import BudgetUsed, Next, gain_per_cost, gain_since, next_slice
from kagent.campaign.exchange import Migrant, accept, elite_of, finalists_of, offered
from kagent.campaign.record import Campaign, CampaignRun, Slice
from kagent.campaign.view import RunRow, Runs, spent_line
from kagent.runs.lineage import Operator
from kagent.runs.store import RunStore, read_history
from kagent.suite.problems import Form, Problem
from kagent.suite.record import FailedStep, Settings, read_record, write_record
from simulated_evolution import evolution, stored_run


def run(name, **more):
    return CampaignRun(name, f"/{name}", "cpu", 0, name, {}, **more)


def campaign(*runs, budget=20, max_time=None, max_cost=None, seconds=0.0):
    return Campaign(
        sources=("a",),
        settings=Settings(budget, "cpp", "tune", (), max_time),
        problems=tuple(Problem(r.name, Form.TASK, r.task) for r in runs),
        version="0",
        started="2026-01-01T00:00:00",
        devices=("cpu",),
        seeds=1,
        max_cost=max_cost,
        runs=runs,
        seconds=seconds,
    )


def spent(**evaluations):
    return {name: BudgetUsed(n) for name, n in evaluations.items()}


def took(gain, evaluations=5, seconds=10.0, dollars=0.0):
    return Slice(evaluations, seconds, dollars, gain)


def test_every_run_gets_a_first_slice_before_any_gets_a_second_one():
    made = campaign(run("a", last=took(9.0)), run("b"))
    assert next_slice(made, spent(a=5, b=0)) == Next(made.runs[1], 5, None, None)
    # What b is owed is not spent on a, however little is left.
    assert next_slice(campaign(run("a"), run("b"), budget=2), spent(a=1, b=0)).run.name == "b"


def test_the_next_slice_goes_where_the_last_one_gained_most_per_cost():
    made = campaign(run("a", last=took(0.2, 10)), run("b", last=took(0.15, 5)))
    assert next_slice(made, spent(a=5, b=5)).run.name == "b"
    still = campaign(run("a", last=took(0.0)), run("b", last=took(0.0)))
    assert next_slice(still, spent(a=7, b=5)).run.name == "b"  # of equals the one with the fewest
    over = campaign(run("a", last=took(0.2), over="exhausted"), run("b", last=took(0.0)))
    assert next_slice(over, spent(a=5, b=5)).run.name == "b"


def test_devices_are_used_at_once_and_what_is_being_spent_is_reserved():
    made = campaign(
        *(replace(run(name), device=device) for name, device in zip("abcd", "xxyy", strict=True)),
        budget=8,
        max_time=60.0,
        max_cost=4.0,
    )
    made = replace(made, devices=("x", "y"))
    none = spent(a=0, b=0, c=0, d=0)
    first = next_slice(made, none)
    assert (first.run.name, first.budget, first.max_time, first.max_cost) == ("a", 1, 30.0, 1.0)
    second = next_slice(made, none, None, [first])
    assert (second.run.name, second.max_cost) == ("c", 1.0)
    assert next_slice(made, none, None, [first, second]) is None
    third = next_slice(made, none, {"x": 2}, [first, second])
    assert (third.run.name, third.budget) == ("b", 1)
    # A slice that is being spent leaves the others the rest, however little it has used so far.
    last = campaign(run("a", last=took(1.0)), run("b", last=took(1.0)), budget=9)
    most = next_slice(last, spent(a=4, b=4), {"cpu": 2})
    assert next_slice(last, spent(a=4, b=4), {"cpu": 2}, [most]) is None


def test_a_slice_costs_the_largest_share_of_a_budget():
    made = campaign(run("a"), max_time=100.0, max_cost=1.0)
    assert gain_per_cost(made, took(0.1, 5, 10.0, 0.5)) == pytest.approx(0.2)
    assert gain_per_cost(made, took(0.1, 5, 50.0)) == pytest.approx(0.2)
    assert gain_per_cost(made, took(-0.1)) == 0.0


def test_no_budget_is_exceeded():
    two = (run("a", last=took(0.1)), run("b", last=took(0.1)))
    assert next_slice(campaign(*two), spent(a=12, b=8)) is None
    assert next_slice(campaign(*two), spent(a=12, b=6)).budget == 8
    # What waits for its verdict is charged already, and is judged when nothing else is left.
    waiting = {"a": BudgetUsed(12), "b": BudgetUsed(6, 2)}
    assert next_slice(campaign(*two), waiting) == Next(two[1], 8, None, None)
    assert next_slice(campaign(*two, max_time=60.0, seconds=60.0), spent(a=5, b=5)) is None
    paid = {"a": BudgetUsed(5, 0, 0.5), "b": BudgetUsed(5, 0, 0.5)}
    assert next_slice(campaign(*two, max_cost=1.0), paid) is None


def test_first_slices_share_time_and_money():
    made = campaign(run("a"), run("b"), max_time=60.0, max_cost=1.0)
    assert next_slice(made, spent(a=0, b=0)) == Next(made.runs[0], 5, 30.0, 0.5, shared=True)


def test_a_record_survives_and_tries_again_what_the_machine_failed_at(tmp_path):
    failed = run(
        "a", run="a-1", last=took(0.1), over="failed", step=FailedStep.MACHINE, reason="lost"
    )
    made = campaign(failed, run("b", over="failed", step=FailedStep.SEED, reason="none"))
    write_record(tmp_path, made)
    assert read_record(tmp_path, Campaign) == made
    a, b = made.resumed().runs
    assert (a.over, a.step, b.step) == ("", None, FailedStep.SEED)
    ended = campaign(run("a", over="time"), run("b", over="exhausted"))
    assert [r.over for r in ended.resumed().runs] == ["", "exhausted"]


def test_runs_give_each_other_kernels_to_judge_and_no_verdicts(tmp_path):
    few, many = stored_run(tmp_path / "few", 1), stored_run(tmp_path / "many", 12)
    poor, rich = read_history(few)[1], read_history(many)[1]
    best = rich.lineage.incumbent
    assert offered(rich, [("few", poor)]) == []
    (elite,) = offered(poor, [("many", rich)])
    assert (elite.run, elite.id, elite.source) == ("many", best.id, best.proposal.source)
    with RunStore.open(few) as store:
        accept(store, [elite])
        accept(store, [elite])  # the campaign was killed, and goes on: it is there once
    after = read_history(few)[1]
    assert len(after.lineage) == len(poor.lineage)
    (waiting,) = after.pending
    assert (waiting.operator, waiting.source) == (Operator.MIGRATE, elite.source)
    assert BudgetUsed.of(after).waiting == 1
    assert after.elapsed_s == pytest.approx(poor.elapsed_s)


def test_what_another_run_gave_is_no_gain(tmp_path):
    few, many = stored_run(tmp_path / "few", 1), stored_run(tmp_path / "many", 12)
    poor, rich = read_history(few)[1], read_history(many)[1]
    assert gain_since(rich, 0) > 0
    assert gain_since(rich, len(rich.lineage)) == 0
    with RunStore.open(few) as store:
        accept(store, offered(poor, [("many", rich)]))
    search, store = evolution(tmp_path / "few/task", tmp_path / "few/runs", budget=2)
    with store:
        asyncio.run(search.run())
    after = read_history(few)[1]
    assert after.lineage.incumbent.proposal.operator is Operator.MIGRATE
    assert gain_since(after, len(poor.lineage)) == 0


def test_finalists_of_all_runs_race_each_text_once(tmp_path):
    history = read_history(stored_run(tmp_path / "a", 12))[1]
    found = finalists_of([("a", history), ("b", history)])
    assert len({e.source for e in found}) == len(found)
    assert found[0].source == history.lineage.incumbent.proposal.source
    assert isinstance(elite_of("a", history, history.lineage.incumbent), Migrant)


def test_a_budget_that_was_lowered_below_what_was_used_says_so():
    rows = [RunRow(run("a"), evaluated=4), RunRow(run("b"), evaluated=2)]
    assert spent_line(campaign(budget=6), rows).startswith("6 of 6 evaluations, ")
    lowered = spent_line(campaign(budget=5), rows)
    assert lowered.startswith("6 evaluations (the budget is 5 now: no more are made), ")


def test_a_table_of_runs_has_costs_where_something_costs_and_says_who_is_at_work():
    free = Runs.of([RunRow(run("a")), RunRow(run("b"), at_work=True)])
    assert "cost" not in [c.header for c in free.columns]
    assert [cells[1] for cells in free.cells] == ["waiting", "at work"]
    priced = Runs.of([RunRow(run("a"), dollars=0.125), RunRow(run("b"))])
    place = [c.header for c in priced.columns].index("cost")
    assert [cells[place] for cells in priced.cells] == ["$0.12", "–"]
    assert {len(cells) for cells in (*free.cells, *priced.cells)} == {7, 8}
