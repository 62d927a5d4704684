"""Numbers with which an operation compares or clamps: cases have inputs on both sides and there."""

import pytest
import torch
from kagent.authoring.draft.cases import make_draft
from kagent.authoring.draft.draft import (
    COARSE,
    FAINT,
    NONFINITE,
    SHIFTED,
    THRESHOLDS,
    UNORDERED,
    WEIGHTS,
)
from kagent.authoring.draft.reference import reference_py
from kagent.authoring.draft.rooms import find_rooms
from kagent.authoring.new_task import make_task
from kagent.authoring.tracing.operation import make_operation
from kagent.candidate_file import check_file
from kagent_sandbox.data.case import Case
from kagent_sandbox.data.verdict import Rejected
from torch.nn import functional as F


def drafted(function, *inputs):
    return make_draft(next(find_rooms(make_operation(function, inputs))))


def drawn(draft, dtype="float32", kind=THRESHOLDS, seed=3):
    """A draw of the first case of a kind: around thresholds, or another."""
    case = next(c for c in draft.cpu.check if c.inputs == kind)
    space = {}
    exec(reference_py(draft), space)
    given = Case(name="c", dtype=dtype, inputs=kind, **case.sizes)
    return space["inputs"](given, torch.Generator().manual_seed(seed), torch.device("cpu"))


def activations(x):
    """Branches at -3, -0.5, 0.5, 1, 3, 6 and 20."""
    found = F.hardshrink(x, 0.5), F.threshold(x, 1.0, 2.0), F.relu6(x), F.softplus(x)
    return *found, F.hardswish(x)


def comparisons(x):
    """Branches at -164, -0.5, 1e-3, 2, 2.5 and 900."""
    step = torch.where(x > 2.5, x - 1, x)
    capped = torch.maximum(x * 0.25 + 1, torch.tensor(-40.0)), x.clip(max=900)
    return step, *capped, x.masked_fill(x < 1e-3, 0), x[:, 1:].clamp(-0.5, 2)


@pytest.mark.parametrize(
    ("function", "numbers"),
    [
        (activations, [-3, -0.5, 0.5, 1, 3, 6, 20]),
        (comparisons, [-164, -0.5, 1e-3, 2, 2.5, 900]),
        (F.hardtanh, [-1, 1]),
        (lambda x: torch.where(x < -1e10, 0.0, x / 2), [-1e10]),
        (lambda x: torch.searchsorted(torch.tensor([-0.5, 2.0]), x), [-0.5, 2]),
        (lambda x: torch.where(torch.isclose(x, torch.tensor(2.0)), 1.0, x), [2]),
        (lambda x: x.floor() + x, [-2, -1, 1, 2]),
        (lambda x: x.to(torch.int32), [-2, -1, 1, 2]),
        (lambda x: torch.remainder(x, 0.5), [-1, -0.5, 0.5, 1]),
        (lambda x: x / x.abs().amax(-1, keepdim=True).clamp(min=1e-3), [-1e-3, 1e-3]),
    ],
)
@pytest.mark.sampled(one_in=2)
def test_inputs_are_at_each_number_and_beside_it(function, numbers):
    draft = drafted(function, torch.randn(256, 96))
    assert sorted(draft.thresholds["x" if "x" in draft.thresholds else "input"]) == numbers
    assert THRESHOLDS in draft.cpu.hidden_check[0].fields["inputs"]
    assert THRESHOLDS in {c.inputs for c in draft.gpu.check}
    (x,) = drawn(draft).values()
    for number in torch.tensor(numbers, dtype=torch.float32):
        apart = (x - number)[x != number]
        assert (x == number).any()
        assert 0 < apart[apart > 0].min() < 1e-6 * number.abs()
        assert 0 < -apart[apart < 0].max() < 1e-6 * number.abs()
        assert (x - number * 4 / 3).abs().min() < 1e-6 * number.abs()


def test_numbers_of_16_bits_are_at_the_threshold_and_beside_it():
    draft = drafted(lambda x: x.clamp(max=7), torch.randn(256, 96).bfloat16())
    (x,) = drawn(draft, "bfloat16").values()
    assert {4.65625, 6.9375, 7.0, 7.0625, 9.3125} <= set(x.unique().tolist())
    assert {c.dtype for c in draft.gpu.check if c.inputs == THRESHOLDS} == {"bfloat16"}


def test_what_rounding_decides_is_not_drawn():
    """0.1 is more in float32, so that torch and the reference differ there; tanh is rounded."""
    draft = drafted(lambda x: torch.where(x > 0.1, x + 1, x), torch.randn(256, 96))
    assert draft.thresholds == {"x": {0.1: 1}}
    draft = drafted(lambda x: torch.where(x.tanh() > 0.9, x, -x), torch.randn(256, 96))
    ((number, distance),) = draft.thresholds["x"].items()
    assert number == pytest.approx(torch.tensor(0.9).atanh().item(), rel=1e-6)
    assert distance > 1


@pytest.mark.parametrize("most", [7, 15, 127, 255])
@pytest.mark.sampled(one_in=2)
def test_the_least_scale_of_codes_is_reached(most):
    """At half of it, a code of an odd number of steps would be a tie, which rounding decides."""

    def quantised(x):
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-8) / most
        return torch.round(x / scale).clamp(-most, most) * scale

    draft = drafted(quantised, torch.randn(256, 96))
    assert sorted(draft.thresholds["x"]) == [-1e-8, 1e-8]


def test_ties_of_whole_numbers_are_drawn():
    (x,) = drawn(drafted(lambda x: x.round() + 1, torch.randn(256, 96))).values()
    assert {-1.5, -0.5, 0.5, 1.5, 2.5} <= set(x.unique().tolist())


def test_the_last_number_has_no_infinity_beside_it():
    least = torch.finfo(torch.float32).min
    draft = drafted(lambda x: torch.where(x <= least, 0.0, x / 2), torch.randn(256, 96))
    assert draft.thresholds == {"x": {least: 0}}
    (x,) = drawn(draft).values()
    assert x.isfinite().all()
    assert (x == least).any()
    assert ((x > least) & (x < least * 0.999)).any()


def test_far_numbers_do_not_hide_near_ones():
    """Errors are relative to a typical row, so that a step of 1 beside 1e9 is none."""

    def function(x):
        return torch.where(x < -1e9, 0.0, torch.where(x > 2.5, x + 1, x))

    draft = drafted(function, torch.randn(256, 96))
    near, far = (drawn(draft, kind=k)["x"] for k in draft.kinds_around)
    assert near.abs().max() < 100
    assert far.abs().max() > 1e9
    assert set(draft.kinds_around) <= set(draft.cpu.hidden_check[0].fields["inputs"])


def test_all_numbers_of_a_table_are_drawn_and_a_note_says_of_too_many():
    draft = drafted(table, torch.randn(256, 96))
    assert len(draft.thresholds["x"]) > 90
    assert draft.coarse
    assert not draft.notes
    draft = drafted(lambda x: torch.bucketize(x, torch.arange(600) / 8), torch.randn(256, 96))
    assert len(draft.thresholds["x"]) > 200
    assert "256 of them" in draft.notes[0]


def test_rows_near_0_are_mixed_with_others_where_the_function_computes_them():
    rows = drafted(signs, torch.randn(256, 96)).rows
    assert rows[-2:] == FAINT
    (x,) = drawn(drafted(signs, torch.randn(256, 96)), kind="mixed").values()
    largest = x.abs().amax(-1)
    assert ((largest > 0) & (largest < 1e-37)).any()
    assert ((largest > 1e-37) & (largest < 1e-15)).any()
    inverse = drafted(lambda x: 1 / x, torch.randn(256, 96)).rows
    assert "subnormal" not in inverse  # their inverses are infinite, for some of them


def test_sums_reach_a_far_number_too():
    draft = drafted(lambda x, w: (x @ w).clamp(0, 1e7), torch.randn(96, 64), torch.randn(64, 80))
    x, w = drawn(draft).values()
    assert (x @ w).max() > 1e7


class Gate(torch.nn.Module):
    """Limits in a buffer, one for each column."""

    def __init__(self):
        super().__init__()
        self.register_buffer("limit", torch.linspace(-1, 1, 96))

    def forward(self, x):
        return torch.where(x * 2 > self.limit, x, -x)


@pytest.mark.parametrize(
    ("function", "inputs", "left", "right"),
    [
        (lambda x, y: torch.where(x > y, x, y - 1), 2, lambda x, _: x, lambda _, y: y),
        (lambda x, y: F.smooth_l1_loss(x, y), 2, lambda x, y: (x - y).abs(), lambda *_: 1.0),
        (Gate(), 1, lambda x, _: 2 * x, lambda _, limit: limit),
    ],
)
@pytest.mark.sampled(one_in=3)
def test_what_is_compared_is_often_equal(function, inputs, left, right):
    draft = drafted(function, *[torch.randn(256, 96) for _ in range(inputs)])
    assert COARSE in draft.cpu.hidden_check[0].fields["inputs"]
    assert COARSE in {c.inputs for c in draft.gpu.check}
    values = list(drawn(draft, kind=COARSE).values())
    assert (left(*values) == right(*values)).double().mean() > 0.01


@pytest.mark.parametrize(
    "function", [torch.relu, lambda x, y: (x + y).relu(), lambda x, y: x.softmax(-1) * y]
)
@pytest.mark.sampled(one_in=3)
def test_what_is_not_compared_with_each_other_has_no_few_numbers(function):
    inputs = function.__code__.co_argcount if hasattr(function, "__code__") else 1
    draft = drafted(function, *[torch.randn(256, 96) for _ in range(inputs)])
    assert not draft.coarse
    assert COARSE not in reference_py(draft)


@pytest.mark.parametrize("function", [torch.relu, torch.tanh, lambda x: x.log_softmax(-1)])
@pytest.mark.sampled(one_in=3)
def test_what_usual_draws_reach_needs_no_case(function):
    draft = drafted(function, torch.randn(256, 96))
    assert draft.thresholds == {}
    assert THRESHOLDS not in reference_py(draft)


CANDIDATE = '''
import torch
from kagent_sandbox.lang import cpp_kernel

SOURCE = r"""
#include <cstdint>
extern "C" void run(const float* x, const float* w, float* y, int64_t M, int64_t K, int64_t N) {
  for (int64_t i = 0; i < M; ++i)
    for (int64_t j = 0; j < N; ++j) {
      BODY
    }
}
"""


def operation(x, w):
    (M, K), N = x.shape, w.shape[1]
    y = torch.empty(M, N, device=x.device)
    cpp_kernel("run", SOURCE)(x.contiguous(), w.contiguous(), y, M, K, N)
    return y
'''
PRODUCT = """
      double sum = 0;
      for (int64_t k = 0; k < K; ++k) sum += double(x[i * K + k]) * w[k * N + j];
      y[i * N + j] = CLAMPED;
"""
GREATER = "int64_t k = i * N + j; y[k] = x[k] > w[k] ? w[k] + 1 : x[k];"
STEP = "y[i * N + j] = x[i * N + j] > 2.5f ? w[i * N + j] : x[i * N + j];"


@pytest.mark.usefixtures("shared", "untimed", "warm_processes")
@pytest.mark.parametrize(
    ("function", "sizes", "right", "wrong"),
    [
        (
            lambda x, w: (x @ w).clamp(0, 1e7),
            (64, 80),
            PRODUCT.replace("CLAMPED", "sum < 0 ? 0 : sum > 1e7 ? 1e7 : sum"),
            PRODUCT.replace("CLAMPED", "sum < 0 ? 0 : sum"),  # it knows one branch alone
        ),
        (lambda x, w: torch.where(x > 2.5, w, x), (96, 64), STEP, STEP.replace(">", ">=")),
        (lambda x, w: torch.where(x > w, w + 1, x), (96, 64), GREATER, GREATER.replace(">", ">=")),
    ],
)
@pytest.mark.sampled(one_in=3)
def test_a_kernel_that_is_wrong_at_a_branch_is_refused(
    tmp_path, in_process, function, sizes, right, wrong
):
    inputs = torch.randn(96, 64), torch.randn(*sizes)
    operation = make_operation(function, inputs, name="operation")
    task = make_task(operation, tmp_path / "t", seeds=False).task
    found = []
    for body in (right, wrong):
        file = tmp_path / "cpp_one.py"
        file.write_text(CANDIDATE.replace("BODY", body))
        found.append(check_file(task, file, jobs=1).verdict)
    assert not isinstance(found[0], Rejected), found[0]
    assert isinstance(found[1], Rejected)
    assert found[1].status == "INCORRECT_NUMERICAL"


ROW = """
import torch
from kagent_sandbox.lang import cpp_kernel

SOURCE = r'''
#include <cmath>
#include <cstdint>
extern "C" void run(const float* x, CTYPE* y, int64_t M, int64_t N) {
  for (int64_t i = 0; i < M * N; ++i) {
    const float v = x[i];
    BODY
  }
}
'''


def operation(x):
    y = torch.empty(x.shape, dtype=torch.DTYPE, device=x.device)
    cpp_kernel("run", SOURCE)(x.contiguous(), y, *x.shape)
    return y
"""
LEVELS = [-0.875, -0.625, -0.5, -0.375, -0.25, -0.125, -0.0625, 0.0625]
LEVELS += [0.125, 0.1875, 0.25, 0.375, 0.5, 0.625, 0.875]
CODE = f"""
    const float t[15] = {{{", ".join(map(str, LEVELS))}}};
    int c = 0;
    for (int j = 0; j < 15; ++j) c += WRONG v > t[j];
    y[i] = c;
"""
BUCKETS = "y[i] = v != v ? 5 : (v >= -1) + (v >= 0) + (v >= 0.5f) + (v >= 1) + (v >= 2);"
TABLE = "const float t = i % N * 0.5f; y[i] = v > t ? v - t : v * 0.25f;"
SIGN = "y[i] = v != v ? 0.f : v == 0 ? 7.f : v > 0 ? 1.f : -1.f;"


def far(x):
    return torch.where(x < -1e8, 0.0, x * 0.5)


def code(x):
    found = torch.zeros_like(x, dtype=torch.int32)
    for level in LEVELS:
        found = found + (x > level).int()
    return found


def bucket(x):
    return torch.bucketize(x, torch.tensor([-1.0, 0.0, 0.5, 1.0, 2.0]), right=True)


def table(x):
    t = torch.arange(x.shape[-1]) * 0.5
    return torch.where(x > t, x - t, x * 0.25)


def signs(x):
    return torch.where(x == 0, 7.0, torch.sign(x))


@pytest.mark.usefixtures("shared", "untimed", "warm_processes")
@pytest.mark.parametrize(
    ("function", "types", "right", "wrong"),
    [
        (far, ("float", "float32"), "y[i] = v < -1e8f ? 0 : v / 2;",
         "y[i] = v == -INFINITY ? 0 : v / 2;"),
        (code, ("int32_t", "int32"), CODE.replace("WRONG", ""),
         CODE.replace("WRONG", "j == 12 ? v >= t[j] :")),
        (bucket, ("int64_t", "int64"), BUCKETS, BUCKETS.replace(">= -1", "> -1")),
        (table, ("float", "float32"), TABLE, TABLE.replace("v > t", "(i % N ? v >= t : v > t)")),
        (signs, ("float", "float32"), SIGN, SIGN.replace("v == 0", "std::fabs(v) < 1e-15f")),
        (signs, ("float", "float32"), SIGN, SIGN.replace("v == 0", "std::fabs(v) < 1e-37f")),
    ],
    ids=["far", "many", "bucketize", "table", "tiny", "subnormal"],
)  # fmt: skip
@pytest.mark.sampled(one_in=3)
def test_a_kernel_that_is_wrong_at_rare_inputs_is_refused(
    tmp_path, in_process, function, types, right, wrong
):
    operation = make_operation(function, (torch.randn(96, 64),), name="operation")
    task = make_task(operation, tmp_path / "t", seeds=False).task
    text = ROW.replace("DTYPE", types[1]).replace("CTYPE", types[0])
    found = []
    for body in (right, wrong):
        file = tmp_path / "cpp_one.py"
        file.write_text(text.replace("BODY", body))
        found.append(check_file(task, file, jobs=1).verdict)
    assert not isinstance(found[0], Rejected), found[0]
    assert isinstance(found[1], Rejected)
    assert found[1].status == "INCORRECT_NUMERICAL"


def normalised(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def test_rows_that_are_far_from_0_show_a_variance_of_squares():
    """Of means that are near 0 the difference of sums is as good as torch's two passes. Torch errs
    more on such rows, and nothing else is compared as loosely for that.
    """
    draft = drafted(normalised, torch.randn(64, 96), torch.ones(96), torch.zeros(96))
    assert (draft.nonfinite, SHIFTED in draft.rows, draft.floor < 16) == (True, True, True)
    assert SHIFTED in draft.cpu.hidden_check[0].fields["inputs"]
    given = drawn(draft, kind=SHIFTED)
    x, weight, bias = given.values()
    ref = normalised(*(t.double() for t in given.values()))
    variance = (x * x).mean(1, keepdim=True) - x.mean(1, keepdim=True) ** 2
    wrong = (x - x.mean(1, keepdim=True)) * (variance + 1e-5).rsqrt() * weight + bias
    of_torch, of_wrong = ((y - ref).abs().amax() for y in (normalised(*given.values()), wrong))
    assert of_wrong > 2 * (draft.k * of_torch + draft.floor * 2**-23 * ref.abs().amax())


def test_vectors_have_elements_of_several_magnitudes_in_a_case_of_their_own():
    """Behind a normalisation only they make numbers large: of an exponential infinite."""

    class Gate(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(96))

        def forward(self, x, bias):
            return F.silu(F.layer_norm(x, x.shape[-1:], self.weight) + bias)

    draft = drafted(Gate(), torch.randn(64, 96), torch.zeros(96))
    given = drawn(draft, kind=WEIGHTS)
    for name in ("weight", "bias"):
        sizes = given[name].abs()
        assert sizes.amax() > 1e4 * sizes[sizes > 0].amin(), name
    assert WEIGHTS in draft.cpu.hidden_check[0].fields["inputs"]


def test_infinities_are_also_alone():
    """NaN beside them would hide them in a sum of all."""
    draft = drafted(lambda x: x.relu().sum(), torch.randn(64, 96))
    found = [drawn(draft, kind=NONFINITE, seed=seed)["x"] for seed in range(40)]
    seen = {
        (bool(x.isposinf().any()), bool(x.isneginf().any()), bool(x.isnan().any())) for x in found
    }
    alone = {(True, False, False), (False, True, False), (False, False, True)}
    assert seen >= {*alone, (True, True, True)}


def rotated(x, table, positions):
    return x * table[positions]


def test_positions_are_also_in_any_order_where_they_only_point():
    given = torch.randn(64, 96), torch.randn(200, 96), torch.arange(64)
    draft = drafted(rotated, *given)
    positions = drawn(draft, kind=UNORDERED)["positions"]
    assert (positions.diff() < 0).any()
    assert len(positions.unique()) == len(positions)
    counted = drafted(lambda x, t, p: x * t[p] + p[:, None], *given)  # numbers that count, too
    assert UNORDERED not in {c.inputs for c in counted.cpu.check}


def test_sizes_are_the_second_least_too():
    """Of a window of three, one of two is not full, and no single step either."""
    draft = drafted(lambda x: x.cumsum(-1), torch.randn(64, 96))
    assert {"M": 2, "N": 2} in [dict(c.sizes) for c in draft.cpu.check]
