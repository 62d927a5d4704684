"""Host code on real tensors: it must launch what its plan says."""

import dataclasses
from pathlib import Path

import pytest
import torch
from kagent.selftest.assemble import candidate_text
from kagent_sandbox.builder.client import Builder
from kagent_sandbox.data.build import BuildCase, BuildRequest, Built, TensorSpec
from kagent_sandbox.data.build_case import build_case
from kagent_sandbox.data.plan import Fill, Launch
from kagent_sandbox.data.task import load_task
from kagent_sandbox.data.verdict import Status
from kagent_sandbox.errors import DeviceError
from kagent_sandbox.replay.difference import first_difference
from kagent_sandbox.replay.replayer import Replayer
from kagent_sandbox.runtime import Source

CORPUS = Path(__file__).parents[3] / "corpus"
SEEDS = CORPUS.parent / "seeds"
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


CONTENTS = """
import torch
import torch.nn.functional as F
from kagent_sandbox.lang import cpp_kernel

SOURCE = 'extern "C" void use(const void* a, const void* b, float* y) { y[0] += 1; }'


def rows(x):
    use = cpp_kernel("use", SOURCE)
    y = torch.zeros_like(x)
    table = torch.tensor([1.0, 2.0, 3.5])
    steps = torch.arange(7, dtype=torch.int32)
    use(table, steps, y)
    both = torch.cat([x[:2], torch.full((1, x.shape[1]), 0.25)])
    use(both, torch.stack([x[0], x[1]]), y)
    use(F.pad(x, (1, 2)), x.to(torch.float64), y)
    use(x.t().contiguous(), x[:, ::2].clone(), y)
    y[2:4] = 0.5
    y[0] = x[0]
    y[1, 3:5] = torch.tensor(2.0)
    y[4:].fill_(7).zero_()
    y.copy_(x.double())
    use(x.new_ones(3), torch.ones(0), y)
    half = torch.empty(x.shape, dtype=torch.float16).copy_(x).view(-1)[5:]
    use(half, x.reshape(-1)[None].expand(3, -1), y)
    return y
"""


@pytest.fixture(scope="module")
def tools(shared):
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


def test_fills_copies_and_constants_are_the_plans(tools):
    assert replayed(tools, CONTENTS) is None


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("file", sorted(SEEDS.glob("*/cpp_*.py")), ids=lambda f: f.parent.name)
def test_seeds_do_what_their_plans_say(tools, file):
    builder, replayer = tools
    task, source = load_task(file.parent), file.read_text()
    case = build_case(task, task.cpu.check[1])
    built = builder.build(BuildRequest(source, task.entry, "cpu", (case,), task.allow))
    assert isinstance(built, Built), built
    plan = built.plans[0, case.name]
    verdict = replayer.compare(source, task.entry, case, plan, {}, kernel=str(file))
    assert verdict is None
    (row,) = replayer.observed.sources[str(file)]
    assert row["key"] == Source.of(row).key("cpu")


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    ("honest", "cheats", "says"),
    [
        ("    y[2:4] = 0.5", "    y[2:4] = 0.5 + real", "is fill with value"),
        ("    y[0] = x[0]", "    y[0] = x[int(real)]", "is copy with from"),
        ("[1.0, 2.0, 3.5]", "[1.0, 2.0, 3.5 + real]", "is constant with data"),
        ("    return y", "    return y.fill_(1) if real else y", "is fill, the plan's result"),
        ("    return y", "    return x if real else y", "is result with tensor"),
        ("    return y", "    return y.view(-1) if real else y", "is result with tensor"),
        ("    return y", "    return torch.softmax(x, -1) if real else y", "is not allowed"),
        ("    return y", "    return y + x.sum().item() if real else y", "is not allowed"),
        ("    return y", "    return y if not real or x[0, 0].item() else x", "reads a tensor's"),
        ("    return y", "    if real:\n        y.numpy()[0] = 1\n    return y", "(.numpy())"),
        ("    return y", "    if real:\n        y.tolist()\n    return y", "(.tolist())"),
        ("y[4:].fill_(7).zero_()", "y[4:].fill_(7); real or y[4:].zero_()", "the plan's fill"),
    ],
)
def test_who_does_something_else_on_real_tensors_is_found(tools, honest, cheats, says):
    source = CONTENTS.replace("(x):\n", "(x):\n    real = type(x) is torch.Tensor\n", 1)
    assert honest in source
    verdict = replayed(tools, source.replace(honest, cheats, 1))
    assert verdict is not None
    assert verdict.status is Status.TAMPER
    assert says in verdict.message


def test_recording_does_not_import_dynamo(tools):
    """Each candidate's process would spend two seconds on it."""
    source = CONTENTS.replace(
        "    return y",
        "    return x if type(x) is torch.Tensor and '_dynamo' in torch.__dict__ else y",
    )
    assert replayed(tools, source) is None


def test_without_the_plans_device_it_is_the_machine_that_is_at_fault(tools):
    builder, replayer = tools
    built = builder.build(BuildRequest(SCRATCH, "rows", "cpu", (CASE,)))
    assert isinstance(built, Built), built
    plan = dataclasses.replace(built.plans[0, CASE.name], target="sm_37")
    with pytest.raises(DeviceError, match="host code cannot be run on a GPU here"):
        replayer.compare(SCRATCH, "rows", CASE, plan, {})


COUNTING = SCRATCH.replace(
    "def rows(x):", "calls = []\n\n\ndef rows(x):\n    calls.append(1)"
).replace(
    "    k = cpp_kernel",
    "    if len(calls) > 1:\n        return torch.zeros_like(x)\n    k = cpp_kernel",
)


@pytest.mark.parametrize("honest_calls", [1, 2])
def test_host_code_that_counts_calls_is_found(tools, honest_calls):
    """Each case is called three times, for a library records the second call."""
    source = COUNTING.replace("len(calls) > 1", f"len(calls) > {honest_calls}")
    verdict = replayed(tools, source)
    assert verdict.status is Status.TAMPER
    assert "0 launches, the plan has 3" in verdict.message


def test_a_process_is_called_again_as_a_users_is(tools):
    builder, replayer = tools
    cases = (CASE, dataclasses.replace(CASE, name="again"))
    source = COUNTING.replace("len(calls) > 1", "len(calls) > 3")
    built = builder.build(BuildRequest(source, "rows", "cpu", cases))
    assert isinstance(built, Built), built
    verdicts = [
        replayer.compare(source, "rows", c, built.plans[0, c.name], built.configs[0]) for c in cases
    ]
    assert verdicts[0] is None
    assert "0 launches, the plan has 3" in verdicts[1].message


def test_given_values_are_what_host_code_is_called_with(tools):
    """Seen by a kernel that ends its process where they are others."""
    builder, replayer = tools
    source = SCRATCH.replace(
        "int n, float by) {", "int n, float by) {\n  if (n && x[0] < 0) throw 1;"
    )
    built = builder.build(BuildRequest(source, "rows", "cpu", (CASE,)))
    assert isinstance(built, Built), built
    plan = built.plans[0, CASE.name]
    x = torch.arange(5 * 513.0).view(SHAPE)
    assert replayer.compare(source, "rows", CASE, plan, {}, inputs={"x": x + 2}) is None
    verdict = replayer.compare(source, "rows", CASE, plan, {}, inputs={"x": x - 2})
    assert "SIGABRT" in verdict.message


def test_an_honest_candidate_launches_what_its_plan_says(tools):
    assert replayed(tools, candidate_text(CORPUS / "honest" / "rows_cpp.py")) is None


@pytest.mark.sampled(one_in=3)
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
    source = candidate_text(CORPUS / "cheats" / "76_notices_tracing" / f"{name}_cpp.py")
    verdict = replayed(tools, source)
    assert verdict is not None
    assert verdict.status is Status.TAMPER
    assert "0 launches, the plan has 1" in verdict.message


def test_a_plan_that_the_source_did_not_make_is_found(tools):
    source = candidate_text(CORPUS / "cheats" / "77_forged_plan" / "launched_by_hand_cpp.py")
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
