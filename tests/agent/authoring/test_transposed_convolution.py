"""Transposed convolutions as others: the same numbers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kagent.authoring.inductor.decompositions import plain_loops
from kagent.authoring.inductor.transposed_convolution import without_transposition
from sampling import examples

FUNCTIONS = {1: torch.conv_transpose1d, 2: torch.conv_transpose2d, 3: torch.conv_transpose3d}


@st.composite
def convolutions(draw):
    n = draw(st.integers(1, 3))
    dims = []
    for _ in range(n):
        k, s = draw(st.integers(1, 5)), draw(st.integers(1, 3))
        p, o = draw(st.integers(0, 3)), draw(st.integers(0, s - 1))
        least = max(1, (2 * p - k - o) // s + 2)  # as many places as give a result
        dims.append((draw(st.integers(least, least + 4)), k, s, p, o))
    return *(draw(st.integers(1, 3)) for _ in range(4)), dims


@settings(max_examples=examples(200), deadline=None)
@given(convolutions(), st.booleans())
def test_it_is_the_transposed_convolution(sizes, biased):
    batch, groups, channels, outputs, dims = sizes
    places, window, stride, padding, more = zip(*dims, strict=True)
    x = torch.randn(batch, groups * channels, *places, dtype=torch.float64)
    weight = torch.randn(groups * channels, outputs, *window, dtype=torch.float64)
    bias = torch.randn(groups * outputs, dtype=torch.float64) if biased else None
    rest = (stride, padding, [1] * len(dims), True, more, groups)
    found = without_transposition(x, weight, bias, *rest)
    if found is NotImplemented:
        return
    expected = FUNCTIONS[len(dims)](x, weight, bias, stride, padding, more, groups)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_list_may_have_one_number_for_all_dimensions():
    x, weight = torch.randn(1, 2, 4, 5), torch.randn(2, 3, 3, 3)
    found = without_transposition(x, weight, None, [2], [1], [1], True, [1], 1)
    expected = torch.conv_transpose2d(x, weight, None, 2, 1, 1)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("window", "stride", "padding", "dilation", "transposed"),
    [
        (3, 2, 1, 1, False),
        (3, 2, 1, 2, True),
        (2, 5, 1, 1, True),  # windows of mostly zeros
    ],
)
def test_others_stay_as_they_are(window, stride, padding, dilation, transposed):
    x, weight = torch.randn(2, 4, 8, 8), torch.randn(4, 4, window, window)
    pairs = [[v] * 2 for v in (stride, padding, dilation)]
    found = without_transposition(x, weight, None, *pairs, transposed, [0, 0], 1)
    assert found is NotImplemented


@pytest.mark.parametrize(
    ("window", "stride", "padding"), [(3, 2, 1), (4, 2, 1), (5, 2, 2), (3, 1, 0)]
)
def test_usual_ones_are_rewritten(window, stride, padding):
    x, weight = torch.randn(1, 2, 4, 4), torch.randn(2, 3, window, window)
    pairs = [[v] * 2 for v in (stride, padding, 1)]
    found = without_transposition(x, weight, None, *pairs, True, [stride - 1] * 2, 1)
    assert found is not NotImplemented


def test_a_librarys_has_one_group():
    table = plain_loops("gpu", ["aten::convolution"])
    x, weight = torch.randn(2, 4, 8, 8), torch.randn(4, 2, 3, 3)
    numbers = ([2, 2], [1, 1], [1, 1], True, [0, 0])
    rewrite = table[torch.ops.aten.convolution.default]
    assert rewrite(x, weight, None, *numbers, 2) is NotImplemented
    torch.testing.assert_close(
        rewrite(x, weight, None, *numbers, 1),
        torch.conv_transpose2d(x, weight, None, 2, 1),
        rtol=1e-4,
        atol=1e-5,
    )
