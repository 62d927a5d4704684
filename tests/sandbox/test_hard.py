"""Which hard inputs timed plans are checked on. That the checks find what they are for is shown by
corpus/beyond/103_sloppy_where_timed.
"""

from kagent_sandbox.hard import hard_cases
from kagent_sandbox.task import Case


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
