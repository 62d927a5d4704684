import pytest
from kagent_sandbox.judge.arena.phase_timer import PhaseTimer


class Hand:
    """A clock that is moved by hand."""

    now = 10.0

    def __call__(self):
        return self.now


def test_what_is_nested_counts_once_and_for_the_inner_part():
    hand = Hand()
    clock = PhaseTimer(hand)
    with clock.part("other"):
        hand.now += 1
        with clock.part("inputs"):
            hand.now += 2
            with clock.part("wait"):
                hand.now += 4
            hand.now += 8
        hand.now += 16
    hand.now += 32  # belongs to nobody
    with clock.part("inputs"):
        hand.now += 64
    assert clock.seconds == {"other": 17, "inputs": 74, "wait": 4}


def test_a_part_that_fails_is_counted():
    hand = Hand()
    clock = PhaseTimer(hand)

    def fail():
        with clock.part("samples"):
            hand.now += 3
            raise ValueError

    with pytest.raises(ValueError), clock.part("other"):  # noqa: PT011
        fail()
    assert clock.seconds == {"other": 0, "samples": 3}
