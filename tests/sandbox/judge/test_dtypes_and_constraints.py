"""8-bit floating point, whole numbers and flags, and dimensions that depend on each other."""

import pytest
import torch
from custom_tasks import SEED, candidate, judged, write
from kagent_sandbox.data.task import draw_hidden
from kagent_sandbox.data.verdict import Rejected, Status
from kagent_sandbox.errors import TaskError
from kagent_sandbox.judge.check.task_checker import check

RELU = """
dims = { M = "rows", N = "columns", G = "columns of a group" }
constraints = ["N % G == 0", "G < N or N == 1"]
arguments = [
  { name = "x", shape = ["M", "N"] },
  { name = "add", shape = ["M"], dtype = "int32" },
  { name = "group", value = "G" },
]
results = [
  { name = "y", shape = ["M", "N"], k = 2.0 },
  { name = "positive", shape = ["M", "N"], dtype = "bool", k = 1.0 },
  { name = "count", shape = ["M", "N // G"], dtype = "int64", k = 1.0 },
]

[[cpu.check]]
name = "e4m3"
dtype = "float8_e4m3fn"
M = 5
N = 12
G = 4

[[cpu.check]]
name = "e5m2"
dtype = "float8_e5m2"
noncontiguous = true
M = 3
N = 6
G = 2

[[cpu.bench]]
name = "long"
dtype = "float8_e4m3fn"
M = 64
N = 256
G = 32

[[cpu.hidden_check]]
count = 8
dtype = ["float8_e4m3fn", "float8_e5m2"]
dims = { M = { min = 1, max = 64 }, N = { min = 2, max = 300 }, G = { min = 1, max = 32 } }
"""
MOVED = "3 * M * N + 4 * M + 8 * M * N / G"
REFERENCE = """
def inputs(case, generator, device):
    shape = case.dims["M"], case.dims["N"]
    x = torch.randn(shape, generator=generator, device=device) * case.scale
    add = torch.randint(-3, 9, shape[:1], generator=generator, device=device, dtype=torch.int32)
    return {"x": x.to(getattr(torch, case.dtype)), "add": add}

def _counts(positive, add, group):
    return positive.unflatten(1, (-1, group)).sum(2) + add.long()[:, None]

def reference(*, x, add, group):
    positive = x.double() > 0
    return x.double().clamp_min(0), positive, _counts(positive, add, group)

def eager(*, x, add, group):
    positive = x.float() > 0
    return x.float().relu().to(x.dtype), positive, _counts(positive, add, group)
"""
CODE = """
extern "C" void relu(const uint8_t* x, const int32_t* add, uint8_t* y, bool* positive,
                     int64_t* count, int64_t m, int64_t n, int64_t step, int64_t group) {
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t g = 0; g < n / group; ++g) count[i * (n / group) + g] = ADD;
    for (int64_t j = 0; j < n; ++j) {
      const uint8_t v = x[i * step + j];
      const bool p = v != 0 && v < 0x80;
      y[i * n + j] = p ? v : NEGATIVE;
      positive[i * n + j] = p;
      count[i * (n / group) + j / group] += p;
    }
  }
}
"""
HOST = """
def run(x, add, group):
    m, n = x.shape
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    positive = torch.empty(m, n, dtype=torch.bool, device=x.device)
    count = torch.empty(m, n // group, dtype=torch.int64, device=x.device)
    cpp_kernel("relu", SOURCE)(x, add, y, positive, count, m, n, x.stride(0), group)
    return y, positive, count
"""
GOOD = candidate(CODE.replace("ADD", "add[i]").replace("NEGATIVE", "0"), HOST)
WRONG = {
    "y": candidate(CODE.replace("ADD", "add[i]").replace("NEGATIVE", "(v & 0x7f)"), HOST),
    "count": candidate(CODE.replace("ADD", "0").replace("NEGATIVE", "0"), HOST),
}


@pytest.fixture(scope="module")
def relu(tmp_path_factory):
    return write(tmp_path_factory.mktemp("relu"), RELU, REFERENCE, moved=MOVED)


def test_results_of_8_bits_flags_and_whole_numbers_are_compared(builder, relu):
    errors = judged(builder, relu, GOOD)
    assert not isinstance(errors, Rejected), errors
    assert {e.output for e in errors} == {"y", "positive", "count"}
    assert {e.case for e in errors} >= {"e4m3", "e5m2", "hidden_check_7"}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_ones_are_refused(builder, relu, name):
    found = judged(builder, relu, WRONG[name])
    assert isinstance(found, Rejected)
    assert found.status is Status.INCORRECT_NUMERICAL, found.message
    assert f"result {name}" in found.message


def test_the_task_is_sound(relu):
    assert check(relu, "cpu", torch.device("cpu")).holes == ()


def test_hidden_cases_meet_the_constraints(relu):
    for seed in range(SEED):
        drawn = [c.dims for c in draw_hidden(relu, "cpu", "check", seed)]
        assert all(d["N"] % d["G"] == 0 and d["G"] < d["N"] for d in drawn)
        assert len({d["N"] for d in drawn}) >= 5


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("G = 4", "G = 5", r"pu.check, case \w*e4m3: the constraint 'N % G == 0' does not hold"),
        ("N % G == 0", "N % X == 0", r"cannot read 'X'"),
        ("N % G == 0", "N == G * 1000", "does not hold"),
        (
            "N = { min = 2, max = 300 }, G = { min = 1",
            "N = [7], G = { min = 2",
            "nothing was found",
        ),
    ],
)
def test_what_does_not_meet_them_is_named(tmp_path, before, after, expected):
    assert before in RELU
    with pytest.raises(TaskError, match=expected):
        write(tmp_path, RELU.replace(before, after, 1), REFERENCE)
