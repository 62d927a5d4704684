"""Host code on real tensors: it must launch what its plan says."""

import dataclasses
from pathlib import Path

import pytest
from kagent_sandbox.build.client import Builder
from kagent_sandbox.build.replay_real import Replayer, first_difference
from kagent_sandbox.build.request import BuildCase, BuildRequest, Built, TensorSpec
from kagent_sandbox.plan import Fill, Launch
from kagent_sandbox.verdict import Status

CORPUS = Path(__file__).parents[3] / "corpus"
SHAPE, STRIDES = (5, 513), (513, 1)
CASE = BuildCase(
    "small",
    (TensorSpec("x", SHAPE, STRIDES, "float32"),),
    (TensorSpec("y", SHAPE, STRIDES, "float32"),),
)
SCRATCH = '''
import torch
from kagent_sandbox.lang import cpp_kernel

SOURCE = """
extern "C" void add(const float* x, float* y, int n, float by) {
  for (int i = 0; i < n; ++i) y[i] = x[i] + by;
}
"""
BY = 1.5
TUNE = {"BY": [1.5, 2.5]}


def rows(x):
    k = cpp_kernel("add", SOURCE)
    once, y = torch.empty(x.numel() + 8), torch.empty_like(x)
    k(x, once[8:], x.numel(), BY)
    k(once[8:], y, x.numel(), -BY)
    k(None, y, 0, 0.0)
    return y
'''


@pytest.fixture(scope="module")
def tools():
    with Builder() as builder, Replayer() as replayer:
        yield builder, replayer


def replayed(tools, source, config=0):
    builder, replayer = tools
    built = builder.build(BuildRequest(source, "rows", "cpu", (CASE,), max_configs=2))
    assert isinstance(built, Built), built
    plan = built.plans[config, CASE.name]
    return replayer.compare(source, "rows", CASE, plan, built.configs[config])


@pytest.mark.parametrize("config", [0, 1])
def test_pointers_scalars_scratch_and_configurations_are_the_plans(tools, config):
    assert replayed(tools, SCRATCH, config) is None


def test_an_honest_candidate_launches_what_its_plan_says(tools):
    assert replayed(tools, (CORPUS / "honest" / "rows_cpp.py").read_text()) is None


@pytest.mark.parametrize(
    "name",
    [
        "by_type",
        "by_isinstance",
        "by_storage",
        "by_stack",
        "by_address",
        "by_modules",
        "by_environment",
    ],
)
def test_who_notices_the_tracer_does_something_else_on_real_tensors(tools, name):
    source = (CORPUS / "cheats" / "76_notices_tracing" / f"{name}_cpp.py").read_text()
    verdict = replayed(tools, source)
    assert verdict is not None
    assert verdict.status is Status.TAMPER
    assert "0 launches, the plan has 1" in verdict.message


def test_a_plan_that_the_source_did_not_make_is_found(tools):
    source = (CORPUS / "cheats" / "77_forged_plan" / "launched_by_hand_cpp.py").read_text()
    verdict = replayed(tools, source)
    assert verdict is not None
    assert verdict.status is Status.TAMPER


def test_host_code_that_ends_its_process_is_tampering(tools):
    source = SCRATCH.replace(
        "    k = cpp", "    if type(x) is torch.Tensor:\n        exit()\n    k = cpp"
    )
    verdict = replayed(tools, source)
    assert verdict is not None
    assert "it fails: SystemExit" in verdict.message


def test_differences_are_told_in_words(tools):
    builder, _ = tools
    built = builder.build(BuildRequest(SCRATCH, "rows", "cpu", (CASE,)))
    assert isinstance(built, Built), built
    plan = built.plans[0, CASE.name]
    assert first_difference(plan, plan) is None
    launches = [i for i, op in enumerate(plan.ops) if isinstance(op, Launch)]

    def done(index, op):
        ops = (*plan.ops[:index], *op, *plan.ops[index + 1 :])
        return first_difference(plan, dataclasses.replace(plan, ops=ops))

    second = plan.ops[launches[1]]
    wider = dataclasses.replace(second, grid=(2, 1, 1))
    assert "step 2 is launch with grid (2, 1, 1), the plan's" in done(launches[1], [wider])
    assert done(launches[1], []) == "2 launches, the plan has 3"
    fill = Fill(plan.outputs[0], 0)
    assert "step 2 is fill, the plan's launch" in done(launches[1], [fill, second])
    assert first_difference(plan, dataclasses.replace(plan, outputs=())) == (
        "3 steps and results, the plan has 4"
    )
