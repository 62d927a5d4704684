"""Judges of a run start side by side, and are all closed."""

import contextlib
import threading

import pytest
from kagent.fleet.station import open_judges


class Judge:
    """Something that is opened and closed."""

    def __init__(self, closed):
        self._closed = closed

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self._closed.append(self)


def test_judges_start_side_by_side():
    everyone, closed = threading.Barrier(3, timeout=20), []

    def start():
        everyone.wait()  # none comes back before all have begun
        return Judge(closed)

    with contextlib.ExitStack() as opened:
        judges = open_judges(opened, [start] * 3)
        assert len(set(judges)) == 3
        assert closed == []
    assert set(closed) == set(judges)


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_those_that_have_started_are_closed_when_one_does_not(broken):
    closed = []

    def start(number):
        if number == broken:
            raise ValueError(f"judge {number} does not start")
        return Judge(closed)

    with (
        pytest.raises(ValueError, match=f"judge {broken} does not start"),
        contextlib.ExitStack() as opened,
    ):
        open_judges(opened, [lambda n=n: start(n) for n in range(3)])
    assert len(closed) == 2
