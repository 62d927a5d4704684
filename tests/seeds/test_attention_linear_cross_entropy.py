"""attention and linear_cross_entropy: their tasks hold together, and their seeds compute them."""

import functools
import math
import re

import pytest
import torch
import torch.nn.functional as F
from cuda_on_cpu import CudaOnCpu
from kagent.text import loop_lines
from kagent_sandbox.data.build import BuildRequest, Built
from kagent_sandbox.data.build_case import build_case
from kagent_sandbox.data.case import Case
from kagent_sandbox.data.task import draw_hidden, load_task
from kagent_sandbox.judge.check.numerics import allowed, measure_errors, share
from kagent_sandbox.judge.interpreter import Interpreted, Interpreter
from kagent_sandbox.runtime import cpp
from seed_cases import SEEDS, Contracts, arguments, import_seed, name_of, outputs, worst_share

TASKS = ("attention", "linear_cross_entropy")
FILES = [f for name in TASKS for f in sorted((SEEDS / name).glob("*_*.py"))]
CPP = [f for f in FILES if f.stem.startswith("cpp_")]
GPU = [f for f in FILES if f not in CPP]
# C++ seeds of all tasks whose code says how wide registers are, or leaves it to the compiler how
# many sums a loop has. Those of the others are as many as a tunable says.
AS_WIDE_AS_REGISTERS = [
    f
    for f in sorted(SEEDS.glob("*/cpp_*.py"))
    if re.search(r"constexpr int LANES|omp simd reduction", f.read_text())
]


@pytest.fixture(scope="module", params=TASKS)
def task(request):
    return load_task(SEEDS / request.param)


# -- tasks ----------------------------------------------------------------------------------------


def test_each_task_has_the_kernels_that_are_promised(task):
    kinds = [f.stem.split("_")[0] for f in FILES if f.parent.name == task.name]
    assert kinds.count("triton") + kinds.count("gluon") >= 2  # languages that Triton compiles
    assert kinds.count("cuda") >= 1
    assert kinds.count("cpp") >= 1


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
@pytest.mark.parametrize("which", ["check", "bench"])
def test_hidden_cases_are_calls_of_the_task(task, kind, which):
    for seed in range(20):
        drawn = draw_hidden(task, kind, which, seed)
        assert len({c.name for c in drawn}) == len(drawn) >= 1
        for case in drawn:
            assert all(math.prod(t.shape) > 0 for t in build_case(task, case).results)
            assert task.min_bytes(case) > task.min_written(case) > 0
            if task.name == "attention":
                assert case.dims["H"] % case.dims["Hkv"] == 0


def test_torchs_scores_of_mixed_attention_err_in_any_order_alike():
    """Were one large product the last, torch's chain would err less than any other."""
    task = load_task(SEEDS / "attention")
    case = next(c for c in task.cpu.check if c.name == "cpu_full_64_mixed")
    given = arguments(task, task.reference(), case, seed=3)
    products = given["q"][:, :, :, None] * given["k"][:, :, None]
    exact = products.double().sum(-1)
    shown = exact > -1000.0
    forward, backward = (
        (functools.reduce(torch.add, p.unbind(-1)) - exact)[shown].square().mean()
        for p in (products, products.flip(-1))
    )
    assert 1 / 2 < backward / forward < 2


def test_targets_of_linear_cross_entropys_tail_are_added_first_and_last():
    """Were all of them last, torch's chain of dx would err less than any other."""
    task = load_task(SEEDS / "linear_cross_entropy")
    case = next(c for c in task.cpu.check if c.inputs == "tail")
    target = arguments(task, task.reference(), case, seed=3)["target"]
    columns = case.dims["V"]
    assert ((target >= columns - 3).sum() - len(target) / 2).abs() < 4
    assert ((target < 3).sum() - len(target) / 2).abs() < 4


def test_a_causal_call_counts_half_of_the_products():
    task = load_task(SEEDS / "attention")
    by_name = {c.name: task.flop_count(c) for c in task.gpu.bench}
    assert by_name["4x16x4096x128_full"] == 4 * 4 * 16 * 4096**2 * 128
    assert by_name["4x16x4096x128_causal"] * 2 == by_name["4x16x4096x128_full"]


def test_torchs_own_result_is_within_the_contract(task):
    reference = task.reference()
    small = [c for c in task.gpu.check if task.min_bytes(c) <= 1 << 20]
    assert len(small) >= 4
    for case in (*task.cpu.check, *draw_hidden(task, "cpu", "check", 3), *small):
        given = arguments(task, reference, case, seed=2)
        assert worst_share(task, reference, given, reference.eager(**given)) <= 1, case.name


@pytest.mark.nightly
@pytest.mark.parametrize("hidden", [64, 200, 1024, 4096])
def test_bfloat16_holds_shifted_logits_of_any_width(hidden):
    """Where it does not, torch errs more than counts, and fails its own contract."""
    task = load_task(SEEDS / "linear_cross_entropy")
    named = {"name": "wide", "dtype": "bfloat16", "inputs": "shifted", "ignore_index": -100}
    case = Case.model_validate({**named, "T": 64, "D": hidden, "V": 2048})
    given = arguments(task, task.reference(), case, seed=0)
    logits = given["x"].double() @ given["weight"].double().T
    assert torch.equal(logits.bfloat16().double(), logits)
    assert 112 <= logits.abs().min() <= logits.abs().max() <= 128
    eager = outputs(task, task.reference().eager, given)
    expected = task.reference().reference(**given)
    for result, out, exact in zip(task.results, eager, expected, strict=True):
        errors = measure_errors(out, exact, result.row_dims)
        assert share(errors, allowed(errors, result, out.dtype)) <= 1


def test_inputs_differ_by_seed_and_repeat(task):
    reference, case = task.reference(), task.cpu.check[0]
    first, again, other = (arguments(task, reference, case, seed) for seed in (1, 1, 2))
    name = task.arguments[0].name
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])


def test_an_unknown_distribution_is_refused(task):
    case = task.cpu.check[0].model_copy(update={"inputs": "cauchy"})
    with pytest.raises(ValueError, match="cauchy"):
        task.reference().inputs(case, torch.Generator(), torch.device("cpu"))


@pytest.mark.parametrize("causal", [True, False])
def test_attentions_reference_is_the_definition(causal, monkeypatch):
    reference = load_task(SEEDS / "attention").reference()
    monkeypatch.setattr(reference, "SCORES", 2 * 6 * 11 * 4)  # chunks of four queries
    q, k, v = (torch.randn(2, heads, 11, 8) for heads in (6, 2, 2))
    o = reference.reference(q=q, k=k, v=v, causal=causal)
    for b, h, i in [(0, 0, 0), (0, 2, 10), (1, 3, 5), (1, 5, 8)]:
        seen = i + 1 if causal else 11
        keys, values = (t[b, h // 3, :seen].double() for t in (k, v))
        p = torch.softmax(keys @ q[b, h, i].double() / math.sqrt(8), 0)
        torch.testing.assert_close(o[b, h, i], p @ values)


def test_linear_cross_entropys_gradients_are_those_of_its_loss(monkeypatch):
    reference = load_task(SEEDS / "linear_cross_entropy").reference()
    monkeypatch.setattr(reference, "LOGITS", 7 * 2)  # chunks of two tokens
    x, weight = torch.randn(5, 3), torch.randn(7, 3)
    target = torch.tensor([0, 6, 4, 3, 3])
    loss, dx, dw = reference.reference(x=x, weight=weight, target=target, ignore_index=4)
    x64, w64 = x.double().requires_grad_(), weight.double().requires_grad_()
    expected = F.cross_entropy(x64 @ w64.T, target, ignore_index=4)
    expected.backward()
    torch.testing.assert_close((loss, dx, dw), (expected.detach(), x64.grad, w64.grad))


def test_without_a_target_only_the_loss_is_nan():
    reference = load_task(SEEDS / "linear_cross_entropy").reference()
    given = {"x": torch.randn(4, 3), "weight": torch.randn(5, 3), "ignore_index": -100}
    for form in (reference.reference, reference.eager):
        loss, dx, dw = form(**given, target=torch.full((4,), -100))
        assert loss.isnan()
        assert not dx.any()
        assert not dw.any()


# -- wrong results fail ---------------------------------------------------------------------------


def _attention(q, k, v, mask, scale=None):
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def _causal(q, shift=0):
    s = q.shape[2]
    return torch.ones(s, s, dtype=torch.bool, device=q.device).tril(shift)


def _eighth_bits(t):
    return t.to(torch.float8_e4m3fn).to(t.dtype)


ATTENTION_MUTANTS = {
    "zeros": lambda q, k, v: torch.zeros_like(q),
    "full": lambda q, k, v: _attention(q, k, v, None),
    "sees the next key": lambda q, k, v: _attention(q, k, v, _causal(q, 1)),
    "loses the first key": lambda q, k, v: _attention(q, k, v, _causal(q).index_fill(1, Z, False)),
    "scale of another size": lambda q, k, v: _attention(q, k, v, _causal(q), 0.13),
    "heads in turn": lambda q, k, v: _attention(
        q, k.repeat(1, q.shape[1] // k.shape[1], 1, 1), v, _causal(q)
    ),
    "scaled": lambda q, k, v: (_attention(q.float(), k.float(), v.float(), _causal(q)) * 1.001).to(
        q.dtype
    ),
    "eight bits": lambda q, k, v: _attention(q, k, _eighth_bits(v), _causal(q)),
}
Z = torch.tensor([0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mutant", ATTENTION_MUTANTS)
def test_wrong_attention_fails(mutant, dtype):
    task = load_task(SEEDS / "attention")
    reference = task.reference()
    case = task.cpu.check[0].model_copy(update={"dtype": dtype, "S": 150})
    given = arguments(task, reference, case, seed=4)
    q, k, v = (given[n] for n in "qkv")
    if mutant == "heads in turn":
        v = v.repeat(1, q.shape[1] // v.shape[1], 1, 1)
    wrong = ATTENTION_MUTANTS[mutant](q, k, v)
    assert worst_share(task, reference, given, wrong) > 1


LINEAR_MUTANTS = {
    "no loss": lambda loss, dx, dw: (loss * 0, dx, dw),
    "loss a thousandth off": lambda loss, dx, dw: (loss * 1.001, dx, dw),
    "sums": lambda loss, dx, dw: (loss, dx * 64, dw * 64),
    "one token lost": lambda loss, dx, dw: (loss, _zero_row(dx), dw),
    "last of the vocabulary lost": lambda loss, dx, dw: (loss, dx, _zero_row(dw)),
    "dx a hundredth off": lambda loss, dx, dw: (loss, dx * 1.01, dw),
    "dw a hundredth off": lambda loss, dx, dw: (loss, dx, dw * 1.01),
    "eight bits dx": lambda loss, dx, dw: (loss, _eighth_bits(dx * 4096) / 4096, dw),
}


def _zero_row(t):
    t = t.clone()
    t[-1] = 0
    return t


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mutant", LINEAR_MUTANTS)
def test_wrong_linear_cross_entropy_fails(mutant, dtype):
    task = load_task(SEEDS / "linear_cross_entropy")
    reference = task.reference()
    case = task.cpu.check[0].model_copy(update={"dtype": dtype})
    given = arguments(task, reference, case, seed=4)
    wrong = LINEAR_MUTANTS[mutant](*reference.eager(**given))
    assert worst_share(task, reference, given, wrong) > 1


@pytest.mark.parametrize("chunks", [4, 32])
def test_a_bfloat16_sum_over_chunks_is_within_the_contract(chunks):
    """Few large chunks, as the seeds have them, and many small ones, as Liger does."""
    task = load_task(SEEDS / "linear_cross_entropy")
    reference = task.reference()
    shape = {"T": 512, "D": 64, "V": 600, "ignore_index": -100}
    case = Case(name="chunks", dtype="bfloat16", **shape)
    given = arguments(task, reference, case, seed=5)
    x, weight, target = (given[n] for n in ("x", "weight", "target"))
    loss, dx, dw = reference.eager(**given)
    dw = torch.zeros_like(dw)
    for rows in torch.arange(512).chunk(chunks):
        dz = torch.softmax((x[rows] @ weight.T).float(), 1)
        dz[range(len(rows)), target[rows]] -= 1
        dw.addmm_((dz / 512).bfloat16().T, x[rows])
    assert worst_share(task, reference, given, (loss, dx, dw)) <= 1


# -- seeds on the CPU -----------------------------------------------------------------------------


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_tunables_are_declared_with_their_default(file):
    seed = import_seed(file)
    assert seed.TUNE
    for name, values in seed.TUNE.items():
        assert getattr(seed, name) in values
        assert len(set(values)) == len(values) > 1


@pytest.mark.sampled(one_in=4)
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in {"AVX2", "AVX512"}, reason="no AVX2 here"
)
@pytest.mark.parametrize("file", AS_WIDE_AS_REGISTERS, ids=name_of)
def test_seeds_are_as_exact_on_processors_without_avx512(file, monkeypatch, tmp_path):
    """Rows were added up in as many sums as AVX2 has lanes: 1.6 and 6 of the tolerance."""
    options = [o for o in cpp.DEFAULT_OPTIONS if not o.startswith("-march=")]
    monkeypatch.setattr(cpp, "DEFAULT_OPTIONS", (*options, "-march=x86-64-v3"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # what is kept there is for this processor
    task, seed = load_task(file.parent), import_seed(file)
    for name, values in seed.TUNE.items():
        monkeypatch.setattr(seed, name, values[-1])  # the largest tile
    contracts = Contracts(task, seed=6)
    # The size of a head is compiled in, and one is enough.
    cases = [c for c in task.cpu.check if c.dims["D"] == 64 or "T" in c.dims]
    assert len(cases) >= 5
    for case in cases:
        assert contracts.worst_share(case, getattr(seed, task.entry)) <= 1, case.name


@pytest.mark.sampled(one_in=2)
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


# -- Triton in the interpreter --------------------------------------------------------------------

# Small enough for several chunks and splits of small cases.
SMALL = {"CHUNK": 30, "SPLITS": 3, "BLOCK_V": 128, "GROUP": 2, "BLOCK": 128, "BLOCK_M": 32}
SMALL_DIMS = {"B": 1, "H": 4, "S": 70, "T": 40, "D": 64, "V": 300}


def shrunk(task):
    """The task with small check cases and no hidden ones."""
    cases = []
    for case in task.gpu.check:
        dims = {n: min(case.dims[n], most) for n, most in SMALL_DIMS.items() if n in case.dims}
        if "H" in dims:
            dims |= {"H": case.dims["H"] // case.dims["Hkv"] * 2, "Hkv": 2}
        cases.append(case.model_copy(update=dims))
    gpu = task.gpu.model_copy(update={"check": tuple(cases), "hidden_check": ()})
    return task.model_copy(update={"gpu": gpu})


@pytest.fixture
def interpreter(file, shared):
    with Interpreter(shrunk(load_task(file.parent)), run_seed=1) as i:
        yield i


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    "file", [f for f in GPU if f.stem.startswith("triton_")], ids=lambda f: f.stem
)
def test_triton_seed_computes_its_task_in_the_interpreter(file, interpreter):
    task, source = load_task(file.parent), file.read_text()
    small = SMALL | ({"CHUNK": 130} if "SPLITS" in source else {})  # there, of the vocabulary
    for name, value in small.items():
        source = re.sub(rf"^{name} = \d+", f"{name} = {value}", source, flags=re.MULTILINE)
    found = interpreter.interpret(source)
    assert isinstance(found, Interpreted), found
    assert {e.case for e in found.errors} == {c.name for c in task.gpu.check}
    assert max(e.share_of_tolerance for e in found.errors) <= 1


# -- CUDA on the CPU ------------------------------------------------------------------------------

FLASH = SEEDS / "attention" / "cuda_flash.py"
ROWS = SEEDS / "linear_cross_entropy" / "cuda_rows.py"
# Whether copies happen as late as they may, and whether threads run in reverse.
ORDERS = [(False, False), (True, True), (False, True), (True, False)]


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize(
    ("tunables", "dims"),
    [
        ({}, {"Hkv": 2, "S": 70, "D": 128, "causal": True}),
        ({}, {"Hkv": 4, "S": 129, "D": 64, "causal": False}),
        ({"BLOCK_N": 32, "STAGES": 3}, {"Hkv": 1, "S": 101, "D": 64, "causal": True}),
        ({"BLOCK_M": 128, "BLOCK_N": 128}, {"Hkv": 2, "S": 65, "D": 64, "causal": True}),
    ],
)
def test_cuda_attention_computes_its_task(tunables, dims, tmp_path, monkeypatch):
    task, seed = load_task(FLASH.parent), import_seed(FLASH)
    case = task.gpu.check[0].model_copy(update={"B": 1, "H": 4, "noncontiguous": True, **dims})
    machine = CudaOnCpu(tmp_path)
    monkeypatch.setattr(seed, "cuda_kernel", machine.cuda_kernel)
    for name, value in tunables.items():
        monkeypatch.setattr(seed, name, value)
    reference = task.reference()
    given = arguments(task, reference, case, seed=7)
    for machine.late_copies, machine.reversed_threads in ORDERS[:2]:
        assert worst_share(task, reference, given, seed.attention(*given.values())) <= 1


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    "line", ["copy_wait<STAGES - 2>();", "__syncthreads();", "__syncwarp();"], ids=str
)
def test_cuda_attention_needs_its_waits(line, tmp_path, monkeypatch):
    """What the emulation is worth: without any one of its waits the kernel fails in it."""
    task, seed = load_task(FLASH.parent), import_seed(FLASH)
    assert line in seed.SOURCE
    monkeypatch.setattr(seed, "SOURCE", seed.SOURCE.replace(line, ""))
    case = task.gpu.check[0].model_copy(update={"B": 1, "H": 1, "Hkv": 1, "S": 140, "D": 64})
    reference = task.reference()
    given = arguments(task, reference, case, seed=7)
    machine = CudaOnCpu(tmp_path)
    monkeypatch.setattr(seed, "cuda_kernel", machine.cuda_kernel)
    shares = []
    for machine.late_copies, machine.reversed_threads in ORDERS:
        shares.append(worst_share(task, reference, given, seed.attention(*given.values())))
    assert max(shares) > 1


@pytest.mark.nightly
def test_cuda_linear_cross_entropy_computes_its_task(tmp_path, monkeypatch):
    task, seed = load_task(ROWS.parent), import_seed(ROWS)
    machine = CudaOnCpu(tmp_path)
    monkeypatch.setattr(seed, "cuda_kernel", machine.cuda_kernel)
    monkeypatch.setattr(seed, "CHUNK", 8)
    monkeypatch.setattr(seed, "THREADS", 64)
    reference = task.reference()
    for i, case in enumerate(task.gpu.check):
        machine.reversed_threads = i % 2 == 1
        small = case.model_copy(update={"T": min(case.dims["T"], 19)})
        given = arguments(task, reference, small, seed=7)
        results = seed.linear_cross_entropy(*given.values())
        assert worst_share(task, reference, given, results) <= 1, case.name


# -- GPU seeds build ------------------------------------------------------------------------------


ODD_AND_LARGE = {
    "attention": ("causal_64_grouped_odd", "4x16x4096x128_causal"),
    "linear_cross_entropy": ("odd_half_ignored", "8192x4096x128256"),
}


def odd_and_large(task):
    by_name = {c.name: c for c in (*task.gpu.check, *task.gpu.bench)}
    return [by_name[name] for name in ODD_AND_LARGE[task.name]]


@pytest.fixture(scope="module")
def gpu_build(builder):
    """Builds a seed for a target, once; Gluon's with their loops."""

    @functools.cache
    def build(file, target):
        task = load_task(file.parent)
        given = tuple(build_case(task, c) for c in odd_and_large(task))
        loops = file.stem.startswith("gluon_")
        built = builder.build(
            BuildRequest(file.read_text(), task.entry, target, given, task.allow, loops=loops)
        )
        assert isinstance(built, Built), built
        return built

    return build


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize(
    ("file", "target"),
    [(f, "sm_90a") for f in GPU] + [(f, "sm_80") for f in GPU if f.stem.startswith("cuda_")],
    ids=lambda v: v if isinstance(v, str) else name_of(v),
)
def test_gpu_seed_builds(gpu_build, file, target):
    task = load_task(file.parent)
    built = gpu_build(file, target)
    case = odd_and_large(task)[-1]
    plan = built.plans[0, case.name]
    if target == "sm_90a":
        assert all(kernel.spill_bytes == 0 for kernel in plan.kernels)
    results = sum(
        math.prod(r.shape) * (4 if r.dtype == "float32" else 2)
        for r in build_case(task, case).results
    )
    scratch = plan.peak_bytes - results
    if task.name == "attention":
        assert scratch <= 0
        assert len(plan.launches) == 1
    else:
        logits = 2 * case.dims["T"] * case.dims["V"]
        assert scratch < logits / 3.5


@pytest.mark.nightly
def test_main_loops_come_first_where_warps_wait_for_others(gpu_build):
    """A Gluon kernel with a warp group for loads: each of its binaries has a loop of products."""
    built = gpu_build(SEEDS / "attention" / "gluon_hopper.py", "sm_90a")
    binaries = {x.binary for x in built.loops}
    assert len(binaries) == 2
    first = built.loops[:2]
    assert {x.binary for x in first} == binaries
    assert all(x.counts["HGMMA"] and x.counts["MUFU"] for x in first)
    lines = loop_lines(built.loops)
    assert all(
        f"_attention {x.binary[:8]} at" in line for x, line in zip(first, lines, strict=False)
    )
