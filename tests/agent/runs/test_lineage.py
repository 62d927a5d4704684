import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from kagent.runs.lineage import Lineage, Operator, Origin, Withdrawal
from kagent_sandbox.data.language import language_of
from kagent_sandbox.data.verdict import Comparison, Rejected, Stage, Status
from synthetic_lineages import SEED, child, failure, lineages


def versus(against, p_faster):
    return Comparison(str(against), 1.1, 1.0, 1.2, p_faster)


def test_a_new_incumbent_beats_the_old_one_beyond_doubt():
    lineage = Lineage([SEED])
    assert not lineage.record(child(1, 50.0, versus=versus(0, 0.95)))
    assert lineage.record(child(2, 99.0, versus=versus(0, 0.951)))
    assert not lineage.record(child(3, 40.0, versus=versus(0, 1.0)))  # against another one
    assert not lineage.record(child(4, 30.0))  # against nobody
    assert [c.id for c in lineage.promotions] == [0, 2]
    assert [c.id for c in lineage.elites(3)] == [2, 4, 1]


def test_the_first_that_passes_is_the_incumbent():
    lineage = Lineage([failure(0, parents=(), operator=Operator.SEED), child(1, 100.0)])
    assert lineage.incumbent.id == 1


def test_seeds_and_duplicates_are_free():
    lineage = Lineage(
        [SEED, child(1, 100.0), failure(2), failure(3, status=Status.DUPLICATE), failure(4)]
    )
    assert lineage.counted == 3
    assert lineage.children(0) == 4
    assert lineage.rejections() == {
        (Stage.BUILD, Status.COMPILE_ERROR): 2,
        (Stage.BUILD, Status.DUPLICATE): 1,
    }


def test_a_duplicate_that_a_model_was_asked_for_is_charged():
    duplicate = failure(1, status=Status.DUPLICATE, origin=Origin("some-model", calls=3))
    assert Lineage([SEED, duplicate]).counted == 1


def test_the_path_leads_from_a_seed():
    lineage = Lineage([SEED, child(1, 90.0), child(2, 80.0, parents=(1, 0))])
    assert [c.id for c in lineage.path(2)] == [0, 1, 2]


def test_a_gain_is_over_the_nearest_that_passed():
    lineage = Lineage(
        [
            SEED,
            child(1, 80.0, parents=(0,)),
            failure(2, parents=(1, 0)),
            failure(3, parents=(2,)),
            child(4, 40.0, parents=(3, 0)),
            failure(5, parents=(), operator=Operator.SEED),
            child(6, 40.0, parents=(5,)),
        ]
    )
    assert [b and b.id for b in map(lineage.base, range(7))] == [None, 0, 1, 1, 1, None, None]
    assert lineage.gain(1) == pytest.approx(1.25)
    assert lineage.gain(4) == pytest.approx(2.0)  # a repair of a repair of a change of #1
    assert [lineage.gain(i) for i in (0, 2, 3, 6)] == [None] * 4


WRONG = Rejected(Stage.MEASURE, Status.INCORRECT_NUMERICAL, "wrong where it was timed")


def withdrawing(candidate, *gone):
    return replace(candidate, withdrawals=tuple(Withdrawal(i, WRONG) for i in gone))


def test_an_incumbent_is_withdrawn_by_the_candidate_that_showed_it_wrong():
    lineage = Lineage([SEED, child(1, 50.0, versus=versus(0, 1.0))])
    lineage.record(child(2, 40.0, versus=versus(1, 1.0)))
    assert not lineage.record(withdrawing(child(3, 60.0, versus=versus(1, 0.5)), 2))
    assert [c.id for c in lineage.promotions] == [0, 1]
    assert (lineage[2].verdict, lineage.speed(2)) == (WRONG, None)
    assert 2 not in [c.id for c in lineage.passed()]
    assert lineage.as_recorded(2).score is not None
    before = lineage.as_of(3)  # what was decided then is decided the same again
    assert before.incumbent.id == 2
    assert before.speed(2) is not None
    assert lineage.record(child(4, 30.0, versus=versus(1, 0.99)))


def test_without_any_incumbent_left_it_is_the_best_that_was_timed_in_full():
    lineage = Lineage([SEED, child(1, 130.0, versus=versus(0, 0.0))])
    assert lineage.incumbent_without({0}).id == 1
    assert lineage.incumbent_without({0, 1}) is None
    lineage.record(withdrawing(child(2, 140.0, versus=versus(1, 0.1)), 0))
    assert [c.id for c in lineage.promotions] == [1]
    lineage.record(withdrawing(child(3, 140.0), 1, 2))
    assert [c.id for c in lineage.promotions] == [3]


def test_only_the_incumbent_can_be_withdrawn():
    lineage = Lineage([SEED, child(1, 50.0, versus=versus(0, 1.0))])
    with pytest.raises(ValueError, match="candidate 0 is withdrawn, and is not the incumbent"):
        lineage.record(withdrawing(child(2, 60.0), 0))


def test_ids_are_positions():
    with pytest.raises(ValueError, match="candidate 2 recorded as number 1"):
        Lineage([SEED, child(2, 1.0)])


@given(lineages())
@settings(deadline=None)
def test_the_past_does_not_change(lineage):
    before = [lineage.as_of(n) for n in range(len(lineage) + 1)]
    snapshot = [(len(v), v.counted, v.incumbent and v.incumbent.id) for v in before]
    lineage.record(child(len(lineage), 1.0, versus=versus(lineage.incumbent.id, 1.0)))
    assert [(len(v), v.counted, v.incumbent and v.incumbent.id) for v in before] == snapshot
    for n, view in enumerate(before):
        again = lineage.as_of(n)
        assert [c.id for c in again] == [c.id for c in view] == list(range(n))
        assert [c.id for c in again.promotions] == [c.id for c in view.promotions]
        assert all(again.children(c.id) == view.children(c.id) for c in view)


def test_languages():
    assert language_of("cuda_cluster").name == "cuda"
    with pytest.raises(
        ValueError, match="begins with triton_, gluon_, cuda_, cute_, cutile_ or cpp_"
    ):
        language_of("softmax")


def test_speeds_are_chained_through_comparisons_and_do_not_drift():
    """The machine becomes ten times slower after the seed: ratios tell, times do not."""
    better = Comparison("0", 2.0, 1.9, 2.1, 1.0, {"short": 2.0})
    worse = Comparison("1", 0.5, 0.4, 0.6, 0.0, {"short": 0.5})
    lineage = Lineage([SEED, child(1, 500.0, versus=better), child(2, 2000.0, versus=worse)])
    assert [c.id for c in lineage.passed()] == [1, 0, 2]
    assert lineage.log_speed(1) == pytest.approx(math.log(2))
    assert lineage.speed(2).cases == pytest.approx({"short": 0.0})
    assert lineage.speed(3) is None
