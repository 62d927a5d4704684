"""Quotients of sizes."""

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st
from kagent.authoring.inductor.exact_quotients import exact_quotient
from torch.utils._sympy.functions import FloorDiv

B, H, W = SYMBOLS = sympy.symbols("B H W", integer=True, positive=True)
sizes = st.recursive(
    st.sampled_from(SYMBOLS) | st.integers(-4, 4).map(sympy.Integer),
    lambda e: (
        st.tuples(e, e).map(lambda p: p[0] * p[1]) | st.tuples(e, e).map(lambda p: p[0] + p[1])
    ),
    max_leaves=6,
)


@given(sizes, sizes)
def test_a_quotient_times_its_divisor_is_the_dividend(one, other):
    found = exact_quotient(sympy.expand(one * other), other)
    if found is not None:
        assert sympy.expand(found * other - one * other) == 0


@given(sizes, sizes)
def test_a_quotient_is_the_floor_wherever_the_divisor_is_not_0(one, other):
    found = exact_quotient(sympy.expand(one), other)
    values = dict(zip(SYMBOLS, (2, 5, 7), strict=True))
    if found is not None and other.subs(values) != 0:
        assert found.subs(values) == one.subs(values) // other.subs(values)


@pytest.mark.parametrize(
    ("dividend", "divisor", "expected"),
    [
        (sympy.expand(B * (H - 2) * (W - 2)), (H - 2), sympy.expand(B * (W - 2))),
        (sympy.expand(B * (H - 2) * (W - 2)), B, sympy.expand((H - 2) * (W - 2))),
        (sympy.expand(B * (H - 2)), H, None),
        (2 * H + 1, sympy.Integer(2), None),
        (B * FloorDiv(H, 2) + FloorDiv(H, 2), FloorDiv(H, 2), None),
    ],
)
def test_examples(dividend, divisor, expected):
    found = exact_quotient(dividend, divisor)
    assert (None if found is None else sympy.expand(found)) == expected
