"""How long a race goes on on a CPU: until its verdicts are clear, or its time is over."""

import contextlib
import itertools
from collections import Counter
from types import SimpleNamespace

import pytest
from handmade_candidates import GOOD, built, write_small_task
from kagent_sandbox.data.build import Contender
from kagent_sandbox.data.device import Ceilings
from kagent_sandbox.data.task import load_task
from kagent_sandbox.data.verdict import SpeedVerdict
from kagent_sandbox.device.cpu.backend import CpuBackend
from kagent_sandbox.device.cpu.traits import TRAITS
from kagent_sandbox.judge.arena.session import LauncherSession
from kagent_sandbox.judge.judge import Judge
from kagent_sandbox.judge.timing import race as race_module

SEED = 5
TYPICAL = TRAITS.race_rounds * TRAITS.race_samples
OURS_US = 10.0
FAR_APART = [1e-3] * TRAITS.race_samples + [1e5] * TRAITS.race_samples  # blocks in turn


class Eager:
    """Baselines of which eager torch takes times of our choice, in µs."""

    def __init__(self, times_us, lacking):
        self._times_us = iter(times_us)
        self._lacking = lacking

    def compile_ahead(self, hidden, visible):
        """Nothing is compiled."""

    def open(self, case, arena):
        del case, arena
        opened = SimpleNamespace(
            names=["eager"],
            missing=dict.fromkeys(self._lacking, "out of memory"),
            lacking=self._lacking,
            launcher=None,
            samples=self.samples,
        )
        return contextlib.nullcontext(opened)

    def samples(self, name, count):
        del name
        return [next(self._times_us) for _ in range(count)]


class Neighbour:
    """Sees the same disturbance whenever times were taken."""

    begun = False

    def begin(self):
        self.begun = True

    def notes(self):
        assert self.begun
        return ["other programs used 1.5 cores"]


@pytest.fixture
def race(tmp_path, shared, monkeypatch):
    """A race of a good kernel beside times of eager torch. The kernel runs, and takes `OURS_US`."""
    sample = LauncherSession.sample

    def sample_of_known_time(*args, **kwargs):
        sample(*args, **kwargs)
        return OURS_US

    monkeypatch.setattr(LauncherSession, "sample", sample_of_known_time)
    task = load_task(write_small_task(tmp_path))

    def run(times_us, race_s, lacking=()):
        with contextlib.closing(Judge(task, CpuBackend(), SEED, race_s=race_s)) as judge:
            judge._watch = Neighbour()
            judge.backend.settle = lambda: None  # caches may hold what they like
            judge._ceilings = Ceilings(10.0 / 16, 10.0 / 16, 10.0 / 16, {"float32": 0.1 / 16})
            good = Contender("good", built(task, SEED, GOOD, race=True), {})
            return judge.race([good], hidden=True, race_baselines=Eager(times_us, lacking))

    return run


def drawn(found):
    """Samples that the candidate has on each case."""
    return {case.candidates["good"].samples for case in found.cases}


def test_a_clear_verdict_needs_no_further_rounds(race):
    found = race(itertools.repeat(1e9), 30.0)
    assert drawn(found) == {TYPICAL}
    assert found.versus_torch("good").verdict is SpeedVerdict.FASTER
    assert {case.notes for case in found.cases} == {("other programs used 1.5 cores",)}


def test_a_tie_goes_on_until_its_time_is_over(race, monkeypatch):
    far_apart = itertools.cycle(FAR_APART)
    # A clock of our own, which moves on by 1 s whenever it is read: once a round.
    monkeypatch.setattr(race_module, "time", SimpleNamespace(monotonic=itertools.count().__next__))
    found = race(far_apart, 12.0)
    assert min(drawn(found)) > TYPICAL
    assert found.versus_torch("good").verdict is SpeedVerdict.TIE


def test_without_time_a_tie_has_as_many_samples_as_any(race):
    far_apart = itertools.cycle(FAR_APART)
    assert drawn(race(far_apart, 0.0)) == {TYPICAL}


def test_the_best_of_torch_is_not_known_where_one_of_its_ways_lacked_memory(race):
    """That way may be the fastest. An expert has no part in the best of torch."""
    found = race(itertools.repeat(1e9), 0.0, lacking=("compile",))
    assert found.versus_torch("good") is None
    assert {c.against for c in found.overall["good"]} == {"eager"}
    assert [c.fastest_of_torch for c in found.cases] == [None] * len(found.cases)
    assert {c.candidates["good"].baseline_us for c in found.cases} == {None}
    assert found.lacking_modes == {"compile": len(found.cases)}
    found = race(itertools.repeat(1e9), 0.0, lacking=("best",))
    assert found.versus_torch("good").verdict is SpeedVerdict.FASTER
    assert found.lacking_modes == {}


@pytest.mark.parametrize("count", range(2, 8))
def test_everyone_is_first_and_last_and_after_everyone_equally_often(count):
    names = [str(i) for i in range(count)]
    turns = [race_module.order(names, t) for t in range(2 * count)]
    assert all(sorted(t) == names for t in turns)
    assert all(a == b[::-1] for a, b in zip(turns[::2], turns[1::2], strict=True))
    for place in (0, -1):
        assert set(Counter(t[place] for t in turns).values()) == {2}
    after = Counter(pair for t in turns for pair in itertools.pairwise(t))
    assert set(after.values()) == {2}
    assert len(after) == count * (count - 1)
