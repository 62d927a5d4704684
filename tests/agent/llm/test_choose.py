"""Which model is asked next."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kagent.llm.model_choice import FLOOR, choose, gains_of, shares_of
from kagent.llm.model_config import ModelConfig
from kagent.runs.lineage import Lineage, Origin
from kagent_sandbox.data.verdict import Comparison
from synthetic_lineages import SEED, child, failure, lineages

A, B, C = (ModelConfig(name) for name in "abc")


def by(candidate, model, seconds=10.0, dollars=0.01, calls=1):
    origin = Origin(model, seconds=seconds, dollars=dollars, calls=calls)
    return replace(candidate, proposal=replace(candidate.proposal, origin=origin))


def faster(number, against, ratio):
    versus = Comparison(str(against), ratio, ratio, ratio, 0.99, {"short": ratio})
    return child(number, 100.0 / ratio, versus=versus)


@st.composite
def written_lineages(draw):
    """Lineages whose proposals came from models, some of them unknown or without a price."""
    origins = st.builds(
        Origin,
        model=st.sampled_from(["a", "b", "gone", "ask/tell"]),
        calls=st.integers(1, 3),
        seconds=st.floats(0, 1000),
        dollars=st.none() | st.floats(0, 10),
    )
    made = Lineage()
    for c in draw(lineages()):
        origin = draw(st.none() | origins)
        made.record(replace(c, proposal=replace(c.proposal, origin=origin)))
    return made


weighted = st.lists(
    st.builds(ModelConfig, name=st.sampled_from("abcdef"), weight=st.floats(0.01, 100)),
    min_size=1,
    max_size=5,
    unique_by=lambda m: m.name,
)


@given(weighted, written_lineages(), st.booleans(), st.integers(0, 99))
def test_shares_are_probabilities_and_none_starves(models, lineage, bandit, seed):
    shares = shares_of(models, lineage, bandit=bandit)
    assert sum(shares.values()) == pytest.approx(1)
    total = sum(m.weight for m in models)
    for model in models:
        assert shares[model.name] >= FLOOR * model.weight / total * 0.999
        if not bandit:
            assert shares[model.name] == pytest.approx(model.weight / total)
    chosen = [choose(models, lineage, random.Random(seed), bandit=bandit) for _ in range(2)]
    assert chosen[0] == chosen[1]
    assert chosen[0] in {m.name for m in models}


@given(weighted, written_lineages(), st.randoms())
def test_the_order_of_models_changes_no_share(models, lineage, rng):
    mixed = rng.sample(models, len(models))
    assert shares_of(mixed, lineage, bandit=True) == pytest.approx(
        shares_of(models, lineage, bandit=True)
    )


def test_weights_are_followed():
    rng = random.Random(1)
    models = [replace(A, weight=3.0), B]
    chosen = [choose(models, Lineage([SEED]), rng, bandit=False) for _ in range(1000)]
    assert 700 < chosen.count("a") < 800


def test_gain_is_what_a_promotion_added():
    lineage = Lineage([SEED, by(faster(1, 0, 1.5), "a"), by(faster(2, 1, 1.2), "b"), failure(3)])
    assert gains_of(lineage) == {
        "a": pytest.approx(math.log(1.5)),
        "b": pytest.approx(math.log(1.2)),
    }


def test_gain_counts_for_its_cost():
    """Equal gains: the model that is ten times cheaper is asked more."""
    made = [SEED, by(faster(1, 0, 1.2), "a", dollars=0.1), by(faster(2, 1, 1.2), "b", dollars=0.01)]
    shares = shares_of([A, B], Lineage(made), bandit=True)
    assert shares["b"] > 1.5 * shares["a"]


def test_seconds_count_where_a_price_is_not_known():
    slow = by(faster(1, 0, 1.2), "a", dollars=0.0001, seconds=100.0)
    quick = by(faster(2, 1, 1.2), "b", dollars=None, seconds=10.0)
    shares = shares_of([A, B], Lineage([SEED, slow, quick]), bandit=True)
    assert shares["b"] > 1.5 * shares["a"]


def test_models_that_cost_nothing_are_asked_by_weight():
    free = by(faster(1, 0, 1.2), "a", dollars=0.0)
    assert shares_of([A, B], Lineage([SEED, free]), bandit=True) == {"a": 0.5, "b": 0.5}


def test_a_model_whose_calls_fail_is_asked_less_and_less():
    """What fails is no candidate, and so neither a gain nor a cost."""
    made = [SEED, *(by(faster(i, i - 1, 1.1), "a") for i in range(1, 6))]
    shares = [
        shares_of([A, B], Lineage(made), bandit=True, failed={"b": times}) for times in (0, 1, 3, 9)
    ]
    assert [s["b"] for s in shares] == sorted((s["b"] for s in shares), reverse=True)
    assert shares[0] == shares_of([A, B], Lineage(made), bandit=True)
    assert shares[-1]["b"] < 0.01
    assert sum(shares[-1].values()) == pytest.approx(1)
    plain = shares_of([A, B], Lineage(made), bandit=False, failed={"b": 3})
    assert plain == {"a": 0.5, "b": 0.5}


def test_a_model_that_was_never_asked_comes_before_one_that_never_gained():
    made = [SEED, *(by(failure(i), "a") for i in range(1, 6))]
    shares = shares_of([A, B], Lineage(made), bandit=True)
    assert shares["b"] > 2 * shares["a"]


@pytest.mark.parametrize("seed", range(5))
def test_in_a_run_each_is_tried_and_the_best_is_asked_most(seed):
    rng = random.Random(seed)
    lineage = Lineage([SEED])
    asked = []
    for number in range(1, 61):
        name = choose([A, B, C], lineage, rng, bandit=True)
        asked.append(name)
        won = rng.random() < {"a": 0.02, "b": 0.5, "c": 0.02}[name]
        made = faster(number, lineage.incumbent.id, 1.1) if won else failure(number)
        lineage.record(by(made, name))
    assert set(asked[:20]) == {"a", "b", "c"}
    later = asked[30:]
    assert later.count("b") > max(later.count("a"), later.count("c"))
    assert {"a", "c"} & set(later)
