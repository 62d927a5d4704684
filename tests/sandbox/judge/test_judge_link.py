"""A judge that is reached over any link, and its successor on another device."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
from kagent_sandbox.data.build import Built
from kagent_sandbox.data.device import Ceilings, DeviceFacts
from kagent_sandbox.data.race import Race
from kagent_sandbox.data.records import to_json
from kagent_sandbox.data.task import draw_hidden, load_task
from kagent_sandbox.errors import ChildDied, JudgeMoved, MachineError
from kagent_sandbox.judge.check.cases import bench_cases
from kagent_sandbox.judge.client import Contender, JudgeClient, _ahead
from kagent_sandbox.judge.protocol import AHEAD, USES
from kagent_sandbox.judge.server import JudgeServer
from kagent_sandbox.judge.timing.baselines import BaselineWorker
from kagent_sandbox.judge.timing.noise import Noise

SOFTMAX = Path(__file__).parents[3] / "seeds" / "softmax"
FACTS = DeviceFacts("cpu", "Toy", "cpu", "Toy, driver 1", 1, 1, 1, 0.0, "one")
CEILINGS = Ceilings(100.0, 100.0, 100.0, {"float32": 1.0})
NOISE = Noise(500.0, 1.0, 0.01)


class MadeLink:
    """Answers from memory; it dies of the first question after it was opened, if it should."""

    pid = 1

    def __init__(self, facts, ceilings, *, dies):
        self.answers = {"open": facts, "ceilings": ceilings, "noise": NOISE, "race": Race((), {})}
        self.dies = dies
        self.closed = False

    def ask(self, verb, request, blobs, on_progress):
        if self.dies and verb == "noise":
            raise ChildDied("gone")
        return to_json(self.answers[verb])

    def close(self):
        self.closed = True


def client(successor, ceilings=CEILINGS, task=SOFTMAX):
    links = [MadeLink(FACTS, CEILINGS, dies=True), MadeLink(successor, ceilings, dies=False)]
    waiting = list(links)
    return JudgeClient(task, "cpu", 1, connect=lambda: waiting.pop(0)), links


def test_a_successor_on_the_same_kind_of_device_is_asked_again():
    for successor in (FACTS, dataclasses.replace(FACTS, unit="two")):
        judge, links = client(successor, dataclasses.replace(CEILINGS, read_gb_per_s=98.5))
        assert judge.ceilings() == CEILINGS
        assert judge.noise() == NOISE
        assert links[0].closed


def test_a_judge_that_dies_of_being_closed_has_no_successor():
    judge, links = client(FACTS)
    judge.close()
    with pytest.raises(ChildDied, match="the judge was closed"):
        judge.noise()
    assert links[0].closed
    assert not links[1].closed  # it was never started


def test_one_that_starts_while_its_client_is_closed_is_closed_too():
    judge, links = client(FACTS)
    connect = judge._connect

    def closed_meanwhile():
        link = connect()
        judge._closed = True
        return link

    judge._connect = closed_meanwhile
    with pytest.raises(ChildDied, match="the judge was closed"):
        judge.noise()
    assert links[1].closed


def test_a_successor_whose_times_do_not_compare_ends_the_run():
    judge, _ = client(dataclasses.replace(FACTS, key="Toy, driver 2"))
    with pytest.raises(MachineError, match="is on Toy, driver 2; times were measured on Toy, driv"):
        judge.noise()
    slow = dataclasses.replace(CEILINGS, copy_gb_per_s=90.0)
    judge, _ = client(dataclasses.replace(FACTS, unit="two"), slow)
    judge.ceilings()
    with pytest.raises(MachineError, match=r"another Toy, whose ceilings differ by 10\.0%"):
        judge.noise()


@pytest.mark.parametrize(("unit", "moved"), [("one", False), ("two", True)])
def test_a_successor_on_another_device_is_compared_before_it_goes_on(unit, moved):
    """Its ceilings do not say how it times kernels that were timed on the first one."""
    judge, _ = client(dataclasses.replace(FACTS, unit=unit))
    judge.race([], hidden=False)
    if moved:
        with pytest.raises(JudgeMoved, match=r"on another Toy \(two\)") as error:
            judge.noise()
        assert error.value.unit == "two"
    assert judge.noise() == NOISE


def test_a_candidate_that_two_devices_judges_die_of_is_set_aside():
    """However often its judge comes back on another device."""
    units = iter("abcdefg")

    class Dying(MadeLink):
        def __init__(self):
            super().__init__(dataclasses.replace(FACTS, unit=next(units)), CEILINGS, dies=False)

        def ask(self, verb, request, blobs, on_progress):
            if verb == "check":
                raise ChildDied("gone")
            known = verb in self.answers
            return super().ask(verb, request, blobs, on_progress) if known else {}

    judge = JudgeClient(SOFTMAX, "cpu", 1, connect=Dying)
    judge.race([], hidden=False)
    candidate = Built("source", "tree", "cpu", ({},), {}, {}, 0.0, "")
    with pytest.raises(JudgeMoved, match=r"\(b\)"):
        judge.check(candidate)
    verdict = judge.check(candidate)
    assert verdict.message.startswith("set aside: two judges in a row died of this candidate")
    with pytest.raises(JudgeMoved, match=r"\(c\)"):
        judge.race([], hidden=False)
    assert judge.noise() == NOISE


def test_ceilings_that_do_not_bound_the_task_may_differ():
    slow = dataclasses.replace(CEILINGS, tflop_per_s={"float32": 0.5})
    judge, _ = client(FACTS)
    assert judge.ceilings_apart(CEILINGS, slow) == 0
    product, _ = client(FACTS, task=SOFTMAX.parent / "attention")
    assert product.ceilings_apart(CEILINGS, slow) == pytest.approx(0.5)


@pytest.mark.parametrize(("hidden", "baselines"), [(True, True), (False, True), (True, False)])
def test_what_torch_times_in_a_race_is_compiled_before_it(hidden, baselines):
    """Of visible cases, too: a library's export on a machine that timed no baselines compiled them
    one after the other, alone with the device.
    """
    asked = []

    class Recording(MadeLink):
        def ask(self, verb, request, blobs, on_progress):
            asked.append((verb, request))
            if verb.startswith("ahead"):
                return {"needs": next(needs)}
            return super().ask(verb, request, blobs, on_progress) if verb in self.answers else {}

    needs = iter(["timing", "work", "timing", "work", None])

    link = Recording(FACTS, CEILINGS, dies=False)
    judge = JudgeClient(SOFTMAX, "cpu", 1, connect=lambda: link)
    candidate = Built("source", "tree", "cpu", ({},), {}, {}, 0.0, "")
    judge.race([Contender("1", candidate, {})], hidden=hidden, baselines=baselines)
    ahead = [(r["visible"], r["hidden"], r["cached"]) for verb, r in asked if verb == "ahead"]
    assert ahead == ([(not hidden, hidden, True)] if baselines else [])
    steps = [verb for verb, _ in asked if verb in AHEAD]
    assert steps == (["ahead", *["ahead timing", "ahead work"] * 2] if baselines else [])
    assert asked[-1][0] == "race"


def test_hidden_cases_are_compiled_with_the_visible_ones_and_once(monkeypatch):
    """In two goes the device could be timed by nobody for twice as long."""
    asked, started = [], []
    task = load_task(SOFTMAX)
    server = JudgeServer(None)

    def compile_ahead(hidden, visible):
        asked.append((list(hidden), list(visible)))
        yield from ()
        return {c.name for c in hidden[: len(asked)]}  # at first there is memory for one of them

    server._race_baselines = SimpleNamespace(compile_ahead=compile_ahead)
    race = draw_hidden(task, "cpu", "bench", 1)
    facts = dataclasses.replace(FACTS, key="of this test")
    traits = SimpleNamespace(disturbed_by_builds=False)
    backend = SimpleNamespace(facts=facts, traits=traits)
    server._judge = SimpleNamespace(task=task, kind="cpu", race_cases=race, backend=backend)
    worker = SimpleNamespace(close=lambda: started.append("closed"))
    monkeypatch.setattr(BaselineWorker, "ahead", lambda device: started.append(device) or worker)
    server._device = "cpu"
    for visible in (True, False, False):
        server._ahead(_ahead(visible=visible, hidden=True, measures_next=visible), ())
    assert asked == [(race, bench_cases(task, "cpu")), (race[1:], []), ([], [])]
    server._end_worker()
    assert started == ["cpu", "closed"]
    traits.disturbed_by_builds = True  # what a process imports would disturb whoever is timed
    server._ahead(_ahead(visible=True, hidden=True, measures_next=True), ())
    assert started == ["cpu", "closed"]


def test_processes_that_compile_ahead_start_and_end_while_nobody_is_timed():
    assert [USES[verb] for verb in AHEAD] == ["work", "timing", "work"]


def test_compiling_ahead_takes_its_steps_in_turns_of_their_own():
    """Else whoever compiles a product would hold the device for a minute, to use it for seconds."""
    ended = []

    def compile_ahead(hidden, visible):
        try:
            yield "timing"
            yield "work"
        finally:
            ended.append(True)
        return ["a hidden case"]

    server = JudgeServer(None)
    backend = SimpleNamespace(device=SimpleNamespace(type="cpu"))
    server._judge = SimpleNamespace(
        race_cases=[], backend=backend, begin_request=lambda *, alone: None
    )
    server._race_baselines = SimpleNamespace(compile_ahead=compile_ahead)
    begin = _ahead(visible=False, hidden=True)
    needs = [server._ahead(begin, ()), server._step({}, ()), server._step({}, ())]
    assert needs == [{"needs": "timing"}, {"needs": "work"}, {"needs": None}]
    assert server._compiled == {"a hidden case"}
    assert server._step({}, ()) == {"needs": None}
    server._ahead(begin, ())
    server._begin({"do": "ahead timing"})
    assert len(ended) == 1
    server._begin({"do": "race"})  # nobody waited for it
    assert len(ended) == 2
