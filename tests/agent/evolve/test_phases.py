"""How long phases took is kept, and told the next time."""

from types import SimpleNamespace

import pytest
from kagent.evolve import phases
from kagent.evolve.phases import PhaseClock
from kagent.runs.events import Phase


@pytest.fixture
def clock(tmp_path, monkeypatch):
    """A clock that moves when it is told to, and a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(phases, "time", SimpleNamespace(monotonic=lambda: now.s))
    return now


def session(clock, *key, seconds, **more):
    """Run through all phases; what was told of each."""
    told = []
    timed = PhaseClock(told.append, *key, **more)
    for phase in Phase:
        timed.begin(phase)
        clock.s += seconds
        if phase is Phase.SEARCH:
            timed.end(5)
    timed.end()
    return {event.phase: event for event in told}


def test_the_second_time_every_phase_is_expected_to_take_what_it_took(clock):
    first = session(clock, "softmax", seconds=20.0, evaluations=50)
    assert all((e.expected_s, e.later_s) == (None, None) for e in list(first.values())[:-1])
    again = session(clock, "softmax", seconds=10.0, evaluations=50)
    assert again[Phase.BASELINES].expected_s == 20.0
    assert again[Phase.SEARCH].expected_s == 50 * 20.0 / 5
    assert again[Phase.START].later_s == 3 * 20.0 + 200.0
    assert again[Phase.RACE].later_s == 0
    limited = session(clock, "softmax", seconds=0.1, evaluations=50, most_search_s=30.0)
    assert limited[Phase.SEARCH].expected_s == limited[Phase.SEARCH].most_s == 30.0
    # what was over at once (stored baselines) says nothing about the next time
    assert session(clock, "softmax", seconds=1.0)[Phase.BASELINES].expected_s == 10.0


def test_a_run_on_a_busy_machine_is_not_what_the_next_ones_are_expected_to_take(clock):
    for seconds in (900.0, 20.0):
        session(clock, "softmax", seconds=seconds, evaluations=50)
    after_busy = session(clock, "softmax", seconds=20.0, evaluations=50)
    assert after_busy[Phase.BASELINES].expected_s == 20.0
    assert after_busy[Phase.SEARCH].expected_s == 50 * 20.0 / 5
    # a busy run later changes nothing; a machine that is slower for good does, after a few
    session(clock, "softmax", seconds=900.0)
    assert session(clock, "softmax", seconds=40.0)[Phase.BASELINES].expected_s == 20.0
    for _ in range(4):
        session(clock, "softmax", seconds=40.0)
    assert session(clock, "softmax", seconds=40.0)[Phase.BASELINES].expected_s == 40.0


def test_another_task_is_told_what_it_took_itself(clock):
    session(clock, "softmax", seconds=20.0)
    assert session(clock, "gelu", seconds=1.0)[Phase.BASELINES].expected_s is None


def test_without_a_key_nothing_is_stored(clock, tmp_path):
    session(clock, seconds=20.0)
    assert list(tmp_path.iterdir()) == []
