import asyncio
import io
from dataclasses import replace

import pytest
from kagent.evolve.loop import Limits
from kagent.evolve.remembering import SeedText
from kagent.runs.ask import AskRecord
from kagent.runs.events import (
    Finished,
    Phase,
    PhaseBegan,
    Progress,
    Recorded,
    Started,
    Stop,
    Withdrawn,
)
from kagent.runs.lineage import Lineage, Operator
from kagent.search.tuner import Tuner
from kagent.ui.live import PlainDisplay
from kagent_sandbox.data.verdict import IncumbentWrong, Passed, Rejected, Stage, Status
from kagent_sandbox.errors import DeviceError, RunError, TaskError
from replaying import replay
from rich.console import Console
from simulated_evolution import SEEDS, RandomProposer, evolution, setting
from simulated_landscape import toy_source, toy_task
from simulated_machine import FakeBuilder, FakeJudge, machine


def run(tmp_path, name, **options):
    search, store = evolution(tmp_path / "task", tmp_path / name, **options)
    with store:
        stop = asyncio.run(search.run())
        return search.lineage, stop, store.history()


def decisions(lineage):
    return [(c.proposal, c.verdict) for c in lineage]


def test_budget_counts_evaluated_proposals(tmp_path):
    lineage, stop, history = run(tmp_path, "runs", budget=25)
    assert stop is Stop.BUDGET
    assert lineage.counted == 25
    assert [c.proposal.operator for c in lineage.seeds] == [Operator.SEED] * 2
    assert decisions(history.lineage) == decisions(lineage)
    assert history.pending == ()
    assert history.stop is Stop.BUDGET


def test_it_improves(tmp_path):
    lineage, _, _ = run(tmp_path, "runs", budget=40)
    assert lineage.incumbent.score > 1.2 * lineage[0].score


def test_order_of_work_does_not_matter(tmp_path):
    """Random delays in proposing and building, another number of builders: the same run."""
    slow = machine(FakeBuilder(delay_s=0.02, seed=1), FakeJudge(0.002), jobs=3)
    one, _, _ = run(tmp_path, "a")
    two, _, _ = run(tmp_path, "b", machine=slow, proposer=RandomProposer(0.02, seed=7))
    assert decisions(one) == decisions(two)


def test_another_seed_is_another_run(tmp_path):
    one, _, _ = run(tmp_path, "a")
    two, _, _ = run(tmp_path, "b", seed=1)
    assert decisions(one) != decisions(two)


def test_resuming_continues_the_run(tmp_path):
    whole, _, _ = run(tmp_path, "whole", budget=30)
    for budget in (0, 7, 19, 30):
        lineage, _, history = run(tmp_path, "parts", budget=budget)
        assert lineage.counted == budget
    # The temperature falls over the budget, so that only the first part must be the same run.
    assert [c.id for c in history.lineage] == list(range(len(lineage)))
    assert history.budgets[0] == 0
    assert len(history.budgets) == 4
    assert decisions(whole)[:2] == decisions(lineage)[:2]


def test_cancelling_keeps_all_that_was_recorded(tmp_path):
    whole, _, _ = run(tmp_path, "whole")

    async def cancel_at(count):
        recorded = []

        def observe(event):
            if isinstance(event, Recorded):
                recorded.append(event.candidate)
                if len(recorded) == count:
                    task.cancel()

        search, store = evolution(tmp_path / "task", tmp_path / "cut", observe=observe)
        with store:
            task = asyncio.create_task(search.run())
            with pytest.raises(asyncio.CancelledError):
                await task
            assert store.history().stop is Stop.INTERRUPTED
            return decisions(store.history().lineage)

    for count in (1, 5, 11):
        assert asyncio.run(cancel_at(count))
    lineage, stop, _ = run(tmp_path, "cut")
    assert stop is Stop.BUDGET
    assert decisions(lineage) == decisions(whole)


def test_a_second_cancellation_leaves_a_run_that_has_ended(tmp_path):
    """`kagent runs` said "not ended" of a run that had said "interrupted" on a second signal."""

    async def cancel_twice():
        events = []

        def observe(event):
            events.append(event)
            if isinstance(event, Recorded) or (
                isinstance(event, Progress) and event.text.startswith("stopping")
            ):
                task.cancel()

        search, store = evolution(tmp_path / "task", tmp_path / "cut", observe=observe)
        with store:
            task = asyncio.create_task(search.run())
            with pytest.raises(asyncio.CancelledError):
                await task
            assert isinstance(events[-1], Finished)
            assert store.history().stop is Stop.INTERRUPTED

    asyncio.run(cancel_twice())


def test_events_arrive_in_order(tmp_path):
    events = []
    lineage, _, _ = run(tmp_path, "runs", observe=events.append)
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Finished)
    assert [e.candidate for e in events if isinstance(e, Recorded)] == list(lineage)


def test_a_candidate_is_timed_against_the_incumbent_of_its_moment(tmp_path):
    lineage, _, _ = run(tmp_path, "runs")
    for candidate in lineage:
        if isinstance(candidate.verdict, Passed) and candidate.id:
            before = lineage.as_of(candidate.id).incumbent
            assert candidate.verdict.versus.against == str(before.id)


def test_duplicates_are_free_and_end_the_run_when_nothing_else_comes(tmp_path):
    class Stubborn(RandomProposer):
        async def propose(self, ask):
            draft = await super().propose(ask)
            return type(draft)(draft.parents, draft.operator, "x", SEEDS[0].source, "again")

    lineage, stop, _ = run(tmp_path, "runs", proposer=Stubborn(), budget=5)
    assert stop is Stop.EXHAUSTED
    assert lineage.counted == 0
    assert all(c.is_duplicate for c in list(lineage)[2:])


def test_the_same_machine_code_is_not_judged_twice(tmp_path):
    class Renamer(RandomProposer):
        async def propose(self, ask):
            draft = await super().propose(ask)
            source = SEEDS[0].source + f"\n\ndef unused_{ask.id}():\n    pass\n"
            return type(draft)(draft.parents, draft.operator, "x", source, "renamed")

    judge = FakeJudge()
    lineage, _, _ = run(
        tmp_path, "runs", proposer=Renamer(), budget=5, machine=machine(judge=judge)
    )
    assert len(judge.measured) == 2
    assert "machine code as candidate 0" in lineage[2].verdict.message


def test_nothing_left_to_propose_ends_the_run(tmp_path):
    class Short(RandomProposer):
        async def propose(self, ask):
            return await super().propose(ask) if ask.id < 7 else None

    lineage, stop, _ = run(tmp_path, "runs", proposer=Short())
    assert stop is Stop.EXHAUSTED
    assert len(lineage) == 9


def test_without_a_seed_that_passes_there_is_nothing_to_improve(tmp_path):
    from simulated_evolution import SeedText
    from simulated_landscape import toy_source

    broken = (SeedText("cpp_a", toy_source(extra="BROKEN = 1")),)
    lineage, stop, _ = run(tmp_path, "runs", seeds=broken)
    assert stop is Stop.NO_SEED
    assert isinstance(lineage[0].verdict, Rejected)


def test_time_is_up(tmp_path):
    lineage, stop, _ = run(tmp_path, "runs", limits=Limits(seconds=1e-9))
    assert stop is Stop.TIME
    assert lineage.counted == 0


def test_a_broken_machine_ends_the_run_and_is_nobodys_verdict(tmp_path):
    class Dying(FakeJudge):
        def measure(self, *arguments, **more):
            if len(self.measured) == 6:
                raise DeviceError("the device fell off the bus")
            return super().measure(*arguments, **more)

    search, store = evolution(tmp_path / "t", tmp_path / "runs", machine=machine(judge=Dying()))
    with store:
        with pytest.raises(DeviceError):
            asyncio.run(search.run())
        history = store.history()
    assert history.stop is Stop.FAILED
    assert sum(isinstance(c.verdict, Passed) for c in history.lineage) == 6
    lineage, stop, _ = run(tmp_path, "runs")
    assert stop is Stop.BUDGET
    assert lineage.counted == 30


def test_an_incumbent_that_no_longer_builds_is_an_error(tmp_path):
    run(tmp_path, "runs", budget=3)

    class Moved(FakeBuilder):
        def build(self, request):
            return Rejected(Stage.BUILD, Status.COMPILE_ERROR, "no compiler")

    with pytest.raises(RunError, match="no longer builds: no compiler"):
        run(tmp_path, "runs", machine=machine(Moved()))


class Unmasking(FakeJudge):
    """The first incumbent that is no seed is wrong when a second candidate is timed beside it."""

    def __init__(self):
        super().__init__()
        self.beside = {}
        self.wrong = None

    def measure(self, built, errors, incumbent=None, against="", *, choice=None):
        count = self.beside[against] = self.beside.get(against, 0) + 1
        if against and int(against) >= len(SEEDS) and count > 1 and self.wrong in (None, against):
            self.wrong = against
            found = Rejected(Stage.MEASURE, Status.INCORRECT_NUMERICAL, "wrong where it was timed")
            raise IncumbentWrong(against, found)
        return super().measure(built, errors, incumbent, against, choice=choice)


def test_an_incumbent_that_is_wrong_is_withdrawn_and_the_run_goes_on(tmp_path):
    events, judge = [], Unmasking()
    lineage, stop, history = run(
        tmp_path, "runs", machine=machine(judge=judge), observe=events.append
    )
    assert stop is Stop.BUDGET
    (withdrawn,) = [e for e in events if isinstance(e, Withdrawn)]
    gone = withdrawn.withdrawal.id
    assert str(gone) == judge.wrong
    assert isinstance(lineage[gone].verdict, Rejected)
    (by,) = [c for c in lineage if c.withdrawals]
    assert by.verdict.versus.against == str(withdrawn.left)
    assert gone not in [c.id for c in lineage.promotions]
    assert lineage.incumbent is not None
    # Stored, it leads to the same decisions.
    assert [c.id for c in history.lineage.promotions] == [c.id for c in lineage.promotions]
    toy = setting(toy_task(tmp_path / "task"), RandomProposer())
    assert asyncio.run(replay(history, toy, RandomProposer())) is None


def test_repairs_follow_failures(tmp_path):
    lineage, _, _ = run(tmp_path, "runs")
    repairs = [c for c in lineage if c.proposal.operator is Operator.REPAIR]
    assert repairs
    for repair in repairs:
        assert isinstance(lineage[repair.proposal.parents[0]].verdict, Rejected)
    assert len({r.proposal.parents for r in repairs}) == len(repairs)


def test_the_final_race_is_run_once_and_stored(tmp_path):
    judge, screen = FakeJudge(), io.StringIO()
    shown = PlainDisplay(Console(file=screen, width=200))
    told = {"machine": machine(judge=judge), "observe": shown}
    lineage, _, history = run(tmp_path, "runs", budget=20, **told)
    assert judge.races == 1
    assert screen.getvalue().count("final race") == 1  # and its table follows
    assert history.race.winner == lineage.incumbent.id
    run(tmp_path, "runs", budget=20, machine=machine(judge=judge))
    assert judge.races == 1
    lineage, _, history = run(tmp_path, "runs", budget=40, machine=machine(judge=judge))
    assert history.race.finalists[0] == lineage.incumbent.id


@pytest.mark.parametrize(("error", "waits"), [(DeviceError, True), (TaskError, False)])
def test_a_fault_of_the_task_in_the_race_is_all_that_is_said(tmp_path, monkeypatch, error, waits):
    """It said that the run would stop, which nobody had asked for."""
    judge, screen = FakeJudge(), io.StringIO()

    def fails(*_, **__):
        raise error("eager: case hidden_bench_0: ValueError")

    monkeypatch.setattr(judge, "race", fails)
    told = {"machine": machine(judge=judge), "observe": PlainDisplay(Console(file=screen))}
    with pytest.raises(error):
        run(tmp_path, "runs", budget=2, **told)
    assert ("stopping once the step in progress is over" in screen.getvalue()) == waits


def test_finalists_are_built_side_by_side_before_anything_races(tmp_path):
    builder, judge = FakeBuilder(delay_s=1.0), FakeJudge()

    def watch(event):
        if isinstance(event, PhaseBegan) and event.phase is Phase.RACE:
            builder.most_at_once = 0

    equal = [SeedText(f"cpp_{i}", toy_source(extra=f"Z = {i}")) for i in range(2)]
    quiet = machine(builder, judge, quiet=True)
    _, _, history = run(tmp_path, "runs", budget=0, seeds=equal, machine=quiet, observe=watch)
    assert len(history.race.finalists) == 2
    assert builder.most_at_once == 2  # its places


def test_stored_measurements_replay_to_the_same_decisions(tmp_path):
    for budget, proposer in ((9, RandomProposer()), (20, RandomProposer(0.01))):
        _, _, history = run(tmp_path, "runs", budget=budget, proposer=proposer)
    toy = setting(toy_task(tmp_path / "task"), proposer)
    assert asyncio.run(replay(history, toy, proposer)) is None

    divergence = asyncio.run(replay(history, replace(toy, seed=1), proposer))
    assert isinstance(divergence.then, AskRecord)  # it already selects otherwise
    assert divergence.now != divergence.then


def test_another_measurement_would_have_led_elsewhere(tmp_path):
    proposer = Tuner()
    _, _, history = run(tmp_path, "runs", budget=30, proposer=proposer)
    toy = setting(toy_task(tmp_path / "task"), proposer)
    assert asyncio.run(replay(history, toy, proposer)) is None
    changed = Lineage()
    for candidate in history.lineage:
        verdict = candidate.verdict
        if candidate.id == 1:
            verdict = replace(verdict, versus=replace(verdict.versus, ratio=0.01, cases={}))
        changed.record(replace(candidate, verdict=verdict))
    assert asyncio.run(replay(replace(history, lineage=changed), toy, proposer)) is not None
