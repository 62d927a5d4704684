"""Results that torch does not fix: the index of the largest of equal values."""

import math
from types import SimpleNamespace

import pytest
import torch
from custom_tasks import SEED, build, candidate, judged, write
from kagent_sandbox.data.verdict import Passed, Rejected, Status
from kagent_sandbox.errors import TaskError
from kagent_sandbox.judge.check import task_checker
from kagent_sandbox.judge.check.spot_checks import SpotChecks
from kagent_sandbox.judge.check.spot_reading import SpotReading, element_errors
from kagent_sandbox.judge.judge import Judge
from scripted_clock import ScriptedBackend

TOML = """
accept = true
dims = { M = "rows", N = "columns" }
arguments = [{ name = "x", shape = ["M", "N"] }, { name = "n", value = "N" }]
results = [{ name = "at", shape = ["M"], dtype = "int64", row_dims = 0, k = 1.0 }]

[[cpu.check]]
name = "small"
dtype = "float32"
M = 64
N = 40

[[cpu.bench]]
name = "large"
dtype = "float32"
M = 4096
N = 64
"""
MOVED = "4 * M * N + 8 * M"
REFERENCE = """
def inputs(case, generator, device):
    shape = (case.dims["M"], case.dims["N"])
    x = torch.randint(0, 4, shape, generator=generator, device=device)
    return {"x": x.to(torch.float32)}

def reference(*, x, n):
    return x.argmax(-1)

def eager(*, x, n):
    return x.argmax(-1)

def accept(results, expected, *, x, n):
    (at,) = results
    inside = (at >= 0) & (at < n)
    return inside & (x.gather(-1, at.clamp(0, n - 1)[:, None])[:, 0] == x.amax(-1))
"""
HOST = """
def run(x, n):
    at = torch.empty(x.shape[0], dtype=torch.int64, device=x.device)
    cpp_kernel("run", SOURCE)(x, at, x.shape[0], n)
    return at
"""
CODE = """
extern "C" void run(const float* x, int64_t* at, int64_t m, int64_t n) {
  for (int64_t i = 0; i < m; ++i) {
    int64_t best = 0;
    for (int64_t j = 1; j < n; ++j) if (x[i * n + j] %s x[i * n + best]) best = j;
    %s
  }
}
"""
LAST = CODE % (">=", "at[i] = best;")  # of equal values; torch gives the first
NEVER_RIGHT = {
    "an index out of range": CODE % (">=", "at[i] = i == 7 ? (int64_t)1 << 40 : best;"),
    "the smallest": CODE % ("<", "at[i] = best;"),
    "always the first column": CODE % (">=", "at[i] = 0;"),
}
TIMED = "m < 1000 ? best : "


@pytest.fixture
def task(tmp_path):
    return write(tmp_path / "task", TOML, REFERENCE, moved=MOVED)


def test_another_index_of_an_equal_value_is_as_right(builder, task):
    errors = judged(builder, task, candidate(LAST, HOST))
    assert not isinstance(errors, Rejected), errors


@pytest.mark.parametrize("name", NEVER_RIGHT)
def test_what_the_rule_does_not_accept_is_wrong(builder, task, name):
    verdict = judged(builder, task, candidate(NEVER_RIGHT[name], HOST))
    assert isinstance(verdict, Rejected)
    assert verdict.status is Status.INCORRECT_NUMERICAL


def test_timed_executions_are_accepted_by_the_same_rule(builder, task):
    right, wrong = (
        build(builder, task, candidate(CODE % (">=", f"at[i] = {statement};"), HOST))
        for statement in ("best", TIMED + "i % 8 ? best : 0")
    )
    judge = Judge(task, ScriptedBackend(), SEED, {"large": 1000.0})
    try:
        for built, passes in ((right, True), (wrong, False)):
            errors = judge.check(built)
            assert not isinstance(errors, Rejected), errors
            verdict = judge.measure(built, errors)
            assert isinstance(verdict, Passed if passes else Rejected), verdict
        assert verdict.status is Status.INCORRECT_NUMERICAL
    finally:
        judge.close()


def test_a_value_that_came_after_the_clock_had_stopped_is_not_accepted():
    """What the rule has seen in the whole result is not what was read in time."""
    memory = torch.tensor([3, 1, 2, 3])
    ref = SimpleNamespace(dtype="int64")
    placement = SimpleNamespace(
        plan=SimpleNamespace(outputs=[ref]), words=lambda result, index: index
    )
    arena = SimpleNamespace(words=lambda size: memory)
    expected = torch.tensor([[0], [1], [0], [0]])
    checks = SpotChecks(torch.arange(4)[:, None], expected, torch.ones(4, 1, dtype=torch.float64))
    reading = SpotReading(arena, [placement], [[checks]], ["at"], [SimpleNamespace()])
    reading.read()
    assert reading.unequal() == [0]
    memory[3] = 0  # right at last
    reading.accept(0, [memory.clone()], [torch.ones(4, dtype=torch.bool)])
    assert reading.accepted[0].tolist() == [True, True, True, False]
    assert [e.tolist() for e in element_errors([reading])] == [[0.0, 0.0, 0.0, math.inf]]


def test_the_check_of_the_task_holds_wrong_results_against_the_rule(task, tmp_path):
    assert task_checker.check(task, "cpu", torch.device("cpu")).wrong > 0
    lax = REFERENCE.replace("return inside & (x.gather", "return inside | (x.gather")
    wrong = write(tmp_path / "lax", TOML, lax, moved=MOVED)
    with pytest.raises(TaskError, match="zeros pass every check case"):
        task_checker.check(wrong, "cpu", torch.device("cpu"))


def test_without_the_rule_only_torchs_own_choice_is_right(builder, tmp_path):
    reference = REFERENCE[: REFERENCE.index("def accept")]
    task = write(tmp_path / "task", TOML.replace("accept = true", ""), reference)
    verdict = judged(builder, task, candidate(LAST, HOST))
    assert isinstance(verdict, Rejected)


def test_a_rule_is_declared_and_defined_or_neither(tmp_path):
    with pytest.raises(TaskError, match=r"defines accept, and accept is false in task\.toml"):
        write(tmp_path / "a", TOML.replace("accept = true", ""), REFERENCE).reference()
    reference = REFERENCE[: REFERENCE.index("def accept")]
    with pytest.raises(TaskError, match=r"lacks accept.*, and accept is true"):
        write(tmp_path / "b", TOML, reference).reference()
