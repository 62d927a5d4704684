import contextlib

import pytest
from kagent_sandbox.device.compile_only import _Turn


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
