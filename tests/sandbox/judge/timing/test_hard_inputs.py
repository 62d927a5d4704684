"""Which hard inputs timed plans are checked on. That the checks find what they are for is shown by
corpus/beyond/103_sloppy_where_timed and corpus/cheats/67_warm_up.
"""

import random

from kagent_sandbox.data.case import Case
from kagent_sandbox.judge.timing.hard_inputs import (
    OTHER_CHECKS,
    choose_hard_cases,
    hard_cases,
)


def case(name, dtype="float32", inputs="normal", scale=1.0, **dims):
    return Case(name=name, dtype=dtype, inputs=inputs, scale=scale, **dims)


def test_timed_shapes_get_the_distributions_of_checks():
    timed = case("big", M=4096, N=1024)
    checks = [
        case("a", M=3, N=5),
        case("b", inputs="masked", M=3, N=7),
        case("c", scale=30.0, M=3, N=9),
        case("d", inputs="masked", M=4, N=9),
        case("e", dtype="bfloat16", inputs="ramp", M=4, N=9),
    ]
    found = hard_cases(timed, checks)
    assert [(c.inputs, c.scale) for c in found] == [("masked", 1.0), ("normal", 30.0)]
    assert all(c.dims == timed.dims and c.dtype == timed.dtype for c in found)
    assert len({c.name for c in (timed, *found)}) == 3


def test_another_dtype_is_better_than_none():
    found = hard_cases(case("big"), [case("a", dtype="bfloat16", inputs="ramp")])
    assert [c.inputs for c in found] == ["ramp"]


def test_nothing_hard_is_no_error():
    assert hard_cases(case("big"), [case("a")]) == []


def test_rows_of_every_kind_are_always_among_them():
    """A kernel that is wrong for one kind of row in ten would mostly pass a choice of kinds."""
    kinds = ("mixed", "nonfinite", "ramp", "masked", "spiked", "constant")
    checks = [case(kind, inputs=kind, scale=s) for kind in kinds for s in (0.1, 1.0)]
    timed = [case(n) for n in "abc"]
    chosen = choose_hard_cases(timed, checks, random.Random(1))
    for each in timed:
        names = [hard.inputs for of, hard in chosen if of == each]
        assert names[:2] == ["mixed", "nonfinite"]
        assert len(names) == 3


def test_other_distributions_are_a_few_over_all_cases():
    kinds = ("mixed", "ramp", "masked")
    checks = [case(kind, inputs=kind) for kind in kinds]
    timed = [case(n) for n in "abcdefgh"]
    names = [hard.inputs for _, hard in choose_hard_cases(timed, checks, random.Random(1))]
    assert names.count("mixed") == 8
    assert len(names) == 8 + OTHER_CHECKS
    without = choose_hard_cases(timed, checks[1:], random.Random(1))
    assert [of for of, _ in without] == timed


def test_timed_cases_are_checked_on_hard_inputs_where_there_are_some():
    checks = [case("a"), case("b", inputs="masked"), case("c", dtype="bfloat16")]
    big, low = case("big"), case("low", "bfloat16")
    ((of, hard),) = choose_hard_cases([big, low], checks, random.Random(1))
    assert of == big
    assert (hard.inputs, hard.scale) == ("masked", 1.0)
