"""Inputs that tasks have in common."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kagent_sandbox.draws import (
    draw_around,
    draw_huge,
    draw_masks,
    draw_moments,
    draw_runs,
    draw_weights,
    draw_wide,
    round_coarsely,
)

AROUND = {-2.0: 0, 0.0: 0, 5.0: 4}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(64, 40), (4, 16, 40), (3, 500), (1500,)])
def test_each_threshold_is_drawn_and_both_sides_of_it(dtype, shape):
    generator = torch.Generator().manual_seed(1)
    x = torch.full(shape, 9.0, dtype=dtype)
    found = draw_around(x, AROUND, generator)
    assert (found.shape, found.dtype) == (x.shape, x.dtype)
    eps = torch.finfo(dtype).eps
    at_2 = (s - 2.0 for s in (-2 / 3, -2 * eps, 0.0, 2 * eps, 2 / 3))
    at_0 = -1 / 3, -eps, 0.0, eps, 1 / 3
    at_5 = 10 / 3, 5 - 20 * eps, 5 + 20 * eps, 20 / 3
    expected = torch.tensor([9.0, *at_2, *at_0, *at_5], dtype=torch.float64).to(dtype)
    assert found.unique().tolist() == pytest.approx(expected.unique().tolist(), rel=eps)


def test_every_other_row_of_many_is_one_number_and_a_row_has_one_threshold():
    x = torch.full((64, 40), 9.0)
    found = draw_around(x, {1.0: 0, 100.0: 0}, torch.Generator().manual_seed(1))
    assert sum(len(row.unique()) == 1 for row in found) == 32
    assert sum(bool((row > 40).any()) for row in found) == 32


def test_what_has_no_rows_has_draws_too():
    generator = torch.Generator().manual_seed(1)
    assert draw_around(torch.zeros(0, 3), AROUND, generator).shape == (0, 3)
    drawn = {float(draw_around(torch.tensor(9.0), {6.0: 0}, generator)) for _ in range(99)}
    assert {4.0, 6.0, 8.0, 9.0} < drawn


@given(
    st.sampled_from([torch.bool, torch.int64, torch.uint8]),
    st.lists(st.integers(1, 5), max_size=3),
    st.booleans(),
    st.integers(0, 99),
)
def test_masks_keep_their_form_and_are_empty_only_if_they_may(dtype, shape, empty, seed):
    mask = torch.ones(shape, dtype=dtype)
    found = draw_masks(mask, torch.Generator().manual_seed(seed), empty=empty)
    assert (found.shape, found.dtype) == (mask.shape, dtype)
    assert ((found == 0) | (found == 1)).all()
    assert empty or not shape or (found != 0).any(-1).all()


def test_rows_of_a_mask_are_as_given_or_random_or_all_alike():
    mask = torch.ones(64, 40, dtype=torch.bool).tril()
    found = draw_masks(mask, torch.Generator().manual_seed(1))
    kept, full, none = (found == mask).all(1), found.all(1), ~found.any(1)
    assert [int(k.sum()) // 4 for k in (kept, full, none)] >= [4, 4, 4]
    others = found[~(kept | full | none)]
    assert 0.4 < others.double().mean() < 0.6


def test_random_rows_of_a_mask_are_also_one_run_up_to_an_end():
    """A tile that is masked throughout, as padding makes it, lies before others that are not."""
    found = draw_masks(torch.ones(400, 64).bool(), torch.Generator().manual_seed(1))
    assert (~found[:, :32].any(1) & found.any(1)).any()
    assert (~found[:, 32:].any(1) & found.any(1)).any()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8])
@pytest.mark.parametrize("shape", [(0,), (), (64, 40), (2000,)])
def test_wide_numbers_are_of_all_magnitudes_and_either_sign(dtype, shape):
    found = draw_wide(torch.zeros(shape, dtype=dtype), torch.Generator().manual_seed(1))
    assert (found.shape, found.dtype) == (shape, dtype)
    if found.numel() < 100:
        return
    info = torch.iinfo(dtype)
    most = min(info.max, 2**30)
    assert most / 2 < found.max() <= most
    assert (found == 0).any()
    assert (found == 1).any()
    if info.min:
        assert -most - 1 <= found.min() < -most / 2


@pytest.mark.parametrize("most", [1, 7, 15, 127, 128, 255, 448])
def test_numbers_away_from_a_threshold_are_no_ties_where_it_is_quantised(most):
    x = draw_around(torch.zeros(8, 64), {1e-8: 0}, torch.Generator().manual_seed(1))
    steps = (x.double() / 1e-8 * most).unique()
    assert ((steps - steps.round()).abs() < 0.4).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_few_numbers_are_multiples_of_a_power_of_two(dtype, scale):
    x = (torch.randn(64, 40, generator=torch.Generator().manual_seed(1)) * scale).to(dtype)
    found = round_coarsely(x)
    assert (found.shape, found.dtype) == (x.shape, x.dtype)
    few = found.abs().double().unique()
    step = few[few > 0].min()
    assert step.log2() == step.log2().floor()
    assert torch.equal(few / step, (few / step).round())
    assert 8 <= few.max() / step <= 16
    assert (found.double() - x.double()).abs().max() <= step / 2


def test_zeros_and_nothing_are_few_numbers():
    assert torch.equal(round_coarsely(torch.zeros(3, 4)), torch.zeros(3, 4))
    assert round_coarsely(torch.empty(0, 4)).shape == (0, 4)
    assert round_coarsely(torch.tensor(0.7)) == 0.6875


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (40, 8)])
def test_huge_numbers_are_finite_and_reach_the_largest(dtype, shape):
    most = torch.finfo(dtype).max
    x = draw_huge(shape, most, dtype, torch.Generator().manual_seed(1), torch.device("cpu"))
    assert (x.shape, x.dtype) == (shape, dtype)
    assert x.isfinite().all()
    assert x.abs().min() >= 2**10
    assert x.abs().max() == most


@pytest.mark.parametrize("shape", [(300,), (1, 300), (64, 40)])
def test_runs_are_of_all_lengths_up_to_the_longest(shape):
    generator, longest = torch.Generator().manual_seed(1), shape[-1] // 2
    draws = [draw_runs(shape, 8, longest, generator, torch.device("cpu")) for _ in range(60)]
    lengths = torch.stack(draws).sum(-1).flatten()
    assert lengths[lengths > 0].min() < 4
    assert longest // 2 < lengths.max() <= longest


@pytest.mark.parametrize("shape", [(300,), (1, 300), (64, 40)])
@pytest.mark.parametrize("kind", ["normal", "nonfinite"])
def test_gradient_and_moments_are_0_together_and_alone(kind, shape):
    generator = torch.Generator().manual_seed(1)
    drawn = draw_moments(kind, shape, 1.0, torch.float32, generator, torch.device("cpu"))
    grad, exp_avg, exp_avg_sq = (t == 0 for t in drawn)
    assert (exp_avg == exp_avg_sq).all()
    for found in (grad & exp_avg, grad & ~exp_avg, ~grad & exp_avg):
        assert found.any()


def test_weights_have_three_magnitudes_and_either_sign():
    found = draw_weights(torch.ones(90, dtype=torch.float16), torch.Generator().manual_seed(1))
    assert found.dtype == torch.float16
    assert found.float().unique().tolist() == pytest.approx([-1, 1e-3, 1, 100], rel=1e-3)
    assert not len(draw_weights(torch.ones(0), torch.Generator()))
