"""Which card an ask gets."""

import dataclasses
import itertools
import math
from collections import Counter

import h100_run
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kagent.prompting import Prompter
from kagent.prompting.card_choice import (
    MOST_REMEMBERED,
    PRIOR_GAIN,
    PRIOR_TRIES,
    choose_cards,
    worths,
)
from kagent.prompting.cards import (
    Card,
    FrontMatter,
    Place,
    helps,
    is_decisive,
    load_cards,
    suits,
)
from kagent.prompting.templates import folders
from kagent.runs.ideas import GAIN, MOST_GAIN, Effect, Regime, effects, total
from kagent.runs.lineage import Candidate, Lineage, Operator, Origin, Proposal
from kagent.tasks import find_task, seeds_of, task_names
from synthetic_lineages import SEED, failure, passed

CARDS = load_cards([p / "cards" for p in folders(None)])


def place(task="softmax", target="sm_90a", capability=90, languages=("triton", "cuda")):
    return Place(task, target, capability, languages)


DECK = [c for c in CARDS.values() if suits(c, place())]


def choose_card(ask, deck, helpful):
    """The card of an ask for one idea."""
    found = choose_cards(ask, deck, helpful)
    return found[0] if found else None


def tried(lineage, card, time_us, parent=3):
    """One more proposal with that card; the parent takes 100 µs."""
    number = len(lineage)
    origin = Origin("m", card)
    source = f"x = {number}"
    proposal = Proposal(number, (parent,), Operator.STRUCTURE, "x", source, "", origin=origin)
    lineage.record(Candidate(proposal, passed({"c": time_us})))


@given(st.integers(0, 1000), st.integers(1, 8))
def test_neighbours_in_flight_get_different_cards(first, hands):
    lineage = h100_run.history()
    dealt = [
        choose_card(h100_run.ask(number=first + i, lineage=lineage, in_flight=hands), DECK, DECK)
        for i in range(hands)
    ]
    assert len({c.name for c in dealt}) == hands


def test_neighbours_with_different_parents_get_different_cards():
    lineage = h100_run.history()
    parents = [3, 2, 1, 0]
    dealt = [
        choose_card(h100_run.ask(parent=p, number=i, lineage=lineage), DECK, DECK)
        for i, p in enumerate(parents)
    ]
    assert len({c.name for c in dealt}) == 4


def test_a_deal_is_the_same_every_time_and_over_many_all_cards_come():
    lineage = h100_run.history()
    asks = [h100_run.ask(number=i, lineage=lineage) for i in range(400)]
    dealt = [choose_card(b, DECK, DECK) for b in asks]
    assert dealt == [choose_card(b, DECK, DECK) for b in asks]
    names = {c.name for c in dealt}
    assert names == {c.name for c in DECK} - {"persistent", "waves"}  # tried on this parent


def test_a_second_attempt_may_get_another_card():
    ask = h100_run.ask()
    names = {choose_card(dataclasses.replace(ask, attempt=i), DECK, DECK).name for i in range(20)}
    assert len(names) > 1


def test_cards_that_were_not_tried_on_the_parent_come_first():
    lineage = h100_run.history()
    for card in DECK[:-1]:
        tried(lineage, card.name, 200.0)
    for number in range(20):
        assert choose_card(h100_run.ask(number=number, lineage=lineage), DECK, DECK) is DECK[-1]
    tried(lineage, DECK[-1].name, 200.0)
    # all were tried: once more
    assert choose_card(h100_run.ask(lineage=lineage), DECK, DECK) in DECK


def test_what_has_helped_comes_more_often():
    lineage = h100_run.history()
    good, bad = DECK[0].name, DECK[1].name
    for _ in range(8):
        tried(lineage, good, 0.01, parent=0)
        tried(lineage, bad, 1e9, parent=0)
    worth = worths(lineage)
    assert worth[good] == pytest.approx((4 * PRIOR_GAIN + 8 * MOST_GAIN) / 12)
    assert worth[bad] == pytest.approx(4 * PRIOR_GAIN / 12)
    two = [c for c in DECK if c.name in (good, bad)]
    counts = Counter(
        choose_card(h100_run.ask(number=i, lineage=lineage, in_flight=1), two, two).name
        for i in range(300)
    )
    assert counts[good] > 5 * counts[bad] > 0


def test_as_many_cards_as_ideas_and_no_card_twice():
    ask = dataclasses.replace(h100_run.ask(), ideas=2)
    for number in range(40):
        one, two = choose_cards(dataclasses.replace(ask, id=number), DECK, DECK)
        assert one is not two
    assert choose_cards(ask, DECK, DECK[:1]) == (DECK[0],)
    assert len(choose_cards(dataclasses.replace(ask, ideas=3), DECK, DECK)) == 3


def test_earlier_runs_count_as_eight_tries_at_most():
    prior = Effect("a", Regime.ALL, 80, 80, 40, gained=16.0)
    short = Effect("a", Regime.SHORT, 80, 80, 0)
    worth = worths(h100_run.history(), [prior, short])["a"]
    assert worth == pytest.approx(
        (PRIOR_TRIES * PRIOR_GAIN + MOST_REMEMBERED * 0.2) / (PRIOR_TRIES + MOST_REMEMBERED)
    )


def test_what_gained_more_comes_more_often_than_what_was_faster_as_often():
    """Failures and slower ones gain nothing, here and in earlier runs."""
    lineage = Lineage([SEED])  # 100 µs
    for _ in range(4):
        tried(lineage, "much", 70.0, parent=0)
        tried(lineage, "little", 98.0, parent=0)
        tried(lineage, "slower", 1e6, parent=0)
        lineage.record(failure(len(lineage), origin=Origin("m", "fails")))
    worth = worths(lineage)
    assert worth["much"] == pytest.approx((PRIOR_GAIN + math.log(100 / 70)) / 2)
    assert worth["little"] == pytest.approx((PRIOR_GAIN + math.log(100 / 98)) / 2)
    assert worth["slower"] == worth["fails"] == PRIOR_GAIN / 2
    assert worths(Lineage(), effects(lineage)) == pytest.approx(worth)


SUMS = st.tuples(st.integers(0, 60), st.floats(0, 1)).map(lambda p: (p[0], p[1] * p[0] * MOST_GAIN))


@given(SUMS, st.floats(0, 5))
def test_more_gain_never_lowers_a_card_and_no_tries_leave_it_at_the_prior(found, more):
    tries, gained = found

    def worth(gained):
        prior = Effect("a", Regime.ALL, tries, tries, 0, gained=gained)
        return worths(Lineage(), [prior])["a"]

    assert worth(gained + more) >= worth(gained)
    low, high = sorted((PRIOR_GAIN, gained / tries if tries else PRIOR_GAIN))
    assert low - 1e-12 <= worth(gained) <= high + 1e-12
    if not tries:
        assert worth(0.0) == PRIOR_GAIN
    assert worths(Lineage()) == {}


def test_records_without_the_sum_of_gains_have_what_follows_from_the_others():
    """Runs of before it was kept are remembered, too."""
    assert Effect("a", Regime.ALL, 9, 9, 4, log_sum=0.5).gain_sum == 0.5
    assert Effect("a", Regime.ALL, 9, 9, 4, log_sum=-3.0).gain_sum == pytest.approx(4 * GAIN)
    assert Effect("a", Regime.ALL, 9, 9, 4, log_sum=9.0).gain_sum == pytest.approx(4 * MOST_GAIN)
    assert Effect("a", Regime.ALL, 9, 9, 0, log_sum=-3.0).gain_sum == 0.0
    old, new = (Effect("a", Regime.ALL, 2, 2, 1, 0.2), Effect("a", Regime.ALL, 2, 1, 1, gained=0.3))
    assert total([old, new])[0].gained == pytest.approx(0.5)


def test_without_a_card_that_helps_there_is_none():
    assert choose_card(h100_run.ask(), DECK, []) is None
    assert choose_card(h100_run.ask(), [], []) is None
    only = DECK[3]
    assert choose_card(h100_run.ask(), DECK, [only]) is only


def card(**front):
    fields = {"title": "t", "bound": ("memory",), "languages": ("triton",), **front}
    return Card("c", FrontMatter(**fields), {})


def test_cards_suit_runs_by_task_target_and_language():
    assert suits(card(), place())
    assert not suits(card(languages=("cpp",)), place())
    assert not suits(card(tasks=("gelu",)), place())
    assert not suits(card(tasks="any except gelu, softmax"), place())
    assert suits(card(tasks="any except gelu"), place())
    assert not suits(card(capability=90), place(target="sm_80", capability=80))
    assert not suits(card(targets=("sm_90a",)), place(target="sm_100", capability=100))
    assert suits(card(tasks="any"), place(task="a_task_of_my_own"))


def test_cards_help_by_what_bounds_and_what_is_known():
    assert helps(card(), {"memory"}, set())
    assert not helps(card(), {"compute"}, set())
    assert not helps(card(needs=("spills",)), {"memory"}, {"long_rows"})
    assert helps(card(needs=("spills", "long_rows")), {"memory"}, {"long_rows"})


def test_a_technique_that_the_parent_uses_is_not_proposed_as_a_change():
    prompter = Prompter(find_task("softmax"), "gpu", "sm_90a", h100_run.RUN_FACTS)
    lineage = h100_run.history()
    used = {c.name for c in DECK if c.is_used_in(lineage[2].proposal.source)}
    assert "exp2" in used
    assert {"cluster_rows", "persistent", "bulk_copies", "pipelining"}.isdisjoint(used)
    for number in range(60):
        ask = h100_run.ask(parent=2, number=number, lineage=lineage)
        assert prompter.write(ask).card not in used
    rewrites = {
        prompter.write(h100_run.ask(Operator.REWRITE, 2, n, lineage)).card for n in range(60)
    }
    assert rewrites & used  # a new file may use what the parent used


def test_no_seed_uses_everything():
    for name in task_names():
        task = find_task(name)
        for seed in seeds_of(task):
            cpu = seed.language == "cpp"
            where = place(name, "cpu" if cpu else "sm_90a", 0 if cpu else 90, (seed.language,))
            deck = [c for c in CARDS.values() if suits(c, where)]
            new = [c.name for c in deck if not c.is_used_in(seed.source())]
            assert len(new) >= 3, (name, seed.name, new)


def test_decisive_cards_come_first_while_the_task_is_far_from_its_ceiling():
    lineage = h100_run.history()
    decisive = DECK[3:5]
    asks = [h100_run.ask(number=i, lineage=lineage, in_flight=2) for i in range(8)]
    dealt = [choose_cards(a, DECK, DECK, decisive)[0].name for a in asks]
    assert set(dealt) == {c.name for c in decisive}
    assert all(one != other for one, other in itertools.pairwise(dealt))
    for card in decisive:
        tried(lineage, card.name, 200.0)
    later = choose_cards(h100_run.ask(lineage=lineage), DECK, DECK, decisive)[0]
    assert later not in decisive  # not again on this parent, while others are left


def test_a_triton_parent_far_from_the_ceiling_is_shown_gluon():
    where = place("attention", languages=("triton", "gluon", "cuda"))
    suiting = {n: c for n, c in CARDS.items() if suits(c, where)}
    decisive = {n for n, c in suiting.items() if is_decisive(c, where, {"compute"})}
    assert "gluon_attention" in decisive
    assert not {n for n, c in suiting.items() if is_decisive(c, where, {"memory"})}
    elsewhere = place("attention", "sm_100", 100)
    assert not is_decisive(CARDS["gluon_attention"], elsewhere, {"compute"})
