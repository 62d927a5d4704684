"""Runs whose proposals come from (scripted) models, on the simulated landscape."""

import asyncio
import itertools
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kagent.evolve import ask_queue
from kagent.evolve.loop import Limits
from kagent.evolve.replayed import RecordedProposer as Repeater
from kagent.llm.chat import ModelError, Reply
from kagent.llm.model_config import ModelConfig, Prices
from kagent.llm.proposer import Model, ModelProposer
from kagent.llm.spend_limit import CallBound, SpendLimit
from kagent.runs.ask import CapReached, Prompt
from kagent.runs.cost import ModelCall, Spent
from kagent.runs.events import CallFailed, Proposed, Recorded, Stop
from kagent.runs.kernel_files import read_kernel
from kagent.runs.lineage import Operator, roofline_share
from kagent.search.tunables import read_tunables
from kagent.ui import run_view
from kagent_sandbox.data.verdict import Status
from replaying import replay
from simulated_evolution import evolution, setting
from simulated_landscape import case_times, toy_source, toy_task
from simulated_machine import FakeJudge, machine

PRICES = Prices(input=1.0, output=10.0)


class Script:
    """Answers like a model: `answer(number)` gives a text, an error, or (seconds, text)."""

    def __init__(self, answer):
        self.answer = answer
        self.calls = 0
        self.at_once = self.most_at_once = 0

    async def complete(self, prompt):
        number, self.calls = self.calls, self.calls + 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            said = self.answer(number)
            seconds, said = said if isinstance(said, tuple) else (0.0, said)
            await asyncio.sleep(seconds)
        finally:
            self.at_once -= 1
        if isinstance(said, Exception):
            raise said
        return Reply(said, "script", False, 20, 500, 0.005, 20.0)

    async def close(self):
        pass


def reply(source, hypothesis="wider is faster", predicted="1.10×"):
    return f"Hypothesis: {hypothesis}\nPredicted speed-up: {predicted}\n\n```python\n{source}```\n"


def kernels(number):
    widths, depths = (1, 2, 4, 8, 16, 32), (1, 2, 3, 4)
    x, y = list(itertools.product(widths, depths))[(7 * number + 5) % 24]
    return reply(toy_source(x, y, extra=f"Z = {number}"))


def made(script, store, *, spent=None, at_once=4, prices=PRICES, **caps):
    config = ModelConfig("script", "http://127.0.0.1:1/v1", prices=prices, reply_tokens=1000)
    spend_limit = SpendLimit(spent or Spent(), **caps)
    return ModelProposer(
        [Model(config, script)],
        lambda ask: Prompt("system", f"ask {ask.id}: {ask.operator} of {ask.parent.id}", "c"),
        store.call,
        spend_limit,
        lambda event: None,
        at_once=at_once,
    )


@pytest.fixture(autouse=True)
def waits(monkeypatch):
    """Calls that failed are made again at once; the seconds after which they would be."""
    asked, real = [], ask_queue.first_new

    async def soon(proposer, ask, known, attempts, after_s=0.0):
        if after_s:
            asked.append(after_s)
        return await real(proposer, ask, known, attempts, after_s and 0.001)

    monkeypatch.setattr(ask_queue, "first_new", soon)
    return asked


def stop_at(count):
    """What Ctrl-C does once candidate `count` has its verdict."""

    def observe(event):
        if isinstance(event, Recorded) and event.candidate.id == count:
            raise KeyboardInterrupt

    return observe


def run(
    tmp_path, answer, name="runs", *, observe=None, limits=None, budget=12, in_flight=6, **more
):
    script = Script(answer)
    seen = []

    def watch(event):
        seen.append(event)
        if observe is not None:
            observe(event)

    class Late:
        """The proposer, made once the store is there."""

        operators = ModelProposer.operators
        name, resamples, at_once = "model", 2, more.pop("at_once", 4)

        async def propose(self, ask):
            return await self.inner.propose(ask)

    late = Late()
    build = more.pop("machine", None)
    search, store = evolution(
        tmp_path / "task",
        tmp_path / name,
        proposer=late,
        budget=budget,
        in_flight=in_flight,
        observe=watch,
        limits=limits,
        **({"machine": build} if build else {}),
    )
    late.inner = made(script, store, spent=store.history().spent, at_once=late.at_once, **more)
    with store:
        try:
            stop = asyncio.run(search.run())
        except ModelError as e:
            stop = e
        return stop, store.history(), script, seen, store


def test_replies_become_candidates_and_all_of_it_is_stored(tmp_path):
    # the first four are long enough in flight for all of them to be
    stop, history, script, _, store = run(tmp_path, lambda n: (1.0 if n < 4 else 0.02, kernels(n)))
    assert stop is Stop.BUDGET
    assert history.lineage.counted == 12
    answered = [c for c in history.lineage if c.proposal.origin is not None]
    assert answered
    for candidate in answered:
        proposal = candidate.proposal
        assert proposal.hypothesis == "wider is faster"
        assert proposal.predicted == 1.10
        assert proposal.origin.model == "script"
        assert proposal.origin.card == "c"
        text = store.text_path("prompts", proposal.ask, proposal.attempt).read_text()
        assert f"ask {proposal.ask}: " in text
        assert "system" in text
        assert (
            proposal.source
            in store.text_path("replies", proposal.ask, proposal.attempt).read_text()
        )
    assert history.spent.calls == script.calls
    assert history.spent.dollars == pytest.approx(0.005 * script.calls)
    assert history.spent.input_tokens == 20 * script.calls
    assert script.most_at_once == 4


def test_a_slow_reply_holds_up_nobody(tmp_path):
    """The first call never ends before the run does: all others are evaluated meanwhile."""
    order = []

    def answer(number):
        return (2.0, kernels(99)) if number == 0 else kernels(number)

    _, history, _, seen, _ = run(tmp_path, answer, budget=10, observe=order.append)
    first = next(c for c in history.lineage if c.proposal.ask == 0)
    assert first.id == len(history.lineage) - 1
    assert [e.candidate.id for e in seen if isinstance(e, Recorded)] == list(
        range(len(history.lineage))
    )


def test_what_was_decided_is_decided_again(tmp_path):
    def answer(number):
        return (
            0.001 * (number * 7 % 5),
            reply("BROKEN = 1\n" + toy_source(extra=f"Z = {number}"))
            if number % 3 == 0
            else kernels(number),
        )

    _, history, _, _, _ = run(tmp_path, answer, budget=20)
    toy = setting(toy_task(tmp_path / "task"), ModelProposer, in_flight=6)
    assert asyncio.run(replay(history, toy, None)) is None
    assert asyncio.run(replay(history, replace(toy, seed=1), None)) is not None


def test_a_run_that_was_killed_asks_again_what_was_not_answered(tmp_path):
    """Cancelled in the middle: open asks and proposals without a verdict are taken up."""

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, lambda n: (0.01, kernels(n)), observe=stop_at(5))
    stop, history, _, _, _ = run(tmp_path, lambda n: kernels(n + 12))
    assert stop is Stop.BUDGET
    assert history.asks == ()
    assert history.pending == ()
    asks = [c.proposal.ask for c in history.lineage if c.proposal.ask is not None]
    assert sorted(asks) == list(range(len(asks)))
    toy = setting(toy_task(tmp_path / "task"), ModelProposer, budget=12, in_flight=6)
    assert asyncio.run(replay(history, toy, None)) is None


@pytest.mark.parametrize("cut", range(3, 9))
def test_what_a_killed_run_was_mending_is_not_mended_twice(tmp_path, cut):
    """Proposals that are taken up again know what they answer, so that decisions stay the same."""

    class Slow(FakeJudge):
        def check(self, built):
            time.sleep(0.02)
            return super().check(built)

    def observe(event):
        if isinstance(event, Proposed) and event.proposal.id == cut:
            raise KeyboardInterrupt

    def answer(number):
        return kernels(number) if number % 2 else reply(toy_source(extra=f"BROKEN = {number}"))

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, answer, observe=observe, machine=machine(judge=Slow()))
    _, history, _, _, _ = run(tmp_path, lambda n: answer(n + 50))
    toy = setting(toy_task(tmp_path / "task"), ModelProposer, budget=12, in_flight=6)
    assert asyncio.run(replay(history, toy, None)) is None


def test_prose_counts_and_is_told_why(tmp_path):
    stop, history, _, _, _ = run(tmp_path, lambda n: f"I would try {n} warps.", budget=5)
    assert stop is Stop.BUDGET
    replies = [c for c in history.lineage if c.proposal.origin is not None]
    assert len(replies) >= 4
    assert all(c.verdict.status is Status.NO_KERNEL for c in replies)
    assert all(c.verdict.message for c in replies)
    assert not any(c.proposal.operator is Operator.REPAIR for c in replies)


def test_failures_in_a_row_end_the_run_and_keep_what_was_evaluated(tmp_path, waits):
    def answer(number):
        return (
            kernels(number)
            if number < 4
            else ModelError("script: no answer; try later", permanent=False)
        )

    stop, history, script, seen, _ = run(tmp_path, answer, at_once=1)
    assert isinstance(stop, ModelError)
    assert script.calls == 8
    assert [e.in_a_row for e in seen if isinstance(e, CallFailed)] == [1, 2, 3, 4]
    assert waits == list(ask_queue.WAITS_S)
    assert sum(c.proposal.origin is not None for c in history.lineage) == 4
    assert history.spent.failed == 4
    assert history.stop is Stop.FAILED
    assert history.race is None
    stop, history, _, _, _ = run(tmp_path, lambda n: kernels(n + 8), at_once=1)
    assert stop is Stop.BUDGET


def test_calls_that_fail_beside_each_other_are_one_failure(tmp_path):
    """As an outage of seconds makes all of them fail."""

    def answer(number):
        failed = ModelError("script: busy", permanent=False)
        return (0.05, failed) if 4 <= number < 8 else kernels(number)

    stop, history, _, seen, _ = run(tmp_path, answer, at_once=4)
    assert stop is Stop.BUDGET
    assert history.spent.failed == 4
    assert {e.in_a_row for e in seen if isinstance(e, CallFailed)} == {1}


def test_a_server_that_asks_to_wait_is_waited_for(tmp_path, waits):
    def answer(number):
        failed = ModelError("script: 429", permanent=False, wait_s=150.0 if number == 2 else 1e9)
        return failed if number in (2, 6) else kernels(number)

    stop, _, _, _, _ = run(tmp_path, answer, at_once=1)
    assert stop is Stop.BUDGET
    assert waits == [150.0, ask_queue.MOST_WAIT_S]


def test_replies_that_come_beside_a_last_failure_are_evaluated(tmp_path):
    """They are paid."""

    def answer(number):
        if number == 0:
            return 0.02, ModelError("script: the key was refused", permanent=True)
        return (0.02 if number < 3 else 0.2), kernels(number)

    stop, history, script, _, _ = run(tmp_path, answer, at_once=4, budget=40)
    assert isinstance(stop, ModelError)
    assert script.calls == 4
    assert sum(c.proposal.origin is not None for c in history.lineage) == 3
    assert history.pending == ()
    assert len(history.asks) == 1  # what was not answered, to be asked again


def test_a_failure_between_replies_is_asked_again(tmp_path):
    def answer(number):
        return (
            ModelError("script: a moment's trouble", permanent=False)
            if number % 3
            else kernels(number)
        )

    stop, history, _, _, _ = run(tmp_path, answer, at_once=1)
    assert stop is Stop.BUDGET
    assert history.spent.failed > 3


def test_a_permanent_failure_ends_the_run_at_once(tmp_path):
    stop, history, script, _, _ = run(
        tmp_path, lambda n: ModelError("script: the key was refused", permanent=True), at_once=1
    )
    assert isinstance(stop, ModelError)
    assert script.calls == 1
    assert history.lineage.counted == 0


def test_duplicates_are_asked_for_again_and_then_charged(tmp_path):
    same = reply(toy_source(4, 2))
    stop, history, script, _, _ = run(
        tmp_path, lambda n: kernels(n) if n > 20 else same, budget=4, at_once=1
    )
    assert stop is Stop.BUDGET
    assert script.calls <= 3 * 4
    duplicates = [c for c in history.lineage if c.is_duplicate and c.proposal.origin is not None]
    assert duplicates
    for origin in (c.proposal.origin for c in duplicates):
        assert origin.calls in (2, 3)  # one of the drafts may have been the harness's own
        assert origin.dollars == pytest.approx(0.005 * origin.calls)


def test_what_a_reply_claims_and_what_was_tried_are_recorded(tmp_path):
    text = kernels(0).replace("×\n\n", "×\nProbability that it works: 80 %\n\n", 1)
    answers = lambda n: text if n < 8 else kernels(n)  # noqa: E731
    more = {"machine": machine(tune=5), "at_once": 1, "in_flight": 1}
    _, history, _, _, store = run(tmp_path, answers, budget=4, **more)
    stated = next(c for c in history.lineage if c.proposal.origin is not None)
    assert stated.proposal.works == 0.8
    again = [c for c in history.lineage if c.is_duplicate]
    assert again
    assert again[0].duplicate_of == stated.id
    configs = history.timed_configs[stated.id]
    assert len(configs) == 5
    file = read_tunables(kernels(0).split("```python\n")[1].split("```")[0])
    assert configs[0].values == {t.name: t.current for t in file.items}  # as it was written first
    assert all(set(c.us) == {"short", "middle", "long"} for c in configs)
    shown = run_view.run_json(store, history)
    assert shown["timed_configs"][str(stated.id)][0]["us"] == configs[0].us
    assert {e["technique"] for e in shown["effects"]} == {"c"}


def test_constants_are_tuned_before_the_verdict_and_inherited(tmp_path):
    tuning = machine(tune=16)
    _, history, _, _, store = run(tmp_path, kernels, machine=tuning, budget=8, at_once=1)
    tuned = [c for c in history.lineage if c.facts is not None and c.facts.tuned]
    assert tuned
    for candidate in tuned:
        assert candidate.counts
        (path,) = tmp_path.glob(f"runs/*/kernels/{candidate.written}.py")
        written = path.read_text()
        now = candidate.proposal.source
        assert written != now
        assert read_tunables(written).family == read_tunables(now).family
        assert case_times(now)["middle"] < case_times(written)["middle"]
        assert candidate.facts.tuned.count("→") in (1, 2)
    best = {t.name: t.current for t in read_tunables(tuned[0].proposal.source).items}
    assert best == {"X": 16, "Y": 3}
    assert [c.facts.configs for c in tuned] == [16] * len(tuned)
    # A session that goes on knows both texts of each.
    search, again = evolution(
        tmp_path / "task", tmp_path / "runs", proposer=made(Script(kernels), store), budget=12
    )
    with again:
        for candidate in tuned:
            for kernel in (candidate.written, candidate.proposal.kernel):
                text = read_kernel(store.folder, kernel)
                same = search._known.same(replace(candidate.proposal, source=text))
                assert same is not None
                assert same <= candidate.id


@pytest.mark.parametrize(
    ("caps", "stop"), [({"max_dollars": 0.1}, Stop.COST), ({"max_tokens": 12_000}, Stop.TOKENS)]
)
def test_limits_count_what_is_in_flight(tmp_path, caps, stop):
    ended, history, script, _, _ = run(tmp_path, lambda n: (0.01, kernels(n)), budget=50, **caps)
    assert ended is stop
    used = history.spent.input_tokens + history.spent.output_tokens
    assert 0 < used <= caps.get("max_tokens", 10**9)
    assert 0 < history.spent.dollars <= caps.get("max_dollars", 10**9)
    assert history.lineage.counted > 0
    # What earlier sessions spent counts too: nothing more fits.
    again, history, script, _, _ = run(tmp_path, kernels, budget=50, **caps)
    assert again is stop
    assert script.calls <= 4


def test_time_is_up_for_calls_in_flight_too(tmp_path):
    stop, history, _, _, _ = run(tmp_path, lambda n: (600, kernels(n)), limits=Limits(seconds=2.0))
    assert stop is Stop.TIME
    assert all(c.proposal.origin is None for c in history.lineage)
    assert len(history.asks) == 4


def test_enough_is_enough(tmp_path):
    stop, history, _, _, _ = run(tmp_path, kernels, limits=Limits(stop_at=0.5))
    assert stop is Stop.GOAL
    assert roofline_share(history.lineage.incumbent.verdict) >= 0.5
    assert history.lineage.counted <= 1


def test_a_recorded_run_is_repeated_with_the_same_decisions(tmp_path):
    def answer(number):
        if number % 5 == 2:
            return "nothing but prose"
        return (0.002 * (number % 4), kernels(number))

    _, recorded, _, _, _ = run(tmp_path, answer, machine=machine())
    proposer = Repeater("recorded", recorded)
    budget = sum(c.counts for c in recorded.lineage)
    search, store = evolution(
        tmp_path / "task",
        tmp_path / "again",
        proposer=proposer,
        budget=budget,
        machine=machine(),
    )
    with store:
        assert asyncio.run(search.run()) is Stop.BUDGET
        again = store.history()

    def decisions(lineage):
        return [
            (
                c.proposal.source,
                c.proposal.parents,
                c.proposal.operator,
                c.proposal.predicted,
                c.proposal.fault,
                c.verdict,
            )
            for c in lineage
        ]

    counted = decisions(recorded.lineage)[: len(again.lineage)]
    assert decisions(again.lineage) == counted
    assert [c.id for c in again.lineage.promotions] == [
        c.id for c in recorded.lineage.promotions if c.id < len(again.lineage)
    ]
    toy = setting(toy_task(tmp_path / "task"), proposer, budget=budget)
    assert asyncio.run(replay(again, toy, Repeater("recorded", recorded))) is None


def test_each_attempt_at_an_ask_keeps_its_prompt_and_its_reply(tmp_path):
    """A failed call is made once more, and a session takes up what an earlier one left: neither
    writes over what was paid for.
    """

    def answer(number):
        if number % 3 == 1:
            return ModelError("refused", permanent=False)
        return kernels(0 if number % 3 == 0 else number)  # duplicates among them

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, lambda n: (0.02, answer(n)), observe=stop_at(6), at_once=2)
    _, history, _, _, store = run(tmp_path, answer, at_once=2)
    calls = [e.data for e in history.events if e.kind == "call"]
    attempts = [(c["ask"], c["attempt"]) for c in calls]
    assert len(set(attempts)) == len(attempts) == history.spent.calls
    assert any(attempt for _, attempt in attempts)
    replies = {
        store.text_path("replies", *a)
        for a, c in zip(attempts, calls, strict=True)
        if not c.get("error")
    }
    assert all(path.is_file() for path in replies)


def test_a_limit_counts_calls_of_unknown_cost_in_later_sessions_too(tmp_path):
    def answer(number):
        return ModelError("the reply stopped half way", permanent=False)

    _, history, _, _, _ = run(tmp_path, answer, at_once=1, max_dollars=1.0)
    assert history.spent.dollars == 0.0
    # 1000 tokens of a reply at 10 dollars a million, and a few of the prompt
    assert history.spent.bound_dollars == pytest.approx(
        ask_queue.FAILURES_IN_A_ROW * 0.01, rel=0.01
    )
    stop, history, script, _, _ = run(tmp_path, kernels, at_once=1, max_dollars=0.035)
    assert (stop, script.calls) == (Stop.COST, 0)


def test_a_call_that_is_given_up_counts(tmp_path):
    stop, history, script, _, _ = run(
        tmp_path, lambda n: (60.0, kernels(n)), at_once=2, limits=Limits(seconds=1.0)
    )
    assert stop is Stop.TIME
    assert history.spent.calls == history.spent.failed == script.calls == 2
    assert history.spent.bound_tokens >= 2 * 1000


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50), st.booleans()), max_size=30),
    st.integers(1, 300),
    st.integers(1, 4),
)
def test_a_purse_never_lets_more_be_spent_than_its_limit(calls, limit, at_once):
    """Whatever calls take (never more than the most they were let in with), and in any order."""

    async def main():
        spend_limit = SpendLimit(Spent(), max_tokens=limit)
        gate = asyncio.Semaphore(at_once)

        async def one(most, share, fails):
            async with gate, spend_limit.reserve(CallBound(most, None)):
                await asyncio.sleep(0)
                used = None if fails else min(most, share)
                output = None if fails else 0
                spend_limit.charge(ModelCall(0, 0, "m", "", 0.0, used, output, most_tokens=most))
                return most if fails else used

        tasks = [asyncio.create_task(one(*c)) for c in calls]
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(e, int | CapReached) for e in ended)
        assert sum(e for e in ended if isinstance(e, int)) <= limit
        if sum(c[0] for c in calls) <= limit:
            assert not any(isinstance(e, CapReached) for e in ended)

    asyncio.run(main())
