"""Seeds that Inductor writes: traced for all shapes without a GPU, checked before they are kept."""

import ast
import functools
import math
import os
import re
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from doubling_task import REFERENCE, TASK
from kagent.authoring import seeds
from kagent.authoring.inductor import cpp, decompositions, products, triton
from kagent.authoring.inductor.row_loops import improve_row_loops
from kagent.authoring.inductor.trace import NoSeed, _described
from kagent.evolve.open_machine import request_maker
from kagent.tasks import refusal_of
from kagent_sandbox.data.build import Built
from kagent_sandbox.data.task import load_task

OWN = {
    "expm1": np.expm1,
    "log1p": np.log1p,
    "tanh": np.tanh,
    "trunc": np.trunc,
    "nearbyint": np.rint,
}


def task_of(folder, expression, task):
    """Write a task whose function is a PyTorch expression of x: [M, N]."""
    (folder / "task.toml").write_text(task)
    text = REFERENCE.replace("x.double() * 2", expression.replace("x", "x.double()", 1))
    (folder / "reference.py").write_text(text.replace("return x * 2", f"return {expression}"))
    return folder


@pytest.fixture
def make(tmp_path):
    """A task folder: see `task_of`."""
    return lambda expression, task=TASK: task_of(tmp_path, expression, task)


@pytest.fixture(scope="module")
def gpu_seed(tmp_path_factory):
    """A task folder and what came of its seed for GPUs, which several tests look at: Inductor
    writes it once.
    """

    @functools.cache
    def written(expression, floor):
        task = TASK.replace("k = 2.0", f"k = 2.0, floor = {floor}")
        folder = task_of(tmp_path_factory.mktemp("task"), expression, task)
        (outcome,) = seeds.write_seeds(folder, kinds=("gpu",))
        assert outcome.path is not None, outcome.reason
        return folder, outcome

    return written


pytestmark = pytest.mark.usefixtures("shared", "brief_timing", "warm_processes")


@pytest.mark.nightly
def test_a_cpu_seed_is_right_and_kept(make):
    task = TASK.replace("k = 2.0", "k = 2.0, floor = 4.0")
    (outcome,) = seeds.write_seeds(make("x.log_softmax(-1)", task), kinds=("cpu",))
    assert outcome.path is not None, outcome.reason
    assert outcome.results == 3  # two cases, and a hidden one
    text = outcome.path.read_text()
    assert "schedule(SCHEDULE)" in text
    assert "double tmp_acc" in text  # a sum in one float would err with the row's length
    assert "torch/" not in text


@pytest.mark.nightly
@pytest.mark.parametrize(("floor", "used"), [(4.0, 1), (0.5, 0)])
def test_a_cpu_seed_has_the_functions_of_vectors_that_its_tolerance_allows(make, floor, used):
    """glibc's exponentials of vectors err by up to 2.6 ulp, others by less than one."""
    task = TASK.replace("k = 2.0", f"k = 1.0, floor = {floor}")
    (outcome,) = seeds.write_seeds(make("x.exp()", task), kinds=("cpu",))
    assert outcome.path is not None, outcome.reason
    assert f"VECTOR_MATH = {used}" in outcome.path.read_text().splitlines()


@pytest.mark.nightly
def test_a_gpu_seed_is_right_and_holds_for_all_shapes(gpu_seed):
    _, outcome = gpu_seed("x.log_softmax(-1)", 4.0)
    assert outcome.results >= 1  # without a GPU, of the case that can be interpreted
    source = outcome.path.read_text()
    for line in (
        "@triton.jit",
        "def double(x):",
        "    M, N = x.shape",
        "    y = torch.empty((M, N), dtype=torch.float32, device=x.device)",
        "        R0_BLOCK=min(INNER_R0_BLOCK, triton.next_power_of_2(N)),",
        '    "INNER_R0_BLOCK": [1024, 2048, 4096],',
    ):
        assert line in source.splitlines()
    assert source.count("tl.load(") == 2  # one for the largest element and the sum, one to write
    assert "inductor" not in source.split('"""')[2]  # none of its library
    assert "libdevice" not in source  # which the interpreter lacks


@pytest.mark.nightly
@pytest.mark.parametrize(
    "expression", ["(lambda a: a @ a.mT @ a)(x)", "(lambda a: a.relu() @ a.mT @ a)(x)"]
)
def test_a_product_in_float32_loads_matrices_and_says_how_it_multiplies(gpu_seed, expression):
    _, outcome = gpu_seed(expression, 40.0)
    assert outcome.results >= 1
    source = outcome.path.read_text()
    assert source.count("input_precision=DOT_PRECISION)") == 2
    assert "DOT_PRECISION = 'tf32x3'" in source.splitlines()
    assert "tl.reshape(" not in source


SPLIT = """
import importlib.util, sys, torch, triton.runtime.interpreter as interpreter
patch = interpreter._patch_lang_tensor
def patched(tensor, *scope):  # as kagent's own interpreter does
    patch(tensor, *scope)
    tensor.__index__ = lambda self: int(self.handle.data.item())
interpreter._patch_lang_tensor = patched
spec = importlib.util.spec_from_file_location("seed", sys.argv[1])
seed = importlib.util.module_from_spec(spec)
spec.loader.exec_module(seed)
for rows, columns, splits in ((17, 16901, 4), (66, 8192, 2), (5, 8191, 1)):
    x = torch.rand(rows, columns, generator=torch.Generator().manual_seed(rows))
    tiles = -(-rows // seed.DOT_YBLOCK) * -(-rows // seed.DOT_XBLOCK)
    assert seed._splits_of(x, tiles, columns) == splits, (rows, columns)
    assert seed._splits_of(x.mT, tiles, columns) == 1  # its rows lie apart
    exact = x.double() @ x.double().mT @ x.double()
    torch.testing.assert_close(seed.double(x).double(), exact, rtol=1e-6, atol=0.0)
"""


@pytest.mark.nightly
def test_few_tiles_make_their_long_sums_in_parts(gpu_seed, builder):
    """Four programs had all of 256 x 256 sums of 524288: 0.044 times as fast as torch (H200)."""
    folder, outcome = gpu_seed("(lambda a: a @ a.mT @ a)(x)", 40.0)
    task, source = load_task(folder), outcome.path.read_text()
    kernels = {}
    for columns in (16384, 512):
        case = task.gpu.bench[0].model_copy(update={"M": 16, "N": columns})
        found = builder.build(request_maker(task, "sm_90a", (case,), 1)(source))
        assert isinstance(found, Built), found
        ((_, plan),) = found.plans.items()
        kernels[columns] = len(plan.kernels)
    assert kernels == {16384: 3, 512: 2}
    done = subprocess.run(
        [sys.executable, "-c", SPLIT, outcome.path],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


CHAINS = f"""
def kernel(in_ptr0, out_ptr0, xnumel, ynumel, r0_numel, XBLOCK):
    xoffset = tl.program_id(0) * XBLOCK
    for r0_chain in tl.range(0, r0_numel, {products.CHAIN}):
        _tmp0 = _tmp0 + in_ptr0
    tmp0 = _tmp0[:, :, None]
    tl.store(out_ptr0 + (x0 + y0 * xnumel), tmp0, xmask & ymask)
"""


def test_only_a_kernel_that_does_nothing_with_its_sums_makes_them_in_parts():
    (node,) = ast.parse(CHAINS).body
    assert products.split_k(node) == "out_ptr0"
    assert [a.arg for a in node.args.args][-1] == "SPLIT_K"
    text = ast.unparse(node)
    assert f"tl.range(split * {products.CHAIN}, r0_numel, SPLIT_K * {products.CHAIN})" in text
    assert "xoffset = tl.program_id(0) // SPLIT_K * XBLOCK" in text
    assert "out_ptr0 + tl.cast(split, tl.int64) * ynumel * xnumel + (x0 + y0 * xnumel)" in text
    for old, new in (
        ("tmp0 = _tmp0[:, :, None]", "tmp0 = tl.maximum(_tmp0[:, :, None], 0)"),
        ("_tmp0 + in_ptr0", "_tmp0 + tl.load(out_ptr0)"),
        ("tl.program_id(0)", "tl.program_id(2)"),
        ("in tl.range(0, ", "in tl.range(1, "),
    ):
        (node,) = ast.parse(CHAINS.replace(old, new)).body
        assert products.split_k(node) == ""
        assert ast.unparse(node) == ast.unparse(ast.parse(CHAINS.replace(old, new)))


@pytest.mark.nightly
def test_elements_in_their_order_need_a_mask_in_the_last_block_alone(make, builder):
    """Of a number of elements that 4 does not divide, each was loaded by itself (H200: 0.62 times
    as fast as torch.compile).
    """
    folder = make("(lambda a: a / (1 + a.abs()))(x)")
    (outcome,) = seeds.write_seeds(folder, kinds=("gpu",))
    assert outcome.path is not None, outcome.reason
    source = outcome.path.read_text()
    assert "    if XBLOCK <= xnumel - xoffset:" in source.splitlines()
    case = load_task(folder).gpu.bench[0].model_copy(update={"M": 301, "N": 1003})
    found = builder.build(request_maker(load_task(folder), "sm_90a", (case,), 1)(source))
    assert isinstance(found, Built), found
    ((kernel,),) = [plan.kernels for plan in found.plans.values()]
    assert kernel.load_bytes.keys() == {4, 16}
    (outcome,) = seeds.write_seeds(make("(lambda a: a + a[:, :1])(x)"), kinds=("gpu",))
    assert outcome.path is not None, outcome.reason
    assert "XBLOCK <= xnumel - xoffset" not in outcome.path.read_text()  # places are computed


@pytest.mark.parametrize(
    ("given", "columns"),
    [
        (torch.arange(103.0), 27),  # a slice of it is a matrix, and more than its rows
        (torch.empty_strided((27, 5), (1, 27)).copy_(torch.arange(135.0).view(27, 5)), 27),
        (torch.arange(162.0).view(6, 27).bfloat16(), 27),
        (torch.arange(12.0).view(4, 3), 3),  # short rows stay
        (torch.arange(128.0).view(4, 32), 32),
    ],
)
def test_rows_that_begin_anywhere_are_copied_with_zeros_behind(given, columns):
    scope = {"torch": torch}
    exec(products.PADDED_ROWS, scope)
    row, wide = scope["_row"](given, columns), scope["_rows"](given, columns)
    if row == columns:
        assert wide is given
        return
    assert row * given.element_size() % 16 == 0
    count = given.numel() // columns
    assert wide.shape == (count, row)
    memory = torch.as_strided(given, (given.numel(),), (1,))
    assert torch.equal(wide[:, :columns], memory[: count * columns].view(count, columns))
    assert not wide[:, columns:].any()


WINDOWS = """(lambda a: (lambda w: torch.nn.functional.conv1d(
    torch.nn.functional.pad(a, (2, 2))[:, None], w, w[:, 0, 0], dilation=2
).sum(1))(torch.arange(24, device=a.device).to(a.dtype).cos().view(8, 1, 3)))(x)"""


@pytest.mark.nightly
def test_a_convolution_is_a_product_of_matrices_with_its_bias(make):
    """As sums in loops they were 0.03 to 0.06 times as fast as cuDNN's (H200)."""
    task = TASK.replace("k = 2.0", "k = 2.0, floor = 40.0")
    expression = " ".join(WINDOWS.split())
    (outcome,) = seeds.write_seeds(make(expression, task), kinds=("gpu",))
    assert outcome.path is not None, outcome.reason
    assert outcome.results >= 1
    source = outcome.path.read_text()
    (kernel,) = [k for k in source.split("@triton.jit") if "tl.dot(" in k]
    assert "tl.reshape(" not in kernel
    assert kernel.count("tl.cos(") == 1  # the bias's: the weight's is computed once, before
    assert "DOT_PRECISION = 'tf32'" in source.splitlines()


@pytest.mark.nightly
def test_a_variance_reads_its_row_once(make):
    """A mean first and squares then took a third more memory traffic: 0.79x of torch (H200)."""
    task = TASK.replace("k = 2.0", "k = 2.0, floor = 8.0")
    expression = "(lambda a: (a - a.mean(-1, True)) * (a.var(-1, keepdim=True) + 1e-5).rsqrt())(x)"
    task, widths = re.subn(r"N = \{ min = 2,", "N = { min = 3,", task)
    assert widths == 1
    (outcome,) = seeds.write_seeds(make(expression, task), kinds=("gpu",))
    assert outcome.path is not None, outcome.reason
    assert outcome.results >= 1
    source = outcome.path.read_text()
    assert "r0_offset // R0_BLOCK + 1" in source
    assert source.count("= tl.load(in_ptr0") == 2  # for its mean and variance, and for the results


BETWEEN = """(lambda a: (lambda w: torch.nn.functional.conv_transpose2d(
    a[None, None], w, w[0, :, 0, 0], stride=2, padding=1, output_padding=1
).sum(1)[0, ::2, ::2].relu())(
    torch.arange(36, device=a.device).to(a.dtype).cos().view(1, 4, 3, 3)
))(x)"""


GROUPS = """(lambda a: (lambda w: torch.nn.functional.conv_transpose3d(
    a[None, None, None].repeat(1, 4, 1, 1, 1), w, None, 2, padding=1, output_padding=1, groups=2
).sum(1)[0, 0, ::2, ::2].relu())(
    torch.arange(4 * 8 * 27, device=a.device).to(a.dtype).cos().view(4, 8, 3, 3, 3)
))(x)"""  # the weight and the result are rearranged in nine dimensions, more than a plan's have


@pytest.mark.nightly
def test_a_grouped_transposed_convolution_is_a_product_without_zeros(make):
    """As sums over places between which zeros lie it was 0.019 times as fast as cuDNN's (H200)."""
    task = TASK.replace("k = 2.0", "k = 2.0, floor = 60.0")
    (outcome,) = seeds.write_seeds(make(" ".join(GROUPS.split()), task), kinds=("gpu",))
    assert outcome.path is not None, outcome.reason
    assert outcome.results >= 1
    source = outcome.path.read_text()
    assert source.count("tl.dot(") == source.count("DOT_PRECISION: tl.constexpr") >= 1


ANY_NUMBER = """(lambda a: (lambda w: torch.nn.functional.conv1d(
    a[None, :1].repeat(1, 4, 1), w, w[:, 0, 0], padding=1, groups=2
)[0, : a.shape[0]])(a[:, :1].repeat(2, 6).view(-1, 2, 3)))(x)"""


@pytest.mark.nightly
def test_a_convolution_of_groups_of_any_number_of_results_divides_whole_numbers(make):
    task = TASK.replace("k = 2.0", "k = 2.0, floor = 60.0")
    (outcome,) = seeds.write_seeds(make(" ".join(ANY_NUMBER.split()), task), kinds=("gpu",))
    assert outcome.path is not None, outcome.reason
    assert outcome.results >= 1
    source = outcome.path.read_text()
    assert "tl.dot(" in source
    assert "floor(" not in source


@pytest.mark.nightly
def test_a_softmax_of_a_transposed_tensor_has_a_seed(make):
    """Torch's decomposition of it wants rows one after the other, of a device that is not there."""
    task = TASK.replace("k = 2.0", "k = 2.0, floor = 8.0")
    (outcome,) = seeds.write_seeds(make("x.mT.softmax(-1).mT", task), kinds=("gpu",))
    assert outcome.path is not None, outcome.reason
    assert outcome.results >= 1


@pytest.mark.nightly
def test_a_librarys_convolution_has_channels_last_and_leaves_its_bias_to_the_next_kernel(make):
    """A transposed one is written as one that is not: a plan would copy what it returns."""
    task = TASK.replace("k = 2.0", "k = 2.0, floor = 40.0").replace(
        "\ndims =", '\nallow = ["aten::convolution"]\ndims =', 1
    )
    (outcome,) = seeds.write_seeds(make(" ".join(BETWEEN.split()), task), kinds=("gpu",))
    assert outcome.path is not None, outcome.reason
    assert outcome.results >= 1
    (call,) = re.findall(r"torch\.convolution\(.*", outcome.path.read_text())
    assert ", None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)" in call
    assert call.endswith(".contiguous(memory_format=torch.channels_last)")


@pytest.mark.nightly
def test_a_product_moves_16_bytes_at_a_time_from_rows_that_begin_anywhere(gpu_seed, builder):
    """Rows of odd lengths were loaded 4 bytes at a time: 22 TFLOP/s instead of 54 (H200)."""
    folder, outcome = gpu_seed("(lambda a: a @ a.mT @ a)(x)", 40.0)
    case = load_task(folder).gpu.bench[0].model_copy(update={"M": 301, "N": 1003})
    request = request_maker(load_task(folder), "sm_90a", (case,), 1)(outcome.path.read_text())
    found = builder.build(request)
    assert isinstance(found, Built), found
    ((_, kernel),) = [plan.kernels for plan in found.plans.values()]  # a tensor by itself, and then
    assert kernel.load_bytes.keys() == {16}


def test_a_row_that_one_block_holds_is_read_once_and_a_longer_one_is_loaded_ahead(
    gpu_seed, builder
):
    """Inductor's loops read it as often as there are loops. With three blocks on their way a sum of
    rows of 65,535 and their division took 8.8 ms, without 13.2 (H100; torch.compile 13.2).
    """
    folder, outcome = gpu_seed("x.log_softmax(-1)", 4.0)
    task, source = load_task(folder), outcome.path.read_text()
    loads = {}
    for columns in (1000, 5000):
        case = task.gpu.bench[0].model_copy(update={"M": 301, "N": columns})
        found = builder.build(request_maker(task, "sm_90a", (case,), 1)(source))
        assert isinstance(found, Built), found
        ((kernel,),) = [plan.kernels for plan in found.plans.values()]
        loads[columns] = kernel.load_bytes
    assert loads[1000] == {16: 1}
    assert sum(loads[5000].values()) > 2
    assert "INNER_R0_STAGES = 3" in source.splitlines()
    # Each load has a buffer of its own: 24,576 numbers of four bytes in 96 KiB.
    stages = "R0_STAGES=min(INNER_R0_STAGES, 1 + 24576 // (INNER_XBLOCK * INNER_R0_BLOCK)),"
    assert stages in [line.strip() for line in source.splitlines()]


def test_loads_of_a_loop_over_rows_are_counted():
    """Of 15 at once, with three blocks of each on their way, no GPU had room."""
    text = """
def kernel(in_ptr0, in_ptr1, out_ptr0, r0_numel, R0_BLOCK):
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        a = tl.load(in_ptr0 + r0_offset, eviction_policy='evict_last')
        b = tl.load(in_ptr1 + r0_offset)
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        tl.store(out_ptr0 + r0_offset, tl.load(in_ptr0 + r0_offset))
"""
    (node,) = ast.parse(text).body
    assert improve_row_loops(node) == 2
    assert [a.arg for a in node.args.args[-2:]] == ["R0_WHOLE", "R0_STAGES"]
    assert "eviction_policy='' if R0_WHOLE else 'evict_last'" in ast.unparse(node)
    for other in (text.replace("(0, r0_numel,", "(0, 512,"), text + "    tl.dot(a, b)\n"):
        (node,) = ast.parse(other).body
        assert improve_row_loops(node) == 0
        assert ast.unparse(node) == ast.unparse(ast.parse(other))


@pytest.mark.nightly
def test_indices_are_wide_enough_for_what_is_between_arguments_and_results(make):
    """Of the case with the largest arguments 32 bits were enough (KernelBench 1, 72: another one
    unfolds its windows to 3 billion elements, and read beyond them).
    """
    large = """[gpu]
bench = [
  { name = "gpu_bytes", dtype = "float32", M = 400000, N = 8 },
  { name = "gpu_between", dtype = "float32", M = 1300, N = 1300 },
]
check = ["""
    task = TASK.replace("k = 2.0", "k = 2.0, floor = 40.0").replace("[gpu]\ncheck = [", large)
    task = re.sub(r"(?s)\nbench = \[\{ name = .gpu_long.*", "\n", task)
    expression = "(lambda a: a * (a[:, :, None] * a.mean(0)).sin().sum(-1))(x)"
    (outcome,) = seeds.write_seeds(make(expression, task), kinds=("gpu",))
    assert outcome.path is not None, outcome.reason
    assert "tl.int64" in outcome.path.read_text()


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("columns", [1004, 1024, 1000])
def test_a_gpu_seed_moves_16_bytes_at_a_time_whatever_its_sizes_are_multiples_of(
    gpu_seed, builder, columns
):
    """The compiler knows of a size only whether 16 divides it."""
    folder, outcome = gpu_seed("x.log_softmax(-1)", 4.0)
    case = load_task(folder).gpu.bench[0].model_copy(update={"M": 301, "N": columns})
    request = request_maker(load_task(folder), "sm_90a", (case,), 1)(outcome.path.read_text())
    found = builder.build(request)
    assert isinstance(found, Built), found
    ((kernel,),) = [plan.kernels for plan in found.plans.values()]
    assert kernel.load_bytes.keys() == {16}


def test_inductor_that_takes_too_much_cpu_time_is_the_reason_for_no_seed(make, monkeypatch):
    monkeypatch.setattr(seeds, "LIMIT_S", 1)
    endless = "x * next(n for n in iter(int, 1) if n)"
    (outcome,) = seeds.write_seeds(make(endless), kinds=("cpu",))
    assert outcome.reason == "Inductor took longer than 1 s of CPU time"


def test_a_tile_has_sides_of_its_own_beside_blocks_of_one_dimension():
    """With 1024 columns of the other kernel it had 32,768 elements: a transposed convolution in 3D
    at 0.04 times torch's best (H100), and another that took over 20 s to compile.
    """
    file = triton.TritonFile(SimpleNamespace())

    def elements(*blocks):
        kernel = SimpleNamespace(blocks=blocks, dot=False, reduces=False)
        names = [file._block(kernel, block, {}) for block in blocks]
        return math.prod(file.tunables[name][0] for name in names)

    assert elements("XBLOCK") == elements("YBLOCK", "XBLOCK") == 1024
    assert len(file.tunables) == 3


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_an_argument_in_place_is_written_with_and_without_padding(make, kind):
    task = TASK.replace(
        'results = [{ name = "y", shape = ["M", "N"], k = 2.0 }]', "results = []"
    ).replace('shape = ["M", "N"] }]', 'shape = ["M", "N"], writes = { k = 2.0, floor = 4.0 } }]')
    task = task.replace("M = 3,", "noncontiguous = true, M = 3,", 1)
    folder = make("x + 0.5 * x.square()", task)
    text = REFERENCE.replace("x.double() * 2", "x.double() + 0.5 * x.double().square()")
    text = text.replace("return x * 2", "x.addcmul_(x, x, value=0.5)")
    (folder / "reference.py").write_text(text)
    (outcome,) = seeds.write_seeds(folder, kinds=(kind,))
    assert outcome.path is not None, outcome.reason
    assert "x_given.copy_(x)" in outcome.path.read_text()


@pytest.mark.nightly
def test_elements_in_order_are_counted_out(make):
    for outcome in seeds.write_seeds(make("x.topk(1)[0] + x.sort(-1)[0]")):
        assert outcome.path is not None, outcome.reason


@pytest.mark.nightly
def test_rows_are_rolled(gpu_seed):
    gpu_seed("x.roll((-3, 2), (0, 1)) * 2", 2)


@pytest.mark.nightly
def test_bits_are_shifted(make):
    """Inductor's C++ has CHAR_BIT, of a header that was not included."""
    expression = "x * ((torch.arange(x.shape[1], device=x.device) >> 2) & 1)"
    (outcome,) = seeds.write_seeds(make(expression), kinds=("cpu",))
    assert outcome.path is not None, outcome.reason


@pytest.mark.nightly
def test_rows_are_added_up_by_index(make):
    added = "torch.zeros_like(a).index_add(0, torch.arange(a.shape[0]) // 2, a)"
    expression = f"(a := x, {added})[1]"
    task = TASK.replace("k = 2.0", "k = 2.0, floor = 4.0")
    (outcome,) = seeds.write_seeds(make(expression, task), kinds=("cpu",))
    assert outcome.path is not None, outcome.reason
    assert "atomic_add(" in outcome.path.read_text()


@pytest.mark.parametrize("dim", [-1, 0])
@pytest.mark.parametrize("descending", [False, True])
def test_the_order_is_torchs_own_stable_one(dim, descending):
    x = torch.randint(-3, 3, (7, 9), generator=torch.Generator().manual_seed(0)).float()
    x[0, 2] = x[0, 5] = x[4, 2] = torch.nan
    x[1] = x[:, 3] = -torch.inf
    values, index = torch.sort(x, dim=dim, descending=descending, stable=True)
    own = decompositions._sort(x, dim, descending)
    torch.testing.assert_close(own, (values, index), rtol=0, atol=0, equal_nan=True)
    few = decompositions._topk(x, 3, dim, largest=descending)
    torch.testing.assert_close(few[0], values.narrow(dim, 0, 3), rtol=0, atol=0, equal_nan=True)


POOLS = [  # dimensions, arguments, shape
    (3, ([3, 3, 3], [2, 2, 2], [1, 1, 1]), (2, 3, 9, 8, 7)),
    (3, ([3, 4, 5],), (3, 9, 8, 7)),
    (3, ([3], [1], [1], False, True, 5), (2, 3, 9, 8, 7)),
    (2, ([6, 7], [2, 3], [3, 2]), (2, 3, 19, 18)),
    (2, ([7],), (3, 19, 18)),
]


@pytest.mark.parametrize(("axes", "arguments", "shape"), POOLS)
def test_a_large_windows_mean_is_torchs(axes, arguments, shape):
    x = torch.randn(shape, dtype=torch.float64)
    mine = decompositions._average_pool(axes, x, *arguments)
    pool = torch.ops.aten.avg_pool3d if axes == 3 else torch.ops.aten.avg_pool2d
    torch.testing.assert_close(mine, pool(x, *arguments))


@pytest.mark.parametrize(
    "arguments", [([2, 2],), ([7, 7], [2], [1], True), ([7], [7], [1], False, False)]
)
def test_other_windows_are_left_to_inductor(arguments):
    assert decompositions._average_pool(2, torch.randn(1, 1, 20, 20), *arguments) is NotImplemented


@pytest.mark.nightly
def test_a_library_takes_views_of_arguments(make):
    task = TASK.replace("k = 2.0", "k = 2.0, floor = 4.0").replace(
        "\ndims =", '\nallow = ["aten::convolution"]\ndims =', 1
    )
    causal = "torch.conv1d(torch.nn.functional.pad(a, (2, 0)).unsqueeze(1), a[:1, None, :3])"
    expression = f"(lambda a: {causal}.squeeze(1).relu())(x)"
    task, offsets = re.subn(r'(name = "odd",)', r"\1 offset = 1,", task)
    task, widths = re.subn(r"N = \{ min = 2,", "N = { min = 3,", task)  # as long as the filter
    assert (offsets, widths) == (1, 1)
    (outcome,) = seeds.write_seeds(make(expression, task), kinds=("cpu",))
    assert outcome.path is not None, outcome.reason
    assert "torch.as_strided(x, " in outcome.path.read_text()


@pytest.mark.nightly
def test_a_task_that_allows_products_has_a_seed_with_torchs_own(make):
    """On sizes that 16 does not divide those are twice as fast (H200, docs/results.md)."""
    task = TASK.replace("k = 2.0", "k = 2.0, floor = 40.0").replace(
        "\ndims =", '\nallow = ["aten::mm"]\ndims =', 1
    )
    folder = make("(lambda a: (a @ a.mT @ a).relu())(x)", task)
    own, library = seeds.write_seeds(folder, kinds=("gpu",))
    assert own.path is not None, own.reason
    assert library.path is not None, library.reason
    assert library.path.name == "triton_library.py"
    assert library.results >= 1
    texts = [o.path.read_text() for o in (own, library)]
    assert ["tl.dot(" in t for t in texts] == [True, False]
    assert ["torch.mm(" in t for t in texts] == [False, True]


def test_the_reason_for_no_seed_is_kept_until_there_is_one(make):
    folder = make("x + torch.rand_like(x)")
    (outcome,) = seeds.write_seeds(folder, kinds=("cpu",))
    assert outcome.path is None
    assert outcome.reason
    assert refusal_of(load_task(folder), "cpu") == outcome.reason
    (outcome,) = seeds.write_seeds(make("x + 1"), kinds=("cpu",))
    assert outcome.path is not None, outcome.reason
    assert refusal_of(load_task(folder), "cpu") == ""


@pytest.mark.nightly
def test_a_library_is_called_for_all_sizes(make):
    task = TASK.replace("k = 2.0", "k = 2.0, floor = 4.0").replace(
        "\ndims =", '\nallow = ["aten::convolution"]\ndims =', 1
    )
    # Each row is a channel: Inductor itself would write a way for each number of them.
    mixed = "torch.conv1d(a.unsqueeze(0), a[:, :1].unsqueeze(0) * torch.ones_like(a[:1, :1, None]))"
    expression = f"(lambda a: {mixed}.squeeze(0).relu() + a)(x)"
    (outcome,) = seeds.write_seeds(make(expression, task), kinds=("cpu",))
    assert outcome.path is not None, outcome.reason
    source = outcome.path.read_text()
    assert "torch.convolution(" in source
    assert "_way2" not in source


@pytest.mark.nightly
def test_sizes_of_1_and_small_ones_have_no_way_of_their_own(make):
    task = TASK.replace("k = 2.0", "k = 2.0, floor = 4.0")
    task, widths = re.subn(r"N = \{ min = 2,", "N = { min = 3,", task)  # as long as the filter
    assert widths == 1
    expression = "(lambda a: torch.conv1d(F.pad(a, (2, 0))[:, None], a[:1, None, :3])[:, 0])(x)"
    expression = expression.replace("F.pad", "torch.nn.functional.pad")
    (outcome,) = seeds.write_seeds(make(expression, task), kinds=("cpu",))
    assert outcome.path is not None, outcome.reason
    assert "_way2" not in outcome.path.read_text()


def test_an_error_without_words_is_described_by_its_line():
    try:
        assert not widths_of_nothing()
    except AssertionError as e:
        e.args = ()
        text = _described(e)
    assert re.fullmatch(
        r"AssertionError in test_seeds.py, line \d+: assert not widths_of_nothing\(\)", text
    )
    assert _described(ValueError("first\nsecond")) == "ValueError: first"


def widths_of_nothing():
    return [1]


def test_what_cannot_be_written_out_is_named():
    with pytest.raises(NoSeed, match="cyl_bessel_i1"):
        triton.TritonFile(None)._without_modules("y = libdevice.cyl_bessel_i1(x)")


@pytest.mark.parametrize("name", OWN)
def test_functions_that_the_interpreter_lacks(name):
    """Their texts, run on float32 numbers."""
    tl = SimpleNamespace(where=np.where, exp=np.exp, log=np.log, abs=np.abs, floor=np.floor,
                         ceil=np.ceil)  # fmt: skip
    scope = {"tl": tl}
    body = textwrap.dedent(triton._OWN[name]).strip()
    exec(f"def _{name}(x):\n" + textwrap.indent(body, "    "), scope)
    low = -0.9 if name == "log1p" else -60
    x = np.concatenate([np.linspace(low, 60, 999), np.geomspace(1e-30, 1, 999), [0.5, 1.5, 2.5]])
    x = x.astype(np.float32)
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(scope[f"_{name}"](x), OWN[name](x.astype(float)), rtol=6e-7)


@pytest.mark.parametrize("name", ["div_floor_integer", "remainder_integer"])
@pytest.mark.parametrize("rounded", ["down", "towards 0"])
def test_quotients_of_constants_and_of_a_kernels_numbers_are_rounded_down(name, rounded):
    """Constants are divided as Python does, numbers of a kernel as C does."""

    class InC(int):
        def __floordiv__(self, other):
            return InC(math.trunc(int(self) / int(other)))

        def __mod__(self, other):
            return InC(math.fmod(int(self), int(other)))

    scope = {"tl": SimpleNamespace(where=lambda c, a, b: a if c else b)}
    body = triton._INSTEAD[name].strip().removeprefix("@triton.jit\n")
    exec(body, scope)
    number = int if rounded == "down" else InC
    for a in range(-13, 14):
        for b in (-5, -3, -1, 1, 2, 4, 7):
            expected = a // b if name == "div_floor_integer" else a % b
            assert scope[name](number(a), number(b)) == expected, (a, b)


def test_a_number_of_a_kernel_may_be_a_constant_in_a_cast_and_in_blocks():
    """Triton makes a constant of a 1: a mean along a dimension of any size had no seed."""
    text = "a = tl.broadcast_to(ks0, [X, R]).to(tl.float32)\nb = (ks0 + 1).to(tl.int32)\n"
    text += "c = tl.broadcast_to(x, [X, R]) * tl.broadcast_to(eps, [X, R])\n"
    text += "d = tl.broadcast_to(0.5, [X, R])"
    tree = ast.parse(text)
    triton._Casts({"ks0", "eps"}, {"ks0"}).visit(tree)
    assert ast.unparse(ast.fix_missing_locations(tree)).splitlines() == [
        "a = tl.broadcast_to(tl.cast(ks0, tl.int64), [X, R]).to(tl.float32)",
        "b = tl.cast(ks0 + 1, tl.int32)",
        "c = tl.broadcast_to(x, [X, R]) * tl.broadcast_to(eps, [X, R])",
        "d = tl.broadcast_to(0.5, [X, R])",
    ]


def test_blocks_within_blocks_become_one():
    nested = "for (int64_t i = 0; i < n; ++i)\n{\n{\n{\ny[i] = 0;\n}\n}\n}"
    assert cpp._indented(nested) == "for (int64_t i = 0; i < n; ++i) {\n  y[i] = 0;\n}"


SUM = """
def kernel(out, x, r0_numel, R0_BLOCK):
    _tmp1 = tl.full([1], 0, tl.float32)
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        tmp0 = tl.dot(x, r0_offset)
        tmp2 = _tmp1 + tmp0
        _tmp1 = tmp2
    tmp1 = _tmp1[:, None]
    tl.store(out, tmp1)
"""


def summed(tree, x):
    """What a kernel's text sums up to where every product is rounded into the accumulator."""
    stored = []
    names = SimpleNamespace(
        full=lambda *_: np.zeros(1, np.float32),
        float32=np.float32,
        range=range,
        minimum=min,
        where=np.where,
        dot=lambda x, at: x[at : at + 1],
        store=lambda _, value: stored.append(value.item()),
    )
    scope = {"tl": names}
    exec(compile(ast.fix_missing_locations(tree), "kernel", "exec"), scope)
    scope["kernel"](None, x, len(x), 1)
    return stored[0]


def test_the_error_of_a_long_sum_of_products_does_not_grow_with_its_length():
    """One accumulator over 524288 products was refused on an H100: 280 times torch's error."""
    x = np.random.default_rng(0).random(100_123, np.float32)
    exact = x.astype(np.float64).sum()
    plain, short = ast.parse(SUM), ast.parse(SUM)
    products.improve_products(short.body[0], {})
    errors = [abs(summed(tree, x) / exact - 1) for tree in (plain, short)]
    assert errors[0] > 2e-6
    assert errors[1] < 2e-7
    for few in (0, 1, products.CHAIN, products.CHAIN + 1):
        assert summed(short, x[:few]) == pytest.approx(float(x[:few].sum()), rel=1e-6)
    infinite = np.array([np.inf, *x[: 2 * products.CHAIN]], np.float32)
    with np.errstate(invalid="ignore"):
        assert summed(short, infinite) == np.inf


def test_softmaxs_gradient_has_infinities_where_torch_has_them():
    op = torch.ops.aten._softmax_backward_data.default
    generator = torch.Generator().manual_seed(0)
    for value in (math.inf, -math.inf, math.nan):
        grad, y = torch.randn(2, 32, 20, generator=generator)
        y = y.softmax(-1)
        for tensor in (grad, y):
            tensor[torch.rand(tensor.shape, generator=generator) < 0.05] = value
        found = decompositions.plain_loops("cpu", ())[op](grad, y, -1, torch.float32)
        torch.testing.assert_close(found, op(grad, y, -1, torch.float32), equal_nan=True)


LOOPS = """extern "C" void sums(const float* x, float* y, float* z, int64_t n, int64_t m) {
  double tmp_acc0 = 0;
  #pragma omp parallel reduction(+:tmp_acc0)
  {
    double tmp_acc0_local = 0;
    #pragma omp for schedule(static)
    for (int64_t x0 = 0; x0 < n * m; ++x0) {
      auto tmp0 = x[x0];
      tmp_acc0_local = tmp_acc0_local + tmp0;
    }
    tmp_acc0 = tmp_acc0 + tmp_acc0_local;
  }
  z[0] = tmp_acc0;
  for (int64_t x0 = 0; x0 < n; ++x0) {
    double tmp_acc0 = 0;
    for (int64_t x1 = 0; x1 < m; ++x1) {
      auto tmp0 = x[x1 + m*x0];
      tmp_acc0 = tmp_acc0 + tmp0;
    }
    float tmp_acc1 = 0;
    for (int64_t x1 = 0; x1 < m; ++x1) {
      auto tmp0 = x[x1 + m*x0];
      tmp_acc1 = tmp_acc1 > tmp0 ? tmp_acc1 : tmp0;
      tmp_acc0 = tmp_acc0 + tmp0;
    }
    for (int64_t x1 = 0; x1 < m; ++x1) {
      auto tmp0 = static_cast<int64_t>(x[x1 + m*x0]);
      y[tmp0] = tmp0;
    }
    y[x0] = tmp_acc0 + tmp_acc1;
  }
  double tmp_acc2 = 0;
  #pragma omp parallel for collapse(2) reduction(+:tmp_acc2)
  for (int64_t x0 = 0; x0 < n; ++x0) {
    for (int64_t x1 = 0; x1 < m; ++x1) {
      auto tmp0 = x[x1 + m*x0];
      tmp_acc2 = tmp_acc2 + tmp0;
    }
  }
  z[1] = tmp_acc2;
}
"""


def test_only_loops_that_do_nothing_but_sum_may_do_so_in_any_order(tmp_path):
    text = cpp._summing(LOOPS)
    assert text.count("#pragma omp simd reduction(+:tmp_acc0)\n") == 1
    assert text.count("#pragma omp simd reduction(+:tmp_acc0_local)\n") == 1
    assert text.count("#pragma omp simd") == 2
    assert "for (int64_t x0_block = 0; x0_block < n * m; x0_block += 1024) {" in text
    check = """
#include <cstdint>
#include <cstdio>
LOOPS
int main() {
  static float x[3 * 1111], y[3333], z[2];
  for (int i = 0; i < 3 * 1111; ++i) x[i] = i % 7;
  sums(x, y, z, 3, 1111);
  std::printf("%g", z[0] == z[1] ? z[0] : -1);
}
"""
    (tmp_path / "sums.cpp").write_text(check.replace("LOOPS", text))
    program = tmp_path / "sums"
    subprocess.run(
        ["g++", "-O2", "-fopenmp", "-Wall", "-Werror", "-o", program, tmp_path / "sums.cpp"],
        check=True,
    )
    said = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    assert float(said) == sum(i % 7 for i in range(3333))


def test_a_difference_of_a_large_and_a_small_number_keeps_its_order(tmp_path):
    """g++ made x - max - log(sum) into x - (max + log(sum)), without the last digits."""
    (tmp_path / "kernel.cpp").write_text("""
#include <cstdio>
#include <cstdlib>
void shifted(const float* x, float top, float small, float* y, int n) {
  for (int i = 0; i < n; ++i) y[i] = float(float(x[i] - top) - small);
}
int main(int, char** words) {
  float x[64], y[64];
  for (int i = 0; i < 64; ++i) x[i] = 30.0f;
  shifted(x, std::atof(words[1]), std::atof(words[2]), y, 64);
  std::printf("%.9g", y[63]);
}
""")
    program = tmp_path / "kernel"
    subprocess.run(
        ["g++", "-O3", *cpp._OPTIONS, "-o", program, tmp_path / "kernel.cpp"], check=True
    )
    said = subprocess.run([program, "30", "2.4e-5"], check=True, capture_output=True, text=True)
    assert float(said.stdout) == pytest.approx(-2.4e-5, rel=1e-6)
