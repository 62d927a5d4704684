"""Durations of a run do not follow the wall clock, which people and services set."""

import time

import commands
import pytest
from kagent.runs.store import RunStore, read_history
from kagent.runs.stored_event import StoredEvent
from kagent.ui.live import clock
from simulated_evolution import stored_run

DAYS = 11 * 86400.0


def test_a_clock_that_is_set_meanwhile_changes_no_duration(tmp_path, monkeypatch):
    folder = stored_run(tmp_path, budget=3)
    before = read_history(folder)[1].elapsed_s
    with RunStore.open(folder) as store:
        store.begin(4)
        for shift in (-DAYS, DAYS):
            set_to = time.time() + shift
            monkeypatch.setattr(time, "time", lambda at=set_to: at)
            store.append("note", {})
    history = read_history(folder)[1]
    times = [event.at for event in history.events][-3:]
    assert times == sorted(times)
    assert times[-1] - times[0] < DAYS / 2
    assert before <= history.elapsed_s < before + DAYS / 2


def test_the_time_between_a_killed_session_and_the_next_one_is_no_work(tmp_path):
    """Models are tried, and isolation is noted, before the next session begins."""
    folder = stored_run(tmp_path, budget=3)
    before = read_history(folder)[1].elapsed_s
    kinds = [
        ("session", {"budget": 4}),
        ("note", {}),
        ("isolation", {}),
        ("session", {"budget": 4}),
    ]
    now, ats = time.time(), [DAYS, DAYS + 10, 2 * DAYS, 2 * DAYS + 1]
    with RunStore.open(folder) as store:
        store.adopt(
            StoredEvent(0, now + at, kind, data)
            for at, (kind, data) in zip(ats, kinds, strict=True)
        )
    assert read_history(folder)[1].elapsed_s == pytest.approx(before + 10)


@pytest.mark.parametrize("stopped", [True, False])
def test_a_session_with_times_of_a_clock_that_was_set_back(tmp_path, monkeypatch, capsys, stopped):
    """As runs of earlier versions have them."""
    folder = stored_run(tmp_path, budget=3)
    before = read_history(folder)[1].elapsed_s
    with RunStore.open(folder) as store:
        kinds = [("session", {"budget": 4}), ("note", {}), ("stopped", {"stop": "budget"})]
        store.adopt(
            StoredEvent(0, 2 * DAYS - DAYS * i, kind, data)
            for i, (kind, data) in enumerate(kinds[: 3 if stopped else 2])
        )
    assert read_history(folder)[1].elapsed_s == before
    said = commands.run(monkeypatch, capsys, "show", folder)
    assert said.code == 0
    assert f"evaluated in {clock(before)}" in said.out
