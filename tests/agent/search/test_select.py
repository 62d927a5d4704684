import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kagent.runs.lineage import FREE, Lineage, Operator, Origin
from kagent.search.select import (
    FLOOR,
    IDLE,
    INCUMBENT_SHARE,
    KICK_IDEAS,
    KICKED_FROM,
    MOST_REPAIRS,
    REPAIR_TRIALS,
    arms,
    kicked_at,
    operator_shares,
    parent_shares,
    restored_ask,
    select,
    to_repair,
)
from kagent_sandbox.data.verdict import Comparison, Stage, Status
from simulated_evolution import RandomProposer, setting
from simulated_landscape import toy_task
from synthetic_lineages import OPERATORS, SEED, child, failure, lineages


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return setting(toy_task(tmp_path_factory.mktemp("task")), RandomProposer())


@given(lineages(), st.floats(0, 1))
@settings(deadline=None)
def test_parents_shares_are_a_distribution_that_favours_the_incumbent(lineage, progress):
    elites = lineage.elites()
    shares = parent_shares(lineage, elites, progress)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares[lineage.incumbent.id] >= INCUMBENT_SHARE
    assert set(shares) == {c.id for c in elites}
    others = [c for c in elites[1:] if lineage.children(c.id) == 0]
    better = [shares[c.id] for c in others]
    assert better == sorted(better, reverse=True)


@given(lineages())
@settings(deadline=None)
def test_operators_shares_are_a_distribution_with_a_floor(lineage):
    shares = operator_shares(lineage, OPERATORS)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert min(shares.values()) >= FLOOR


@given(lineages(), st.integers(0, 10_000))
@settings(deadline=None)
def test_selection_is_a_function_of_the_past_only(toy, lineage, number):
    one = select(toy, lineage, number)
    again = select(toy, Lineage(lineage), number)
    assert (one.operator, one.parent, one.elites) == (again.operator, again.parent, again.elites)
    assert one.rng().random() == again.rng().random()
    assert one.rng().random() != replace(one, attempt=1).rng().random()


def test_the_incumbent_is_the_parent_seven_times_in_ten(toy):
    best = child(1, 50.0, versus=Comparison("0", 2.0, 2.0, 2.0, 1.0))
    lineage = Lineage([SEED, best, *(child(i, 51.0 + i / 5) for i in range(2, 20))])
    quiet = replace(toy, operators=OPERATORS)
    chosen = Counter(select(quiet, lineage, i).parent.id for i in range(600))
    assert chosen.most_common(1)[0][0] == 1
    assert 0.7 < chosen[1] / 600 < 0.95
    assert len(chosen) > 2
    assert max(chosen) <= 8  # the best eight


def test_it_cools(toy):
    lineage = Lineage([SEED, child(1, 105.0), child(2, 120.0)])
    elites = lineage.elites()
    early, late = (parent_shares(lineage, elites, p) for p in (0.0, 1.0))
    assert late[2] < early[2]


def test_what_needs_nobody_is_not_drawn():
    assert set(operator_shares(Lineage([SEED]), tuple(Operator))).isdisjoint(FREE)


def test_what_succeeds_per_second_is_drawn_more():
    lineage = Lineage([SEED])
    for number in range(1, 21):
        operator = Operator.TUNE if number % 2 else Operator.CROSSOVER
        better = operator is Operator.TUNE
        lineage.record(child(number, 90.0 if better else 110.0, operator=operator))
    shares = operator_shares(lineage, OPERATORS[:2])
    assert shares[Operator.TUNE] > 3 * shares[Operator.CROSSOVER]
    stats = arms(lineage, OPERATORS)
    assert (stats[Operator.TUNE].tried, stats[Operator.TUNE].successes) == (10, 10)
    assert stats[Operator.CROSSOVER].successes == 0

    slow = Lineage([SEED])
    for number in range(1, 21):
        operator = Operator.TUNE if number % 2 else Operator.CROSSOVER
        cost = 10.0 if operator is Operator.TUNE else 1.0
        slow.record(child(number, 90.0, operator=operator, build_s=cost))
    shares = operator_shares(slow, OPERATORS[:2])
    assert shares[Operator.CROSSOVER] > 3 * shares[Operator.TUNE]


def at_the_roofline(candidate, share):
    verdict = candidate.verdict
    timings = tuple(replace(t, roofline_share=share) for t in verdict.timings)
    return replace(candidate, verdict=replace(verdict, timings=timings))


@pytest.mark.parametrize(("share", "ideas"), [(0.5, 2), (0.94, 2), (0.96, 1)])
def test_two_ideas_while_there_is_room(toy, share, ideas):
    lineage = Lineage([at_the_roofline(SEED, share)])
    ask = select(toy, lineage, 0)
    assert ask.ideas == ideas
    assert replace(restored_ask(toy, lineage, ask.record()), lineage=ask.lineage) == ask


def idle(count):
    """A search that found nothing better than its second candidate, `count` evaluations later."""
    lineage = Lineage([SEED, child(1, 50.0, versus=Comparison("0", 2.0, 2.0, 2.0, 1.0))])
    for number in range(2, 2 + count):
        lineage.record(child(number, 60.0, versus=Comparison("1", 0.8, 0.8, 0.8, 0.0)))
    return lineage


def test_a_search_that_stands_still_is_kicked_from_a_hundred_evaluations_on(toy):
    before, after = idle(KICKED_FROM - 2), idle(KICKED_FROM - 1)
    assert kicked_at(before) is None
    assert kicked_at(after) == len(after)
    ask = select(toy, after, 7)
    assert (ask.operator, ask.parent.id, ask.ideas) == (Operator.STRUCTURE, 1, KICK_IDEAS)
    assert replace(restored_ask(toy, after, ask.record()), lineage=ask.lineage) == ask
    # What comes of it are the parents from now on, though all of it is behind the incumbent.
    start = len(after)
    after.record(child(start, 70.0, versus=Comparison("1", 0.7, 0.7, 0.7, 0.0)))
    assert {select(toy, after, n).parent.id for n in range(50)} == {start}
    assert select(toy, after, 0).ideas == 2
    # A failure of the line is repaired; a new incumbent ends it.
    after.record(failure(start + 1, parents=(start,)))
    assert select(toy, after, 0).parent.id == start + 1
    after.record(child(start + 2, 40.0, versus=Comparison("1", 1.2, 1.2, 1.2, 1.0)))
    assert kicked_at(after) is None


def test_a_line_that_stands_still_too_is_given_up_for_another_kick(toy):
    lineage = idle(KICKED_FROM - 1)
    start = len(lineage)
    for number in range(start, start + IDLE + 1):  # the first one is a gain of the line's own
        lineage.record(child(number, 70.0, versus=Comparison("1", 0.7, 0.7, 0.7, 0.0)))
    assert kicked_at(lineage) == len(lineage)
    constants = replace(toy, operators=(Operator.TUNE,))
    assert select(constants, lineage, 0).ideas != KICK_IDEAS  # the tuner is not kicked


def test_a_failure_of_a_good_parent_is_repaired_once(toy):
    lineage = Lineage([SEED, failure(1)])
    ask = select(toy, lineage, 2)
    assert (ask.operator, ask.parent.id) == (Operator.REPAIR, 1)
    assert to_repair(lineage, [ask]) is None  # under way
    lineage.record(failure(2, parents=(1,), operator=Operator.REPAIR))
    assert to_repair(lineage, []) is None  # done, and the repair fails in the same way
    lineage.record(failure(3))
    assert to_repair(lineage, []).id == 3


def test_a_repair_is_repaired_while_the_error_changes(toy):
    lineage = Lineage([SEED, failure(1)])
    wrong = failure(2, parents=(1,), operator=Operator.REPAIR, status=Status.INCORRECT_NUMERICAL)
    lineage.record(wrong)
    assert to_repair(lineage, []).id == 2
    lineage.record(replace(wrong, proposal=replace(wrong.proposal, id=3, parents=(2,))))
    assert to_repair(lineage, []) is None


def chain_of(*errors):
    """A seed, a failure, and a repair of the one before for each further error."""
    lineage = Lineage([SEED])
    for number, (stage, status, message) in enumerate(errors, 1):
        operator = Operator.REPAIR if number > 1 else Operator.STRUCTURE
        broken = failure(number, parents=(number - 1,), operator=operator, status=status)
        verdict = replace(broken.verdict, stage=stage, message=message)
        lineage.record(replace(broken, verdict=verdict))
    return lineage


STEPS = (
    (Stage.BUILD, Status.COMPILE_ERROR, "no such name"),
    (Stage.BUILD, Status.COMPILE_ERROR, "no such layout"),
    (Stage.CHECK, Status.TIMEOUT, "hangs"),
    (Stage.CHECK, Status.INCORRECT_NUMERICAL, "wrong"),
    (Stage.MEASURE, Status.INCORRECT_NUMERICAL, "wrong"),
    (Stage.MEASURE, Status.GPU_FAULT, "fault"),
)


@pytest.mark.parametrize("failures", range(1, 7))
def test_four_repairs_in_a_chain_while_each_fails_in_a_way_of_its_own(failures):
    found = to_repair(chain_of(*STEPS[:failures]), [])
    assert (found.id if found else None) == (failures if failures <= MOST_REPAIRS else None)


def test_a_chain_ends_where_an_earlier_error_comes_back():
    one, other = STEPS[0], STEPS[2]
    assert to_repair(chain_of(one, other), []).id == 2
    assert to_repair(chain_of(one, other, one), []) is None


def test_repairs_that_repeat_what_is_known_count_against_repairs():
    lineage = Lineage([SEED])
    for number in range(1, 2 * REPAIR_TRIALS, 2):
        lineage.record(failure(number))
        known = {"status": Status.DUPLICATE, "origin": Origin("some-model")}
        lineage.record(failure(number + 1, parents=(number,), operator=Operator.REPAIR, **known))
    lineage.record(failure(len(lineage)))
    assert to_repair(lineage, []) is None


def test_a_chain_counts_once_towards_the_rate_of_success():
    """Its first steps fail by their nature: they are no reason to give repairs up."""
    lineage = chain_of(*STEPS[: MOST_REPAIRS + 1])
    assert to_repair(lineage, []) is None
    lineage.record(failure(len(lineage)))
    assert to_repair(lineage, []).id == len(lineage) - 1


def test_a_repair_that_comes_back_as_a_duplicate_is_not_asked_for_again(toy):
    model = Origin("some-model")
    lineage = Lineage([SEED, failure(1, origin=model)])
    asked = []
    while lineage.counted < toy.budget and len(asked) < 2 * toy.budget:
        ask = select(toy, lineage, len(asked))
        asked.append(ask.operator)
        again = failure(
            len(lineage),
            parents=(ask.parent.id,),
            operator=ask.operator,
            status=Status.DUPLICATE,
            origin=model,
        )
        lineage.record(again)
    assert asked.count(Operator.REPAIR) == 1
    assert len(asked) == toy.budget - 1


@pytest.mark.parametrize(
    "broken",
    [
        failure(1, status=Status.DUPLICATE),
        failure(1, status=Status.SUSPECT),
        failure(1, parents=(), operator=Operator.SEED),
        failure(1, parents=()),
    ],
)
def test_some_failures_are_not_repaired(broken):
    assert to_repair(Lineage([SEED, broken]), []) is None


def test_repairs_stop_where_they_do_not_succeed():
    lineage = Lineage([SEED])
    for number in range(1, 2 * REPAIR_TRIALS, 2):
        assert to_repair(lineage, []) is None
        lineage.record(failure(number))
        assert to_repair(lineage, []).id == number
        lineage.record(failure(number + 1, parents=(number,), operator=Operator.REPAIR))
    lineage.record(failure(len(lineage)))
    assert to_repair(lineage, []) is None


def test_without_repair_in_its_powers_a_proposer_is_not_asked_for_it(toy):
    quiet = replace(toy, operators=OPERATORS)
    assert select(quiet, Lineage([SEED, failure(1)]), 2).operator is not Operator.REPAIR


def test_nothing_to_select_from(toy):
    with pytest.raises(ValueError, match="no candidate passed"):
        select(toy, Lineage([failure(0, parents=())]), 1)


def test_shuffled_hashes_do_not_matter(toy):
    """Draws come from the seed and the id, never from the process."""
    lineage = Lineage([SEED, *(child(i, 100.0 + i) for i in range(1, 9))])
    random.seed(1)
    one = [select(toy, lineage, i).parent.id for i in range(20)]
    random.seed(2)
    assert one == [select(toy, lineage, i).parent.id for i in range(20)]
