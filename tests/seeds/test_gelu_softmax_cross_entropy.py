"""gelu, softmax and cross_entropy: their tasks hold together, and their seeds compute them."""

import functools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from kagent_sandbox.data.build import BuildRequest, Built
from kagent_sandbox.data.build_case import build_case
from kagent_sandbox.data.compiled import MOST_LOOPS_OF_ALL, loop_text
from kagent_sandbox.data.task import draw_hidden, load_task
from seed_cases import (
    SEEDS,
    Contract,
    Contracts,
    arguments,
    as_tuple,
    import_seed,
    name_of,
    worst_share,
)

TASKS = ("gelu", "softmax", "cross_entropy")
FILES = [f for name in TASKS for f in sorted((SEEDS / name).glob("*_*.py"))]
CPP = [f for f in FILES if f.stem.startswith("cpp_")]
CUDA = [f for f in FILES if f.stem.startswith("cuda_")]


@pytest.fixture(scope="module", params=TASKS)
def task(request):
    return load_task(SEEDS / request.param)


# -- tasks ----------------------------------------------------------------------------------------


def test_each_task_has_the_kernels_that_are_promised(task):
    kinds = [f.stem.split("_")[0] for f in FILES if f.parent.name == task.name]
    assert kinds.count("triton") >= 2
    assert kinds.count("cuda") >= 1
    assert kinds.count("cpp") >= (2 if task.name == "softmax" else 1)


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
@pytest.mark.parametrize("which", ["check", "bench"])
def test_hidden_cases_are_calls_of_the_task(task, kind, which):
    for seed in range(20):
        drawn = draw_hidden(task, kind, which, seed)
        assert len({c.name for c in drawn}) == len(drawn) >= 2
        for case in drawn:
            assert all(math.prod(t.shape) > 0 for t in build_case(task, case).results)
            assert task.min_bytes(case) > task.min_written(case) > 0


def test_torchs_own_result_is_within_the_contract(task):
    reference = task.reference()
    small = [c for c in task.gpu.check if c.dims["M"] * c.dims["N"] <= 70_000]
    for case in (*task.cpu.check, *draw_hidden(task, "cpu", "check", 3), *small):
        given = arguments(task, reference, case, seed=2)
        assert worst_share(task, reference, given, reference.eager(**given)) <= 1, case.name


@pytest.mark.parametrize(
    "dims",
    [
        {"N": 2, "M": 4000, "inputs": "normal"},
        {"N": 7, "M": 4000, "inputs": "scattered"},
        {"N": 300, "M": 2000, "inputs": "spiked", "scale": 0.1},
        {"N": 40, "M": 4000, "inputs": "normal", "scale": 20.0},
    ],
)
def test_gradients_of_cross_entropy_do_not_cancel_by_chance(dims):
    """Where the target is likely, the rounding of its probability decides p - 1."""
    task = load_task(SEEDS / "cross_entropy")
    case = task.cpu.check[0].model_copy(update={"name": "likely", **dims})
    given = arguments(task, task.reference(), case, seed=3)
    kept = given["target"] >= 0
    p = torch.softmax(given["logits"][kept].double(), -1)
    p = p.gather(1, given["target"][kept, None])
    assert (1 / (1 - p[p < 1 - 1e-9])).max() < 2.5  # times the probability's relative error


@pytest.mark.parametrize("inputs", ["mixed", "normal", "trained"])
def test_losses_added_in_any_order_are_within_the_contract(inputs):
    """Atomic additions, each of which rounds the sum so far."""
    task = load_task(SEEDS / "cross_entropy")
    dims = {"M": 16384, "N": 64, "inputs": inputs, "scale": 0.1, "dtype": "float32"}
    case = task.cpu.check[0].model_copy(update={"name": "many", **dims})
    reference, rng = task.reference(), np.random.default_rng(0)
    for seed in range(4):
        given = arguments(task, reference, case, seed)
        contract, (_, grad) = Contract(task, reference, given), reference.eager(**given)
        each = torch.nn.functional.cross_entropy(
            given["logits"].double(), given["target"], reduction="none", ignore_index=-100
        )
        terms, count = each.float().numpy(), int((given["target"] >= 0).sum())
        for _ in range(10):
            total = np.add.accumulate(rng.permutation(terms))[-1]  # one after the other, in float32
            assert contract.worst_share((torch.tensor(total / count), grad)) < 0.5


def test_inputs_differ_by_seed_and_repeat(task):
    reference, case = task.reference(), task.cpu.check[0]
    first, again, other = (arguments(task, reference, case, seed) for seed in (1, 1, 2))
    name = task.arguments[0].name
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])


def test_an_unknown_distribution_is_refused(task):
    reference = task.reference()
    case = task.cpu.check[0].model_copy(update={"inputs": "cauchy"})
    with pytest.raises(ValueError, match="cauchy"):
        reference.inputs(case, torch.Generator(), torch.device("cpu"))


def test_cross_entropys_gradient_is_that_of_its_loss():
    reference = load_task(SEEDS / "cross_entropy").reference()
    logits = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 6, -100, 3, 3])
    loss, grad = reference.reference(
        logits=logits.detach().float(), target=target, ignore_index=-100
    )

    def mean_loss(x):
        return torch.nn.functional.cross_entropy(x, target)

    with torch.no_grad():
        logits.copy_(logits.float())
    torch.autograd.gradcheck(mean_loss, logits)
    expected = mean_loss(logits)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(grad, logits.grad)


# -- wrong results fail ---------------------------------------------------------------------------


def _without_last_column(y):
    y = y.clone()
    y[:, -1] = 0
    return y


MUTANTS = {
    "zeros": torch.zeros_like,
    "mean": lambda y: y.mean(-1, keepdim=True).expand_as(y).clone(),
    "scaled": lambda y: y * 1.001,
    "lost_tail": _without_last_column,
    "shifted": lambda y: y.roll(1, -1),
    "bfloat16": lambda y: y.bfloat16().float(),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_matrix_fails(task, mutant):
    reference, case = task.reference(), task.cpu.check[0]
    given = arguments(task, reference, case, seed=4)
    *others, matrix = as_tuple(reference.eager(**given))
    assert worst_share(task, reference, given, (*others, MUTANTS[mutant](matrix))) > 1


@pytest.mark.parametrize("factor", [0.0, 0.999, 1.001])
def test_a_wrong_loss_fails(factor):
    task = load_task(SEEDS / "cross_entropy")
    reference = task.reference()
    given = arguments(task, reference, task.cpu.check[1], seed=4)
    loss, grad = reference.eager(**given)
    assert worst_share(task, reference, given, (loss * factor, grad)) > 1


# -- seeds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_tunables_are_declared_with_their_default(file):
    seed = import_seed(file)
    assert seed.TUNE
    for name, values in seed.TUNE.items():
        assert getattr(seed, name) in values
        assert len(set(values)) == len(values) > 1


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("file", CPP, ids=name_of)
def test_cpp_seed_computes_its_task(file, monkeypatch):
    task, seed = load_task(file.parent), import_seed(file)
    contracts = Contracts(task, seed=6)
    cases = (*task.cpu.check, *draw_hidden(task, "cpu", "check", 5))
    # The default, and the first and the last value of every tunable.
    for pick in (None, 0, -1):
        for name, values in seed.TUNE.items():
            monkeypatch.setattr(seed, name, getattr(seed, name) if pick is None else values[pick])
        for case in cases:
            assert contracts.worst_share(case, getattr(seed, task.entry)) <= 1, case.name


def test_softmax_of_masked_rows_is_as_torch_has_it():
    x = torch.randn(3, 300)
    x[0, :280] = -torch.inf
    x[1] = -torch.inf
    for file in CPP:
        if file.parent.name == "softmax":
            y = import_seed(file).softmax(x)
            torch.testing.assert_close(y, torch.softmax(x, -1), equal_nan=True)
            assert (y[0, :280] == 0).all()


@pytest.mark.nightly
def test_triton_seeds_compute_their_task_in_the_interpreter():
    folders = [SEEDS / name for name in TASKS]
    run = subprocess.run(
        [sys.executable, Path(__file__).with_name("interpret_seeds.py"), *folders],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    shares = json.loads(run.stdout)
    assert len(shares) >= 18
    assert max(shares.values()) <= 1, shares


def widest_of(task):
    return max(task.gpu.bench, key=lambda c: (c.dims["N"], c.dims["M"]))


LOOPS = (SEEDS / "softmax" / "triton_online.py", SEEDS / "cross_entropy" / "cuda_cluster.py")


@pytest.fixture(scope="module")
def gpu_build(builder):
    """Builds a seed for a target, once; those of `LOOPS` with their loops."""

    @functools.cache
    def build(file, target):
        task = load_task(file.parent)
        odd = next(c for c in task.gpu.check if c.dims["N"] == 1021)
        cases = tuple(build_case(task, c) for c in (widest_of(task), odd))
        loops = target == "sm_90a" and file in LOOPS
        request = BuildRequest(file.read_text(), task.entry, target, cases, loops=loops)
        built = builder.build(request)
        assert isinstance(built, Built), built
        return built

    return build


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("file", CUDA, ids=name_of)
def test_cuda_seed_builds_without_spills(gpu_build, file, target):
    widest = widest_of(load_task(file.parent))
    built = gpu_build(file, target)
    plan = built.plans[0, widest.name]
    assert all(kernel.spill_bytes == 0 for kernel in plan.kernels)
    clusters = [launch.cluster for launch in plan.launches if launch.cluster]
    # Of 131072 columns: blocks of 512 threads of 32 values, or that keep the words as they came.
    hopper = {"cuda_cluster": 8, "cuda_packed": 2, "cuda_streamed": 2}
    blocks = hopper.get(file.stem) if target == "sm_90a" else None
    assert clusters == ([(blocks, 1, 1)] if blocks else [])


@pytest.mark.parametrize("file", LOOPS, ids=name_of)
def test_a_seed_has_loops_that_load_and_exponentiate(file, gpu_build):
    built = gpu_build(file, "sm_90a")
    assert 0 < len(built.loops) <= MOST_LOOPS_OF_ALL
    kinds = {kind for loop in built.loops for kind in loop.counts}
    assert "MUFU" in kinds
    assert any(kind.startswith("LDG ") for kind in kinds)
    for loop in built.loops:
        assert sum(loop.counts.values()) <= loop.instructions
        assert "clocks for a warp on each scheduler" in loop_text(loop)
