"""Which hard inputs timed plans are checked on. That the checks find what they are for is shown by
corpus/beyond/103_sloppy_where_timed and corpus/cheats/67_warm_up.
"""

import random

from kagent_sandbox.data.case import Case
from kagent_sandbox.judge.timing.hard_inputs import (
    OTHER_CHECKS,
    SLACK,
    hard_cases,
    recheck_on_hard_inputs,
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


class Recorder:
    """Stands for a table of timed blocks; notes what it is asked to check."""

    def __init__(self, timed):
        self.case = timed
        self.checked = []

    def check(self, side, case, slack):
        self.checked.append((side, case.inputs, case.scale, slack))


def test_rows_of_every_kind_are_always_among_them():
    """A kernel that is wrong for one kind of row in ten would mostly pass a choice of kinds."""
    kinds = ("mixed", "nonfinite", "ramp", "masked", "spiked", "constant")
    checks = [case(kind, inputs=kind, scale=s) for kind in kinds for s in (0.1, 1.0)]
    tables = {n: Recorder(case(n)) for n in ("a", "b", "c")}
    recheck_on_hard_inputs(tables, "a", checks, random.Random(1))
    for table in tables.values():
        names = [inputs for _, inputs, _, _ in table.checked]
        assert names[:2] == ["mixed", "nonfinite"]
        assert len(names) == 3


def test_other_distributions_are_a_few_over_all_cases():
    kinds = ("mixed", "ramp", "masked")
    checks = [case(kind, inputs=kind) for kind in kinds]
    tables = {n: Recorder(case(n)) for n in "abcdefgh"}
    recheck_on_hard_inputs(tables, "a", checks, random.Random(1))
    names = [inputs for t in tables.values() for _, inputs, _, _ in t.checked]
    assert names.count("mixed") == 8
    assert len(names) == 8 + OTHER_CHECKS
    without = {n: Recorder(case(n)) for n in "abcdefgh"}
    recheck_on_hard_inputs(without, "a", checks[1:], random.Random(1))
    assert all(len(t.checked) == 1 for t in without.values())


def test_timed_cases_are_checked_on_hard_inputs_where_there_are_some():
    checks = [case("a"), case("b", inputs="masked"), case("c", dtype="bfloat16")]
    tables = {t.case.name: t for t in (Recorder(case("big")), Recorder(case("low", "bfloat16")))}
    recheck_on_hard_inputs(tables, "a", checks, random.Random(1))
    assert tables["big"].checked == [("a", "masked", 1.0, SLACK)]
    assert tables["low"].checked == []
