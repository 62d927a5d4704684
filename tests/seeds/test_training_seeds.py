"""Tasks of training and inference: their seeds compute them, and build for an absent GPU."""

import shutil

import pytest
import torch
from kagent_sandbox.data.build import BuildRequest, Built
from kagent_sandbox.data.build_case import build_case
from kagent_sandbox.data.plan import Launch
from kagent_sandbox.data.task import draw_hidden, load_task
from kagent_sandbox.judge.interpreter import Interpreted, Interpreter
from seed_cases import (
    SEEDS,
    TRAINING_TASKS,
    Contracts,
    arguments,
    import_seed,
    outputs,
    worst_share,
)

FORWARD = {
    "gelu_backward": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "softmax_backward": lambda x: torch.softmax(x, -1),
}

OTHER_PATHS = [
    ("rms_norm/triton_rows.py", {"LONG = 2048": "LONG = 16", "SHORT = 1024": "SHORT = 16"}),
    ("fp8_linear/gluon_hopper.py", {"STEPS_LEAST = 8": "STEPS_LEAST = 1"}),
    (  # programs start in another order here than on a GPU
        "attention_backward/gluon_hopper.py",
        {"BESIDE_FROM = 2048": "BESIDE_FROM = 1", "AHEAD = 264": "AHEAD = 1"},
    ),
    (
        "softmax_backward/gluon_held.py",
        {
            "PIECE_BYTES = 16384": "PIECE_BYTES = 512",
            "AHEAD = 6": "AHEAD = 3",
            "SHORTEST = 16384": "SHORTEST = 16",
        },
    ),
]


@pytest.fixture(scope="module", params=TRAINING_TASKS)
def task(request):
    return load_task(SEEDS / request.param)


def seeds(task, *languages):
    return sorted(f for name in languages for f in task.folder.glob(f"{name}_*.py"))


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_torchs_own_result_is_within_the_contract(task, kind):
    reference = task.reference()
    cases = (*task.cases(kind).check, *draw_hidden(task, kind, "check", 3))
    small = [c for c in cases if task.min_bytes(c) <= 1 << 19]
    assert len(small) >= 4
    for case in small:
        given = arguments(task, reference, case, seed=2)
        found = outputs(task, reference.eager, given)
        assert worst_share(task, reference, given, found) <= 1, case.name


def test_an_unknown_distribution_is_refused(task):
    case = task.cpu.check[0].model_copy(update={"inputs": "cauchy"})
    with pytest.raises(ValueError, match="cauchy"):
        task.reference().inputs(case, torch.Generator(), torch.device("cpu"))


def test_gradients_of_softmax_do_not_cancel_by_chance():
    """Where the sum's rounding decides an element, each order of additions has its own."""
    task = load_task(SEEDS / "softmax_backward")
    for name in ("normal", "masked", "mixed"):
        dims = {"inputs": name, "offset": 0, "name": "many", "M": 20000, "N": 61}
        case = task.cpu.check[0].model_copy(update=dims)
        given = arguments(task, task.reference(), case, seed=3)
        y, grad = given["y"].double(), given["grad"].double()
        # Times the sum's relative error: what an element errs where all else is exact.
        dx = task.reference().reference(grad=given["grad"], y=given["y"])
        magnitude = dx.abs() + dx.abs().mean(1, keepdim=True)
        amplified = y * (grad * y).abs().sum(1, keepdim=True) / magnitude
        alone = (y > 0).sum(1) == 1  # its sum is one product, and the result 0
        assert amplified[~alone & (grad != 0).any(1)].max() < 8, name
        if name == "normal":
            dot = (grad * y).sum(1).mean() / grad.abs().mean()
            assert dot > 1 / 20  # leaving the sum out is seen


def test_windows_of_softmaxs_result_have_half_of_the_columns():
    """Were they narrower, the row's mean would say little of their elements."""
    task = load_task(SEEDS / "softmax_backward")
    dims = {"inputs": "mixed", "offset": 0, "name": "windows", "M": 4000, "N": 60}
    case = task.cpu.check[0].model_copy(update=dims)
    kept = arguments(task, task.reference(), case, seed=3)["y"] > 0
    first, last = kept.int().argmax(1), 59 - kept.flip(1).int().argmax(1)
    counts = kept.sum(1)
    windows = counts[(counts > 2) & (counts == last - first + 1)]
    assert windows.min() == 30


def test_gradients_of_gelu_are_not_small_by_chance_in_short_rows():
    """Where the derivative vanishes, the rounding of its terms is beside the row's mean."""
    task = load_task(SEEDS / "gelu_backward")
    for name, scale in (("normal", 1.0), ("mixed", 1.0), ("ramp", 4.0)):
        dims = {"inputs": name, "scale": scale, "name": "many", "M": 20000, "N": 9}
        case = task.cpu.check[0].model_copy(update=dims)
        given = arguments(task, task.reference(), case, seed=3)
        dx = task.reference().reference(**given)
        magnitude = dx.abs() + dx.abs().mean(1, keepdim=True)
        terms = given["grad"].double().abs() * (given["x"].abs() < 4)  # each about 1/4 there
        assert (terms / magnitude)[given["grad"] != 0].max() < 20, name


@pytest.mark.sampled(one_in=5)
def test_cpp_seeds_compute_their_task(task, monkeypatch):
    """With the default and the last value of every tunable."""
    cases = (*task.cpu.check, *draw_hidden(task, "cpu", "check", 5))
    contracts = Contracts(task, seed=6)
    for file in seeds(task, "cpp"):
        seed = import_seed(file)
        for pick in (None, -1):
            for name, values in seed.TUNE.items():
                assert getattr(seed, name) in values
                if pick is not None:
                    monkeypatch.setattr(seed, name, values[pick])
            for case in cases:
                function = getattr(seed, task.entry)
                assert contracts.worst_share(case, function) <= 1, (case.name, pick)


@pytest.mark.sampled(one_in=10)
def test_seeds_that_triton_compiles_compute_their_task_in_the_interpreter(task, shared):
    with Interpreter(task, run_seed=1) as interpreter:
        for file in seeds(task, "triton", "gluon"):
            found = interpreter.interpret(file.read_text())
            assert isinstance(found, Interpreted), found
            assert len(found.errors) >= 5
            assert not found.not_simulated
            assert all(e.share_of_tolerance <= 1 for e in found.errors)


@pytest.mark.nightly
@pytest.mark.parametrize(("file", "edits"), OTHER_PATHS)
def test_paths_of_cases_that_are_too_large_here_compute_their_task(file, edits, shared):
    source = (SEEDS / file).read_text()
    for old, new in edits.items():
        assert source.count(old) == 1
        source = source.replace(old, new)
    with Interpreter(load_task((SEEDS / file).parent), run_seed=1) as interpreter:
        found = interpreter.interpret(source)
    assert isinstance(found, Interpreted), found
    assert len(found.errors) >= 5
    assert all(e.share_of_tolerance <= 1 for e in found.errors)


@pytest.mark.nightly
def test_rows_that_fill_the_last_tile_leave_no_trace_without_epsilon(tmp_path, shared):
    """Their root is 0."""
    folder = shutil.copytree(SEEDS / "rms_norm_backward", tmp_path / "rms_norm_backward")
    text = (folder / "task.toml").read_text()
    assert text.count("value = 1e-6") == 1
    (folder / "task.toml").write_text(text.replace("value = 1e-6", "value = 0.0"))
    with Interpreter(load_task(folder), run_seed=1) as interpreter:
        found = interpreter.interpret((folder / "triton_rows.py").read_text())
    assert isinstance(found, Interpreted), found


@pytest.mark.sampled(one_in=10)
def test_gpu_seeds_build_without_spills(task, builder):
    widest = max(task.gpu.bench, key=lambda c: (c.dims.get("N", 0), task.min_bytes(c)))
    cases = tuple(build_case(task, c) for c in (widest, task.gpu.check[2]))
    for file in seeds(task, "triton", "gluon", "cuda"):
        built = builder.build(
            BuildRequest(file.read_text(), task.entry, "sm_90a", cases, task.allow)
        )
        assert isinstance(built, Built), built
        for plan in built.plans.values():
            assert all(kernel.spill_bytes == 0 for kernel in plan.kernels)


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("case", [{"N": 16392}, {"N": 65536, "noncontiguous": True}])
def test_rows_of_whole_words_are_held_without_spills(case, builder):
    """16 bytes divide their columns and strides, and 16 elements do not."""
    task = load_task(SEEDS / "softmax_backward")
    case = task.gpu.check[0].model_copy(update={"name": "words", "M": 64, **case})
    text = (task.folder / "gluon_held.py").read_text()
    cases = (build_case(task, case),)
    built = builder.build(BuildRequest(text, task.entry, "sm_90a", cases, task.allow))
    assert isinstance(built, Built), built
    (kernel,) = (k for plan in built.plans.values() for k in plan.kernels)
    assert kernel.name == "softmax_backward_held"
    assert kernel.spill_bytes == 0


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize(
    ("dims", "launches"),
    [
        ((531, 1248, 6640), [(100, 1, 1), (133, 10, 1)]),  # 50 tiles, 2 parts
        ((300, 257, 8192), [(72, 1, 1), (75, 3, 1)]),  # 9 tiles, 8 parts
        ((81, 13088, 4848), [(103, 1, 1)]),  # of 103 tiles, two parts have no room
        ((128, 128, 1920), [(1, 1, 1)]),  # 15 steps
    ],
)
def test_sums_of_few_tiles_are_split_without_spills(dims, launches, builder):
    """A part has one of the H100's 132 multiprocessors, and at least 8 steps of 128 products."""
    task = load_task(SEEDS / "fp8_linear")
    case = task.gpu.check[0].model_copy(
        update={"name": "few", **dict(zip("MNK", dims, strict=True))}
    )
    text = (task.folder / "gluon_hopper.py").read_text()
    cases = (build_case(task, case),)
    built = builder.build(BuildRequest(text, task.entry, "sm_90a", cases, task.allow))
    assert isinstance(built, Built), built
    (plan,) = built.plans.values()
    assert [op.grid for op in plan.ops if isinstance(op, Launch)] == launches
    assert len(plan.kernels) == len(launches)
    assert all(kernel.spill_bytes == 0 for kernel in plan.kernels)


@pytest.mark.parametrize("name", FORWARD)
def test_references_are_the_gradients_of_their_function(name):
    reference = load_task(SEEDS / name).reference()
    x = torch.randn(5, 40, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(5, 40, dtype=torch.float64)
    y = FORWARD[name](x)
    (expected,) = torch.autograd.grad(y, x, grad)
    kept = {"x": x} if "gelu" in name else {"y": y}
    found = reference.reference(grad=grad, **{n: t.detach() for n, t in kept.items()})
    torch.testing.assert_close(found, expected)


def test_the_reference_of_rms_norms_gradients_is_that_of_its_function():
    forward = load_task(SEEDS / "rms_norm").reference()
    backward = load_task(SEEDS / "rms_norm_backward").reference()
    x = torch.randn(5, 40, dtype=torch.float64)
    grad, weight = torch.randn_like(x), torch.randn(40, dtype=torch.float64)

    def definition(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight

    torch.testing.assert_close(
        forward.reference(x=x, weight=weight, eps=0.1), definition(x, weight)
    )
    leaves = (x.clone().requires_grad_(), weight.clone().requires_grad_())
    expected = torch.autograd.grad(definition(*leaves), leaves, grad)
    found = backward.reference(grad=grad, x=x, weight=weight, eps=0.1)
    torch.testing.assert_close(found, expected)


def test_a_step_of_adamw_is_that_of_torchs_optimiser():
    reference = load_task(SEEDS / "adamw").reference()
    p, m = torch.randn(5, 8, dtype=torch.float64), torch.zeros(5, 8, dtype=torch.float64)
    leaf = p.clone().requires_grad_()
    settings = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.2}
    torchs = torch.optim.AdamW([leaf], **settings)
    v = m
    for step in (1, 2):
        leaf.grad = torch.randn_like(p)
        torchs.step()
        p, m, v = reference.reference(
            param=p,
            grad=leaf.grad,
            exp_avg=m,
            exp_avg_sq=v,
            lr=torch.tensor(0.1, dtype=torch.float64),
            step=torch.tensor(float(step)),
            beta1=0.8,
            beta2=0.9,
            eps=1e-3,
            weight_decay=0.2,
        )
        torch.testing.assert_close(p, leaf.detach())


def test_a_step_over_several_tensors_is_that_of_torchs_optimiser_with_two_groups():
    reference = load_task(SEEDS / "adamw_tensors").reference()
    shapes = {"wide": (9, 8), "square": (8, 8), "gain": (8,), "bias": (9,)}
    leaves = {n: torch.randn(s, dtype=torch.float64).requires_grad_() for n, s in shapes.items()}
    matrices, others = (
        [leaves[n] for n in names] for names in (("wide", "square"), ("gain", "bias"))
    )
    settings = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3}
    torchs = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.2}, {"params": others, "weight_decay": 0.0}],
        **settings,
    )
    given = {"lr": torch.tensor(0.1, dtype=torch.float64), "step": torch.tensor(1.0)}
    given |= {"beta1": 0.8, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.2}
    for name, leaf in leaves.items():
        leaf.grad = torch.randn_like(leaf)
        zeros = torch.zeros_like(leaf, requires_grad=False)
        given |= {name: leaf.detach().clone(), f"grad_{name}": leaf.grad}
        given |= {f"exp_avg_{name}": zeros, f"exp_avg_sq_{name}": zeros}
    new = reference.reference(**given)
    torchs.step()
    for found, leaf in zip(new[:4], leaves.values(), strict=True):
        torch.testing.assert_close(found, leaf.detach())


def test_gelus_gradient_vanishes_where_float32_has_no_numbers():
    """Rows that hold nothing else are compared by their own size."""
    task = load_task(SEEDS / "gelu_backward")
    reference, seed = task.reference(), import_seed(task.folder / "cpp_simd.py")
    grad = torch.full((1, 64), -1.5)
    for x in (-13.0, -13.5, -14.0, -20.0, -2000.0):
        given = {"grad": grad, "x": torch.full((1, 64), x)}
        exact = reference.reference(**given)
        off = (seed.gelu_backward(**given).double() - exact).abs().max()
        assert off <= 1e-5 * exact.abs().max() + 1.5e-45, x
