"""One run with several judges: who may judge, what is timed again, and what is kept."""

import asyncio
import math
from dataclasses import replace

import pytest
from kagent.evolve import loop
from kagent.evolve.admission import ComparedUnits, compare
from kagent.evolve.device_slot import DeviceSlot
from kagent.evolve.judge_pool import MOST_PER_JUDGE, JudgePool
from kagent.evolve.machine import Unit
from kagent.evolve.rematch import CHANCE, chance_against, wants_rematch, widened
from kagent.evolve.remembering import SeedText
from kagent.runs.lineage import Candidate, Lineage, Operator, Proposal, Withdrawal
from kagent_sandbox.data.records import from_json
from kagent_sandbox.data.verdict import Comparison, Passed, Rejected, SpeedVerdict, Stage, Status
from kagent_sandbox.errors import JudgeMoved, MachineError
from simulated_evolution import RandomProposer, evolution
from simulated_landscape import toy_source
from simulated_machine import FakeBuilder, FakeJudge, machine


class ManyAtOnce(RandomProposer):
    at_once = 8


def search(tmp_path, judges, budget=30, *, moves=False, **more):
    home, *others = judges
    opened = machine(FakeBuilder(0.004), home, jobs=4, others=others, moves=moves)
    evolved, store = evolution(
        tmp_path / "toy",
        tmp_path / "runs",
        proposer=ManyAtOnce(0.004),
        budget=budget,
        machine=opened,
        in_flight=12,
        **more,
    )
    asyncio.run(evolved.run())
    history = store.history()
    store.close()
    return history


def units(history):
    (event,) = [e for e in history.events if e.kind == "units"]
    return from_json(ComparedUnits, event.data)


def recorded(history):
    """Each candidate with the lineage before it."""
    lineage = Lineage()
    for number in range(len(history.lineage)):
        candidate = history.lineage.as_recorded(number)
        yield lineage, candidate
        lineage.record(candidate)


def test_several_judges_share_a_run_and_each_verdict_is_beside_the_incumbent_or_hopeless(tmp_path):
    judges = [FakeJudge(0.002), FakeJudge(0.01), FakeJudge(0.005)]
    history = search(tmp_path, judges, budget=60)
    assert history.lineage.counted == 60
    assert [c.id for c in history.lineage] == list(range(len(history.lineage)))
    assert all(j.compared == 1 for j in judges)
    assert all(len(j.measured) > 2 for j in judges)
    seen = set()
    for lineage, candidate in recorded(history):
        if isinstance(candidate.verdict, Passed):
            seen.add(candidate.unit)
            assert not wants_rematch(lineage, candidate.verdict)
    assert seen == {"unit 0", "unit 1", "unit 2"}
    assert [r.unit for r in history.race.repeats] == ["unit 1"]
    assert units(history).spread == pytest.approx(0.0)


def test_a_device_with_other_ratios_does_not_judge(tmp_path):
    judges = [FakeJudge(), FakeJudge(wide=1.05), FakeJudge(wide=1.01)]
    history = search(tmp_path, judges)
    first, second = units(history).others
    assert "on the first device" in first.why_not
    assert first.apart == pytest.approx(math.log(1.05), rel=0.01)
    assert (judges[1].measured, second.why_not) == ([], "")
    assert units(history).spread == pytest.approx(math.log(1.01), rel=0.01)
    widths = [
        math.log(c.verdict.versus.high / c.verdict.versus.low)
        for c in history.lineage
        if isinstance(c.verdict, Passed) and c.verdict.versus and c.proposal.ask is not None
    ]
    assert widths
    assert min(widths) > 3.9 * math.log(1.009)


def test_a_judge_that_fails_is_left_out_and_its_candidate_goes_to_another(tmp_path):
    said = []
    judges = [FakeJudge(0.004), FakeJudge(dies_after=2)]
    history = search(tmp_path, judges, observe=said.append)
    assert history.lineage.counted == 30
    assert any("unit 1 judges no more: the device has left" in str(e) for e in said)
    with pytest.raises(MachineError, match="has left"):
        search(tmp_path / "more", [FakeJudge(dies_after=6), FakeJudge(0.004)])


class Moving(FakeJudge):
    """A judge that is lost, and whose successor is on another device."""

    def __init__(self, after, wide):
        super().__init__(0.002)
        self._after, self._wide_then = after, wide

    def measure(self, *given, **named):
        if len(self.measured) == self._after:
            self._after = math.inf
            self.wide = self._wide_then
            raise JudgeMoved("the judge has moved", "unit 9")
        return super().measure(*given, **named)


@pytest.mark.parametrize("alone", [True, False])
def test_a_judge_on_another_device_goes_on_if_its_ratios_are_the_same(tmp_path, alone):
    said, moving = [], Moving(6, 1.01)
    judges = [moving] if alone else [moving, FakeJudge(0.002)]
    history = search(tmp_path, judges, moves=True, observe=said.append)
    assert history.lineage.counted == 30
    assert moving.compared == 2  # before and after
    assert any("unit 9 judges" in str(e) for e in said)
    found = [from_json(ComparedUnits, e.data) for e in history.events if e.kind == "units"][-1]
    assert [o.unit for o in found.others] == ["unit 9"]
    assert found.spread == pytest.approx(math.log(1.01), rel=0.01)
    if not alone:
        assert "unit 9" in {c.unit for c in history.lineage}


def test_a_judge_on_another_device_with_other_ratios_gives_no_more_verdicts(tmp_path):
    moving = Moving(6, 1.05)
    with pytest.raises(MachineError, match=r"the judge has moved.* on the first device"):
        search(tmp_path, [moving], moves=True)
    assert len(moving.measured) == 6
    other = Moving(2, 1.05)
    history = search(tmp_path / "more", [FakeJudge(0.004), other], moves=True)
    assert history.lineage.counted == 30
    assert len(other.measured) == 2


def test_a_judge_that_moves_before_anything_was_compared_ends_the_session(tmp_path):
    with pytest.raises(MachineError, match=r"the judge has moved.* nothing was compared"):
        search(tmp_path, [Moving(1, 1.0)], moves=True)


def test_one_seed_is_compared_beside_torch(tmp_path):
    only = (SeedText("cpp_plain", toy_source()),)
    history = search(tmp_path, [FakeJudge(), FakeJudge()], budget=4, seeds=only)
    assert units(history).others[0].why_not == ""


def test_no_more_is_asked_than_judges_keep_up_with(tmp_path, monkeypatch):
    waiting = []
    ask = loop.Evolution._ask

    def seen(self):
        waiting.append(sum(f.built is not None and not f.timed for f in self._evaluations))
        ask(self)

    monkeypatch.setattr(loop.Evolution, "_ask", seen)
    search(tmp_path, [FakeJudge(0.01)], budget=20)
    assert max(waiting) < loop.UNTIMED


def passed(against="", ratio=1.0, low=None, high=None, *, screened=False):
    versus = Comparison(against, ratio, low or ratio * 0.99, high or ratio * 1.01, 0.99)
    return Passed((), (), 1.0, 0.001, versus=versus if against else None, screened=screened)


def candidate(number, verdict):
    return Candidate(Proposal(number, (), Operator.TUNE, "k", f"{number}", ""), verdict)


def lineage_of(*verdicts):
    return Lineage(candidate(i, v) for i, v in enumerate(verdicts))


def test_two_places_that_come_free_at_once_are_both_taken():
    """One by whom others wait for, who goes first, and one by who waited for that."""

    async def main():
        pool = JudgePool(Unit("home", FakeJudge()), DeviceSlot(0, quiet=False))
        pool.add(Unit("other", FakeJudge()))
        taken, leave = [], asyncio.Event()

        async def hold(name, until, *, first=False):
            async with pool.take(first=first):
                taken.append(name)
                await until.wait()

        end = asyncio.Event()
        holders = [asyncio.create_task(hold(n, leave)) for n in range(2 * MOST_PER_JUDGE)]
        await asyncio.sleep(0)
        waiting = [asyncio.create_task(hold("usual", end))]
        waiting += [asyncio.create_task(hold("first", end, first=True))]
        await asyncio.sleep(0.01)
        assert len(taken) == 2 * MOST_PER_JUDGE
        leave.set()
        await asyncio.gather(*holders)
        await asyncio.sleep(0.01)
        assert taken[-2:] == ["first", "usual"]
        end.set()
        await asyncio.gather(*waiting)
        pool.close()

    asyncio.run(main())


def test_what_is_timed_again():
    lineage = lineage_of(passed(), passed("0", 1.10))
    assert lineage.incumbent.id == 1
    assert wants_rematch(lineage, passed("0", 1.11))
    assert wants_rematch(lineage, passed("0", 1.095))
    assert not wants_rematch(lineage, passed("0", 1.05))
    assert wants_rematch(lineage, passed("0", 1.05, 0.9, 1.2))  # too little is known
    assert not wants_rematch(lineage, passed("1", 1.3))
    assert not wants_rematch(lineage, passed("0", 0.9, screened=True))
    assert wants_rematch(lineage, passed())
    assert not wants_rematch(lineage, Rejected(Stage.CHECK, Status.TIMEOUT, "x"))
    assert not wants_rematch(Lineage(), passed())
    assert chance_against(lineage, passed("0", 1.10).versus) == pytest.approx(0.5)
    assert chance_against(lineage, passed("0", 1.05).versus) < CHANCE


def test_a_verdict_beside_a_withdrawn_incumbent_is_given_again():
    lineage = lineage_of(passed(), passed("0", 1.10))
    wrong = Withdrawal(1, Rejected(Stage.MEASURE, Status.INCORRECT_NUMERICAL, "x"))
    broken = candidate(2, Rejected(Stage.BUILD, Status.COMPILE_ERROR, "x"))
    lineage.record(replace(broken, withdrawals=(wrong,)))
    assert lineage.incumbent.id == 0
    assert wants_rematch(lineage, passed("1", 0.8, screened=True))


def test_intervals_widen_by_what_devices_differ_by():
    versus = Comparison("0", 1.02, 1.01, 1.03, 0.9999)
    wide = widened(versus, 0.02)
    assert wide.ratio == 1.02
    assert (versus.verdict, wide.verdict) == (SpeedVerdict.FASTER, SpeedVerdict.TIE)
    assert 0.8 < wide.p_faster < 0.95
    assert widened(versus, 0.0) is versus


def test_ratios_within_chance_admit():
    pair = ("0", "1")
    assert compare("b", {pair: (0.0, 0.01)}, {pair: (0.04, 0.01)}).why_not == ""
    assert "1.041× there" in compare("b", {pair: (0.0, 0.001)}, {pair: (0.04, 0.001)}).why_not
    assert compare("b", {pair: (0.0, 0.0)}, {}).why_not
    assert "known to 12.0% only" in compare("b", {pair: (0.0, 0.04)}, {pair: (0.0, 0.0)}).why_not
