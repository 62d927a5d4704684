import contextlib

import pytest
from kagent_sandbox.device.compile_only import (
    SLOW_S,
    VERY_SLOW_S,
    _Turn,
    timing_slow_ones_once,
)


@pytest.fixture
def did():
    return []


@pytest.fixture
def turn(did):
    @contextlib.contextmanager
    def alone():
        did.append("alone")
        try:
            yield
        except ValueError:
            did.append("failed")
            raise
        finally:
            did.append("others")

    return _Turn(alone, ())


def test_each_function_has_a_turn_and_what_it_calls_has_it_already(turn, did):
    inner = turn.having(did.append)
    outer = turn.having(lambda: (inner("a"), inner("b")))
    outer()
    inner("c")
    assert did == ["alone", "a", "b", "others", "alone", "c", "others"]


def test_one_turn_is_kept_for_all_that_a_function_times(turn, did):
    time = turn.having(did.append)

    def choose():
        did.append("before")
        time("as it is")
        did.append("between")
        time("padded")

    turn.keeping(turn.keeping(choose))()
    time("another")
    kept = ["before", "alone", "as it is", "between", "padded", "others"]
    assert did == [*kept, "alone", "another", "others"]


def test_no_turn_is_taken_where_nothing_is_timed(turn, did):
    turn.keeping(lambda: did.append("known"))()
    assert did == ["known"]


def test_a_failure_after_a_turn_has_begun_is_seen_by_the_one_who_gave_it(turn, did):
    time = turn.having(did.append)

    def choose():
        time("as it is")
        raise ValueError("of this test")

    with pytest.raises(ValueError, match="of this test"):
        turn.keeping(choose)()
    time("another")
    assert did == ["alone", "as it is", "failed", "others", "alone", "another", "others"]


@pytest.mark.parametrize(
    ("runs_s", "ms", "by_torch"),
    [
        ([SLOW_S / 2], 7.0, True),
        ([SLOW_S, SLOW_S / 2], 7.0, True),  # what the first run loaded is not its time
        ([2 * SLOW_S, 1.5], 1500.0, False),
        ([VERY_SLOW_S], 1000.0, False),
    ],
)
def test_what_is_slow_runs_twice_at_most_and_is_not_left_to_torch(runs_s, ms, by_torch, did):
    now, took, pending = [0.0], iter(runs_s), []

    def wait():
        now[0] += sum(pending)
        pending.clear()

    def torchs_own(_benchmarker, _call, rep):
        did.append(rep)
        return 7.0

    time_ms = timing_slow_ones_once(torchs_own, lambda: now[0], wait)
    pending.append(100.0)  # of others, enqueued before
    assert time_ms(None, lambda: pending.append(next(took)), rep=40) == ms
    assert did == ([40] if by_torch else [])
    assert next(took, None) is None
