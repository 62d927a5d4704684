import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kagent_sandbox.data.arguments import ResultSpec
from kagent_sandbox.judge.check import numerics
from sampling import examples

RESULT = ResultSpec(name="y", shape=(1,), k=2.0)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def draw(shape, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64) * scale


def share(out, ref, row_dims=1, result=RESULT):
    """Share of the tolerance of `out`, with correct rounding as torch's yardstick."""
    yardstick = numerics.measure_errors(ref.to(out.dtype), ref, row_dims)
    errors = numerics.measure_errors(out, ref, row_dims)
    return numerics.share(errors, numerics.allowed(yardstick, result, out.dtype))


@given(
    rows=st.integers(1, 40),
    width=st.integers(1, 400),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([1e-4, 1.0, 300.0]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=examples(60), deadline=None)
def test_rounding_passes(rows, width, dtype, scale, seed):
    ref = draw((rows, width), seed, scale)
    noisy = ref * (1 + torch.finfo(dtype).eps / 8 * torch.sign(draw(ref.shape, seed + 1)))
    assert share(ref.to(dtype), ref) <= 1
    assert share(noisy.to(dtype), ref) <= 1.5  # the bound on the bias is one of chance: see below


def test_the_bound_on_the_bias_is_one_of_chance():
    """3.5 sigma: of some 100,000 draws of the test above, this one is outside, by its bias."""
    ref = draw((4, 323), 5, 300.0)
    noise = torch.finfo(torch.bfloat16).eps / 8 * torch.sign(draw(ref.shape, 6))
    noisy = (ref * (1 + noise)).to(torch.bfloat16)
    errors = numerics.measure_errors(noisy, ref, 1)
    limit = numerics.allowed(
        numerics.measure_errors(ref.to(torch.bfloat16), ref, 1), RESULT, torch.bfloat16
    )
    assert errors.row <= limit.row
    assert errors.element <= limit.element
    assert limit.bias < errors.bias <= 1.05 * limit.bias


@given(st.floats(0.25, math.inf), st.sampled_from(DTYPES))
def test_where_torch_is_far_off_it_is_no_measure_for_others(error, dtype):
    """Its sum overflows, say: without a bound everything would be right."""
    ref = draw((8, 100), 3)
    yardstick = numerics.Errors(error, error, error)
    limit = numerics.allowed(yardstick, RESULT, dtype)
    assert max(limit.row, limit.element, limit.bias) < 0.6
    zeros = numerics.measure_errors(torch.zeros(8, 100, dtype=dtype), ref, 1)
    assert numerics.share(zeros, limit) > 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e30])
def test_magnitude_does_not_matter(dtype, scale):
    if dtype is torch.float16 and scale != 1.0:
        pytest.skip("outside of float16")
    ref = draw((32, 200), 1, scale)
    out = ref.to(dtype)
    assert share(out, ref) <= 1
    assert share(torch.zeros_like(out), ref) > 1
    assert share((ref * 1.05).to(dtype), ref) > 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 128), (1, 8192), (4096, 1), (3, 5, 700)])
def test_scale_error_of_one_part_in_a_thousand_is_caught(dtype, shape):
    ref = torch.softmax(draw(shape, 3), -1) if shape[-1] > 1 else draw(shape, 3)
    assert share(ref.to(dtype), ref) <= 1
    assert share((ref * 1.001).to(dtype), ref) > 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_mutants_of_softmax_fail(dtype):
    x = draw((50, 1000), 5)
    ref = torch.softmax(x, -1)
    lost_tail = ref.clone()
    lost_tail[:, -1] = 0
    short = torch.softmax(x[:, :-8], -1)
    missing = torch.cat([short, torch.zeros(50, 8, dtype=x.dtype)], -1)
    swapped = ref.clone()
    swapped[[0, 1]] = swapped[[1, 0]]
    mutants = {
        "zeros": torch.zeros_like(ref),
        "constant": torch.full_like(ref, 1e-3),
        "lost tail": lost_tail,
        "normalised without the tail": missing,
        "two rows swapped": swapped,
        "one NaN": torch.where(torch.arange(1000) == 7, math.nan, ref),
    }
    for name, mutant in mutants.items():
        assert share(mutant.to(dtype), ref) > 1, name


def test_misplaced_infinities_fail_and_placed_ones_do_not():
    ref = draw((8, 16))
    ref[2, 3], ref[4, :], ref[5, 1] = math.inf, math.nan, -math.inf
    out = ref.to(torch.bfloat16)
    assert share(out, ref) <= 1
    for index, value in [((2, 3), -math.inf), ((4, 1), 0.0), ((0, 0), math.inf), ((5, 1), 1e30)]:
        wrong = out.clone()
        wrong[index] = value
        assert share(wrong, ref) > 1
        assert numerics.find_worst(wrong, ref).index == index


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("magnitude", [0.0, 1e-300, 1e-75, 1e-46, 1e-40])
def test_what_vanishes_in_a_dtype_may_vanish(dtype, magnitude):
    """Rounding is right where all of a result is below the dtype's numbers; what is above is not,
    nor are zeros where it has digits.
    """
    ref = draw((3, 40)).abs() * magnitude
    torchs = numerics.measure_errors(torch.ones_like(ref).to(dtype), ref, 1)  # far off
    limit = numerics.allowed(torchs, RESULT, dtype)

    def fits(out):
        return numerics.share(numerics.measure_errors(out, ref, 1), limit) <= 1

    assert fits(ref.to(dtype))
    assert not fits(torch.full_like(ref, 2e-38).to(dtype))
    assert not fits(torch.zeros_like(ref, dtype=dtype) + 1)
    normal = (draw((3, 40)).abs() + 2) * torch.finfo(dtype).smallest_normal
    assert share(normal.to(dtype), normal) <= 1
    assert share(torch.zeros_like(normal, dtype=dtype), normal) > 1


def test_zero_rows_are_measured_against_typical_ones():
    ref = draw((100, 64))
    ref[10] = 0
    out = ref.to(torch.bfloat16)
    assert share(out, ref) <= 1
    out[10, 5] = 1e-2
    assert share(out, ref) > 1
    assert share(torch.zeros(3, 4), torch.zeros(3, 4, dtype=torch.float64)) == 0


def test_integers_must_be_equal_and_empty_results_pass():
    ref = torch.arange(12).reshape(3, 4)
    assert numerics.measure_errors(ref.clone(), ref.double(), 1).row == 0
    assert numerics.measure_errors(ref + (ref == 3), ref.double(), 1).row == math.inf
    assert numerics.measure_errors(torch.empty(0, 4), torch.empty(0, 4).double(), 1).row == 0


@given(seed=st.integers(0, 100), chunk=st.sampled_from([1, 64, 1000]))
@settings(max_examples=20, deadline=None)
def test_chunks_do_not_change_the_errors(seed, chunk):
    ref = draw((37, 61), seed)
    out = (ref + 1e-3 * draw(ref.shape, seed + 1)).to(torch.float32)
    whole = numerics.measure_errors(out, ref, 1)
    before = numerics.CHUNK_ELEMENTS["cpu"]
    numerics.CHUNK_ELEMENTS["cpu"] = chunk
    try:
        chunked = numerics.measure_errors(out, ref, 1)
    finally:
        numerics.CHUNK_ELEMENTS["cpu"] = before
    assert chunked.row == pytest.approx(whole.row, rel=1e-12)
    assert chunked.element == pytest.approx(whole.element, rel=1e-12)
    assert chunked.bias == pytest.approx(whole.bias, rel=1e-6)


def test_errors_follow_their_definitions():
    ref = draw((5, 3, 7), 9)
    out = ref * 1.01
    errors = numerics.measure_errors(out, ref, 2)
    assert errors.row == pytest.approx(0.01)
    assert errors.bias == pytest.approx(0.01)
    flat = ref.reshape(5, -1).abs()
    mean = flat.mean(1, keepdim=True)
    assert errors.element == pytest.approx(float((0.01 * flat / (flat + mean)).max()))
    assert numerics.measure_errors(out, ref, 0).row == pytest.approx(0.01)


def test_the_message_names_the_worst_element():
    ref = draw((4, 6))
    out = ref.float()
    out[2, 5] += 3
    errors = numerics.measure_errors(out, ref, 1)
    yardstick = numerics.measure_errors(ref.float(), ref, 1)
    limit = numerics.allowed(yardstick, RESULT, out.dtype)
    error = numerics.case_error("small", RESULT, errors, yardstick, out.dtype)
    text = numerics.describe(error, limit, numerics.find_worst(out, ref), RESULT, "task.toml")
    assert "[2, 5]" in text
    assert f"k = {RESULT.k:g} times torch's + floor = {RESULT.floor:g} eps, from task.toml" in text
    assert f"expected {float(ref[2, 5]):.6g}" in text
    assert error.share_of_tolerance > 1
    assert "that counts" not in text


def test_the_message_says_that_torch_is_too_far_off_to_be_a_measure():
    ref = draw((4, 6))
    own = numerics.Errors(5.8, 5.8, 0.0)
    errors = numerics.Errors(5.9, 5.9, 0.0)
    error = numerics.case_error("small", RESULT, errors, own, torch.float32)
    limit = numerics.allowed(own, RESULT, torch.float32)
    worst = numerics.find_worst(2 * ref, ref)
    text = numerics.describe(error, limit, worst, RESULT, "task.toml")
    assert "(torch's own 5.8, more than the 0.25 that counts; k = " in text


@pytest.mark.nightly
def test_a_gpus_kernels_make_the_same_sums():
    """By Triton's interpreter, which has to be chosen before they are imported."""
    done = subprocess.run(
        [sys.executable, Path(__file__).parents[3] / "gpu" / "error_sums.py"],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 224


def test_torchs_operations_decide_where_the_kernels_cannot(capsys):
    numerics._has_kernels.cache_clear()
    assert not numerics._has_kernels(torch.device("cpu"))
    assert "without the judge's own kernels" in capsys.readouterr().err


def test_numbers_whose_square_is_too_large_for_float64_are_measured():
    """A cumulative product in float64 may reach them."""
    ref = torch.full((4, 8), 1e200, dtype=torch.float64)
    errors = numerics.measure_errors(ref.float(), ref, row_dims=1)
    assert errors.row == math.inf
