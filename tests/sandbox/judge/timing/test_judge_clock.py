"""The judge's clock beside a GPU's events: asked again, it bounds a time all the more."""

import itertools
from types import SimpleNamespace

import pytest
from kagent_sandbox.judge.timing import measure
from kagent_sandbox.judge.timing.measure import ALARM_TRIES, Meter

TRUE_US = 100.0


@pytest.fixture
def asked(monkeypatch):
    """Asks the judge's clock, of which every answer is late by so much; what events say, in µs."""
    monkeypatch.setattr(measure, "ALARM_PAUSE_S", 0.0)

    def ask(us, late_us):
        answers = (TRUE_US + late for late in late_us)
        taken = []

        def wall_us(side, count):
            taken.append(count)
            return next(answers)

        timed = SimpleNamespace(wall_us=wall_us)
        return Meter._disagreement(SimpleNamespace(), timed, us), taken

    return ask


@pytest.mark.parametrize("late_us", [(0.0,), (9.0, 0.0, 500.0)])
def test_events_that_lie_are_found_however_often_the_clock_is_asked(asked, late_us):
    text, taken = asked(0.5 * TRUE_US, itertools.cycle(late_us))
    assert len(taken) == ALARM_TRIES
    assert text == "50.0 µs a sample, but 100.0 µs each by the judge's clock over many"


def test_a_busy_host_is_no_lie(asked):
    text, taken = asked(TRUE_US, [500.0, 80.0, 300.0, 3.0, 500.0])
    assert text is None
    assert len(taken) == 4
    assert set(taken) == {60}


@pytest.mark.parametrize(("us", "executions"), [(1.0, 100), (1000.0, 6), (1e6, 6)])
def test_what_a_request_costs_is_a_small_part_of_what_is_timed(asked, us, executions):
    assert asked(us, [0.0] * ALARM_TRIES)[1][0] == executions
