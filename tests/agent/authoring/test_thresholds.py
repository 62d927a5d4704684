"""Numbers with which an operation compares or clamps: cases have inputs on both sides and there."""

import pytest
import torch
from kagent.authoring.draft.cases import make_draft
from kagent.authoring.draft.draft import COARSE, THRESHOLDS
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


def drawn(draft, dtype="float32", kind=THRESHOLDS):
    """A draw of the case around thresholds, or of few numbers."""
    (case,) = (c for c in draft.cpu.check if c.inputs == kind)
    space = {}
    exec(reference_py(draft), space)
    given = Case(name="c", dtype=dtype, inputs=kind, **case.sizes)
    return space["inputs"](given, torch.Generator().manual_seed(3), torch.device("cpu"))


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
        (lambda x: x / x.abs().amax(-1, keepdim=True).clamp(min=1e-3), [-1e-3, 1e-3]),
    ],
)
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
def test_the_least_scale_of_codes_is_reached(most):
    """At half of it, a code of an odd number of steps would be a tie, which rounding decides."""

    def quantised(x):
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-8) / most
        return torch.round(x / scale).clamp(-most, most) * scale

    draft = drafted(quantised, torch.randn(256, 96))
    assert sorted(draft.thresholds["x"]) == [-1e-8, 1e-8]


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
def test_what_is_compared_is_often_equal(function, inputs, left, right):
    draft = drafted(function, *[torch.randn(256, 96) for _ in range(inputs)])
    assert COARSE in draft.cpu.hidden_check[0].fields["inputs"]
    assert COARSE in {c.inputs for c in draft.gpu.check}
    values = list(drawn(draft, kind=COARSE).values())
    assert (left(*values) == right(*values)).double().mean() > 0.01


@pytest.mark.parametrize(
    "function", [torch.relu, lambda x, y: (x + y).relu(), lambda x, y: x.softmax(-1) * y]
)
def test_what_is_not_compared_with_each_other_has_no_few_numbers(function):
    inputs = function.__code__.co_argcount if hasattr(function, "__code__") else 1
    draft = drafted(function, *[torch.randn(256, 96) for _ in range(inputs)])
    assert not draft.coarse
    assert COARSE not in reference_py(draft)


@pytest.mark.parametrize("function", [torch.relu, torch.tanh, lambda x: x.log_softmax(-1)])
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
