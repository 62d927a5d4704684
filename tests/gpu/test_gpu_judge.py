"""The judge on a real GPU, with candidates that the real builder made."""

import pytest
from kagent_sandbox.data.verdict import Passed, Rejected, Status

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
SEED = 5
TASK = """
name = "double"
summary = "Twice the input"
entry = "double"
signature = "double(x: Tensor[M, N]) -> Tensor[M, N]"
bytes = "2 * M * N * itemsize"
written = "M * N * itemsize"
flops = "M * N"
dims = { M = "rows", N = "columns" }
arguments = [{ name = "x", shape = ["M", "N"] }]
results = [{ name = "y", shape = ["M", "N"], k = 2.0 }]

[[gpu.check]]
name = "odd"
dtype = "bfloat16"
M = 7
N = 1021

[[gpu.check]]
name = "padded"
dtype = "float32"
noncontiguous = true
M = 5
N = 9

[[gpu.bench]]
name = "bench"
dtype = "bfloat16"
M = 4096
N = 16384

[[gpu.hidden_bench]]
count = 1
dtype = ["bfloat16"]
dims = { M = [3000], N = [16384] }

[[cpu.check]]
name = "cpu_check"
dtype = "float32"
M = 1
N = 1

[[cpu.bench]]
name = "cpu_bench"
dtype = "float32"
M = 1
N = 1
"""
REFERENCE = """
import torch

def inputs(case, generator, device):
    shape = (case.dims["M"], case.dims["N"])
    x = torch.randn(shape, generator=generator, device=device)
    return {"x": x.to(getattr(torch, case.dtype))}

def reference(*, x):
    return 2 * x.double()

def eager(*, x):
    return x * 2

def experts():
    return {}
"""
SOURCE = """
import torch
import triton
import triton.language as tl

TUNE = {"BLOCK": [256, 2048]}
BLOCK = 256


@triton.jit
def _double(x_ptr, y_ptr, step, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * step + at, mask=at < columns)
        tl.store(y_ptr + row * columns + at, FORMULA, mask=at < LIMIT)


def double(x):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _double[(x.shape[0],)](x, y, x.stride(0), x.shape[1], BLOCK=BLOCK)
    return y
"""


def source(formula="x * 2", limit="columns"):
    return SOURCE.replace("FORMULA", formula).replace("LIMIT", limit)


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    from kagent_sandbox.data.task import load_task
    from kagent_sandbox.device.cuda.backend import GpuBackend
    from kagent_sandbox.judge.judge import Judge

    folder = tmp_path_factory.mktemp("double")
    (folder / "task.toml").write_text(TASK)
    (folder / "reference.py").write_text(REFERENCE)
    judge = Judge(load_task(folder), GpuBackend(), SEED, {"bench": 100.0})
    yield judge
    judge.close()


def build(judge, builder, text, configs=1):
    from kagent_sandbox.data.build import BuildRequest
    from kagent_sandbox.data.build_case import build_case
    from kagent_sandbox.judge.check.cases import bench_cases

    cases = [*judge.check_cases, *bench_cases(judge.task, "gpu"), *judge.race_cases]
    request = BuildRequest(
        text,
        judge.task.entry,
        judge.backend.facts.target,
        tuple(build_case(judge.task, c) for c in cases),
        max_configs=configs,
    )
    built = builder.build(request)
    assert not isinstance(built, Rejected), built
    return built


def test_a_correct_kernel_is_checked_timed_and_compared(judge, builder):
    from kagent_sandbox.data.build import Contender

    built = build(judge, builder, source(), configs=2)
    errors = judge.check(built)
    assert not isinstance(errors, Rejected), errors
    first = judge.measure(built, errors)
    assert isinstance(first, Passed), first
    assert judge.check(built)
    incumbent = Contender("first", built, {t.case: t.config for t in first.timings})
    second = judge.measure(built, errors, incumbent)
    assert isinstance(second, Passed), second
    assert second.versus is not None
    assert second.versus.against == "first"
    print({part: f"{1e3 * s:.0f} ms" for part, s in second.lane.items()})


def test_launchers_wait_for_their_candidates_in_any_order(judge, builder):
    one, other = (build(judge, builder, source(f)) for f in ("x * 2", "x + x"))
    errors = [judge.check(one), judge.check(other)]
    kept = [c.session for c in judge._checked.values() if c.session is not None]
    assert len(kept) == 2
    for candidate, found in zip((one, other), errors, strict=True):
        passed = judge.measure(candidate, found)
        assert isinstance(passed, Passed), passed
        assert "start" in passed.lane  # of entering the session: no new process
    assert not any(session._launchers for session in kept)


@pytest.mark.parametrize(
    ("formula", "limit", "status"),
    [
        ("x * 2.01", "columns", Status.INCORRECT_NUMERICAL),
        ("x * 2", "columns - 1", Status.INCORRECT_NUMERICAL),
        ("x * 2", "columns + 1", Status.TAMPER),
    ],
)
def test_wrong_kernels_are_rejected(judge, builder, formula, limit, status):
    verdict = judge.check(build(judge, builder, source(formula, limit)))
    assert isinstance(verdict, Rejected)
    assert verdict.status is status, verdict


def test_an_illegal_address_is_a_fault_and_the_next_candidate_is_fine(judge, builder):
    wild = source().replace("tl.store(y_ptr + row", "tl.store(y_ptr + (1 << 45) + row")
    verdict = judge.check(build(judge, builder, wild))
    assert isinstance(verdict, Rejected)
    assert verdict.status is Status.GPU_FAULT, verdict
    assert not isinstance(judge.check(build(judge, builder, source())), Rejected)


def test_a_race_with_baselines(judge, builder):
    from kagent_sandbox.data.build import Contender
    from kagent_sandbox.data.race import BEST_OF_TORCH
    from kagent_sandbox.judge.timing.race_baselines import RaceBaselines

    built = build(judge, builder, source())
    race_baselines = RaceBaselines.on(judge.backend, judge.task)
    race = judge.race([Contender("one", built, {})], hidden=True, race_baselines=race_baselines)
    print({part: f"{s:.1f} s" for part, s in race.seconds.items()})
    assert "eager" in race.cases[0].baselines
    assert BEST_OF_TORCH in {c.against for c in race.overall["one"]}
    assert not race.failed
