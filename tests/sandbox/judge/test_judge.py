import dataclasses

import pytest
from handmade_candidates import BODY, GOOD, HEADER, SLOW, built, write_task
from kagent_sandbox.data.build import Contender
from kagent_sandbox.data.task import load_task
from kagent_sandbox.data.verdict import Passed, Rejected, Stage, Status
from kagent_sandbox.judge.arena.session import CandidateRejected
from kagent_sandbox.judge.check import time_budget
from kagent_sandbox.judge.judge import Judge
from scripted_clock import ScriptedBackend

SEED = 7
BASELINES = {"wide": 100.0, "tall": 100.0}


@pytest.fixture(scope="module")
def judge(tmp_path_factory, shared):
    task = load_task(write_task(tmp_path_factory.mktemp("scale")))
    judge = Judge(task, ScriptedBackend(), SEED, BASELINES)
    yield judge
    judge.close()


def check(judge, *sources, **options):
    return judge.check(built(judge.task, SEED, *sources, **options))


def test_a_correct_kernel_passes_every_case(judge):
    errors = check(judge, GOOD)
    assert not isinstance(errors, Rejected), errors
    assert {e.case for e in errors} == {"odd", "padded", "hidden_check_0"}
    assert all(e.share_of_tolerance <= 1 for e in errors)


WRONG = {
    "constant": ("y[i * cols + j] = 1;", Status.INCORRECT_NUMERICAL, "expected"),
    "not written": ("", Status.INCORRECT_NUMERICAL, "expected"),
    "tail": ("if (j + 1 < cols) y[i * cols + j] = 2 * x[i * step + j];", None, "expected"),
    "ignores strides": ("y[i * cols + j] = 2 * x[i * cols + j];", None, "expected"),
    "scale off by a thousandth": (
        "y[i * cols + j] = 2.002f * x[i * step + j];",
        Status.INCORRECT_NUMERICAL,
        "expected",
    ),
    "past the end": (
        "y[i * cols + j] = 2 * x[i * step + j]; y[rows * cols] = 0;",
        Status.TAMPER,
        "outside",
    ),
    "before the start": ("y[i * cols + j] = 2 * x[i * step + j]; y[-1] = 0;", Status.TAMPER, "out"),
    "changes its input": (
        "y[i * cols + j] = 2 * x[i * step + j]; ((float*)x)[0] = 1;",
        Status.TAMPER,
        "x was changed",
    ),
    "crash": ("*(volatile int*)8 = 0;", Status.RUNTIME_ERROR, ""),
    "depends on the call": (
        "static int calls = 0; y[i * cols + j] = calls++ * x[i * step + j];",
        Status.NONDETERMINISTIC,
        "two runs",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_rejected_for_the_right_reason(judge, name):
    statement, status, text = WRONG[name]
    verdict = check(judge, BODY % statement)
    assert isinstance(verdict, Rejected)
    assert verdict.stage is Stage.CHECK
    assert verdict.status is (status or Status.INCORRECT_NUMERICAL), verdict
    assert text in verdict.message
    assert verdict.case is not None


def test_every_failing_case_is_named_and_benchmark_shapes_where_asked_for(judge):
    wide = BODY % "y[i * cols + j] = (cols > 1000 || step != cols ? 3 : 2) * x[i * step + j];"
    candidate = built(judge.task, SEED, wide, race=True)
    found = judge.examine(candidate, bench_shapes=False)
    assert [f.case for f in found.failed] == ["padded"]
    assert {e.case for e in found.errors} == {"odd", "hidden_check_0"}
    found = judge.examine(candidate, bench_shapes=True)
    assert [f.case for f in found.failed] == ["padded", "wide", "hidden_bench_0"]
    assert {f.status for f in found.failed} == {Status.INCORRECT_NUMERICAL}
    assert {e.case for e in found.errors} == {"odd", "hidden_check_0", "tall"}
    right = judge.examine(built(judge.task, SEED, GOOD, race=True), bench_shapes=True)
    assert right.failed == ()
    assert {"wide", "tall", "hidden_bench_0"} <= {e.case for e in right.errors}


def test_a_launcher_that_dies_in_one_case_leaves_the_others_to_be_checked(judge):
    crash = BODY % "if (rows == 7) *(volatile int*)8 = 0; y[i * cols + j] = 3 * x[i * step + j];"
    found = judge.examine(built(judge.task, SEED, crash), bench_shapes=False)
    assert [f.case for f in found.failed] == ["odd", "padded", "hidden_check_0"]
    assert found.failed[0].status is Status.RUNTIME_ERROR


SLEEPS = "#include <unistd.h>\n" + BODY % (
    "if (!i && !j) usleep(50000); y[i * cols + j] = 2 * x[i * step + j];"
)


def test_a_check_that_takes_too_long_in_all_ends(judge, monkeypatch):
    """Every execution is well within its own limit."""
    monkeypatch.setattr(time_budget, "LEAST_S", 0.2)
    monkeypatch.setattr(time_budget, "TIMES_EAGER", 1e-9)  # eager is slow on a busy machine
    verdict = check(judge, SLEEPS)
    assert isinstance(verdict, Rejected)
    assert (verdict.stage, verdict.status) == (Stage.CHECK, Status.TIMEOUT)
    assert "too slow to be checked" in verdict.message
    assert "may take 0.2 s together" in verdict.message


def test_a_check_has_longer_where_torch_is_slow(monkeypatch):
    monkeypatch.setattr(time_budget, "LEAST_S", 1e-9)
    monkeypatch.setattr(time_budget, "TIMES_EAGER", 3.0)
    budget = time_budget.TimeBudget(lambda: 10.0, Stage.CHECK)
    with budget.spend("odd"):
        pass
    monkeypatch.setattr(time_budget, "TIMES_EAGER", 1e-12)
    with pytest.raises(CandidateRejected, match="too slow"), budget.spend("odd"):
        pass


def test_shape_and_dtype_are_refused_before_anything_runs(judge):
    verdict = check(judge, GOOD, dtype="int32")
    assert isinstance(verdict, Rejected)
    assert verdict.status is Status.INCORRECT_DTYPE
    verdict = check(judge, GOOD, shape=(1, 1))
    assert isinstance(verdict, Rejected)
    assert verdict.status is Status.INCORRECT_SHAPE


def test_a_plan_with_another_input_is_tampering(judge):
    candidate = built(judge.task, SEED, GOOD)
    key = (0, "odd")
    plan = candidate.plans[key]
    x = dataclasses.replace(plan.buffers[0], name="z")
    forged = dataclasses.replace(plan, buffers=(x, plan.buffers[1]))
    candidate = dataclasses.replace(candidate, plans={**candidate.plans, key: forged})
    verdict = judge.check(candidate)
    assert isinstance(verdict, Rejected)
    assert verdict.status is Status.TAMPER


def test_a_candidate_is_timed_on_every_case(judge):
    passed = judge.measure(built(judge.task, SEED, GOOD), ())
    assert isinstance(passed, Passed), passed
    assert [t.case for t in passed.timings] == ["wide", "tall"]
    assert all(t.low_us <= t.kernel_us <= t.high_us and t.samples >= 24 for t in passed.timings)
    assert passed.score > 0
    assert passed.versus is None
    assert not passed.screened
    assert passed.resources[0]["name"] == "scale"


def test_a_hopeless_candidate_is_screened(judge):
    incumbent = Contender("first", built(judge.task, SEED, GOOD), {"wide": 0, "tall": 0})
    passed = judge.measure(built(judge.task, SEED, SLOW), (), incumbent)
    assert isinstance(passed, Passed), passed
    assert passed.screened
    assert passed.versus is not None
    assert passed.versus.against == "first"
    assert passed.versus.ratio == pytest.approx(0.1, rel=0.05)


def test_a_faster_candidate_beats_the_incumbent(judge):
    incumbent = Contender("first", built(judge.task, SEED, SLOW), {})
    passed = judge.measure(built(judge.task, SEED, GOOD), (), incumbent)
    assert isinstance(passed, Passed), passed
    assert passed.versus is not None
    assert passed.versus.p_faster > 0.95
    assert passed.versus.low > 1
    assert set(passed.versus.cases) == {"wide", "tall"}


def test_the_sweep_prefers_the_fast_configuration_and_drops_wrong_ones(judge):
    wrong = BODY % "y[i * cols + j] = 3.0f;"
    crash = BODY % "abort();"
    candidate = built(judge.task, SEED, SLOW, wrong, GOOD, crash)
    passed = judge.measure(candidate, (), sweep_s=60)  # all are sampled, however busy the machine
    assert isinstance(passed, Passed), passed
    assert {t.config for t in passed.timings} == {2}


def test_a_sweep_times_every_configuration_that_runs(judge):
    crash = BODY % "abort();"
    found = judge.sweep(built(judge.task, SEED, SLOW, crash, GOOD), 0.1)
    slow, failed, good = found
    assert failed == {}
    assert set(slow) == set(good) == {"wide", "tall"}
    assert all(slow[case] > 5 * good[case] for case in slow)


def test_a_kernel_that_is_wrong_only_when_timed_is_rejected(judge):
    late = (
        HEADER
        + """
static int calls = 0;
extern "C" void scale(const float* x, float* y, int64_t rows, int64_t cols, int64_t step) {
  float f = ++calls > 6 ? 2.1f : 2.0f;
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < cols; ++j) y[i * cols + j] = f * x[i * step + j];
}
"""
    )
    candidate = built(judge.task, SEED, late)
    verdict = judge.measure(candidate, ())
    assert isinstance(verdict, Rejected)
    assert verdict.stage is Stage.MEASURE
    assert verdict.status is Status.INCORRECT_NUMERICAL


def test_fills_of_the_plan_are_executed(judge):
    add = BODY % "y[i * cols + j] += 2.0f * x[i * step + j];"
    assert not isinstance(check(judge, add, zero_first=True), Rejected)
    assert isinstance(check(judge, add), Rejected)


def test_a_race_compares_contenders_on_hidden_cases(judge):
    options = {"race": True}
    good = Contender("good", built(judge.task, SEED, GOOD, **options), {"wide": 0})
    slow = Contender("slow", built(judge.task, SEED, SLOW, **options), {})
    wrong = Contender("wrong", built(judge.task, SEED, BODY % "", **options), {})
    race = judge.race([slow, good, wrong], hidden=True)
    assert [c.case for c in race.cases] == ["hidden_bench_0"]
    assert set(race.cases[0].candidates) == {"good", "slow"}
    assert race.failed["wrong"].status is Status.INCORRECT_NUMERICAL
    (versus,) = race.overall["good"]
    assert versus.against == "slow"
    assert versus.low > 1
    assert race.seconds["other"] > 0
