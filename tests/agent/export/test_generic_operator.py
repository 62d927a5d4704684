"""Operators that are made from task.toml, for tasks without an operator.py."""

import inspect
import json
import warnings

import pytest
import torch
from kagent.export.generic import dtype_source, needs_reference, operator_source
from kagent.export.packaging import names_of
from kagent.tasks import find_task
from kagent_sandbox.data.task import load_task
from kagent_sandbox.errors import TaskError
from library_package import assemble, calls

CASES = """
[gpu]
check = [{ name = "g", dtype = "bfloat16", %s }]
bench = [{ name = "gb", dtype = "bfloat16", %s }]
[cpu]
check = [{ name = "c", dtype = "float32", %s }]
bench = [{ name = "cb", dtype = "float32", %s }]
"""
BLOCKS = (
    """
name = "block_sums"
summary = 'Sums of blocks of columns, and the "whole" \\ sum'
entry = "block_sums"
signature = "block_sums(x: [M, N], weight: [cdiv(N, 2)], width: int, eps: float) -> (sums, total)"
bytes = "M * N * itemsize"
flops = "M * N"
dims = { M = "rows", N = "columns", width = "of a block", keep = "whether to keep the rest" }
arguments = [
  { name = "x", shape = ["M", "N"] },
  { name = "weight", shape = ["cdiv(N, 2)"] },
  { name = "index", shape = ["M"], dtype = "int64" },
  { name = "width", value = "width" },
  { name = "keep", value = "keep" },
  { name = "scale", value = "N / 4" },
  { name = "eps", value = 1e-6 },
]
results = [
  { name = "sums", shape = ["M", "cdiv(N, width)"], k = 2.0 },
  { name = "total", shape = [], dtype = "float32", k = 2.0, row_dims = 0 },
]
"""
    + CASES % (("M = 3, N = 5, width = 2, keep = true",) * 4)
)
BLOCKS_REFERENCE = '''
from __future__ import annotations
from typing import TYPE_CHECKING
import torch
if TYPE_CHECKING:
    from kagent_sandbox.data.case import Case

def inputs(case, generator, device): ...
def reference(**arguments): ...
def experts(): return {}

def eager(*, x, weight, index, width, keep, scale, eps):
    """Takes a gradient, as references may."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        (one,) = torch.autograd.grad((leaf * 1).sum(), leaf)
    blocks = [b.sum(1) for b in (x * one * scale + eps).split(width, 1)]
    return torch.stack(blocks, 1), x.float().sum() + weight.float().sum()
'''
BLOCKS_KERNEL = """
import torch
CALLS = []
def block_sums(x, weight, index, width, keep, scale, eps):
    CALLS.append((tuple(x.shape), width, keep, scale, eps))
    blocks = [b.sum(1) for b in (x * scale + eps).split(width, 1)]
    return torch.stack(blocks, 1), x.float().sum() + weight.float().sum()
"""
ADD = (
    """
name = "add_into"
summary = "x += y"
entry = "add_into"
signature = "add_into(x: [M, N], y: [M, N]) -> before: [M, N]"
bytes = "M * N * itemsize"
flops = "M * N"
dims = { M = "rows", N = "columns" }
arguments = [{ name = "x", shape = ["M", "N"], mutates = true }, { name = "y", shape = ["M", "N"] }]
results = [{ name = "before", shape = ["M", "N"], k = 2.0 }]
"""
    + CASES % (("M = 3, N = 5",) * 4)
)
ADD_REFERENCE = """
def inputs(case, generator, device): ...
def reference(**arguments): ...
def experts(): return {}
def eager(*, x, y):
    before = x.clone()
    x += y
    return before
"""
ADD_KERNEL = """
CALLS = []
def add_into(x, y):
    CALLS.append(x.is_contiguous())
    before = x.clone()
    x += y
    return before
"""
SAME = ADD.replace("add_into", "same").replace(", mutates = true", "")
SAME_REFERENCE = ADD_REFERENCE.replace(
    "before = x.clone()\n    x += y\n    return before", "return x"
)


def task_of(folder, toml, reference):
    folder.mkdir()
    (folder / "task.toml").write_text(toml)
    (folder / "reference.py").write_text(reference)
    return load_task(folder)


def library_of(tmp_path, toml, reference, kernel=None, **changes):
    task = task_of(tmp_path / "task", toml, reference)
    package = assemble(tmp_path / "lib", f"generic_{task.name}_{tmp_path.name}".replace("-", "_"))
    package.add_operator(task.name, operator_source(task))
    text = (task.folder / "reference.py").read_text()
    (package.folder / "operators" / f"_{task.name}_reference.py").write_text(text)
    if kernel is not None:
        package.add_kernel(task.name, kernel, **changes)
    (package.folder / "__init__.py").write_text(f"from .operators import {task.name}\n")
    return package.imported(f"generic_{task.name}_{tmp_path.name}"), task.name


def blocks_region(**flags):
    bounds = {"low": {"M": 1, "N": 1}, "high": {"M": 100, "N": 100}}
    values = {"width": [2, 3], "keep": [False, True], **flags}
    return [{"dtype": "float32", **bounds, "flags": values, "volume": 10_000}]


@pytest.fixture(autouse=True)
def _same_numbers():
    torch.manual_seed(0)


@pytest.fixture
def blocks(tmp_path):
    lib, name = library_of(
        tmp_path, BLOCKS, BLOCKS_REFERENCE, BLOCKS_KERNEL, regions=blocks_region()
    )
    package = tmp_path / "lib"
    table = package / "portfolio" / f"{name}.json"
    data = json.loads(table.read_text())
    for device in data["devices"].values():
        for point in device["points"]:
            point["dims"] = {"M": 4, "N": 4, "width": 2, "keep": True}
    table.write_text(json.dumps(data))
    return lib


def arguments(m=4, n=7, dtype=torch.float32, width=2, scale=None):
    x, weight = torch.randn(m, n, dtype=dtype), torch.randn(-(-n // 2), dtype=dtype)
    return x, weight, torch.zeros(m, dtype=torch.int64), width, True, scale or n / 4, 1e-6


def test_the_signature_is_the_tasks(blocks):
    parameters = inspect.signature(blocks.block_sums.block_sums).parameters
    assert list(parameters) == ["x", "weight", "index", "width", "keep", "scale", "eps"]
    assert parameters["eps"].default == 1e-6
    assert parameters["scale"].default is inspect.Parameter.empty
    assert parameters["keep"].annotation == "bool"
    assert parameters["scale"].annotation == "float"
    assert "of a block" in blocks.block_sums.block_sums.__doc__
    assert "the 'whole' / sum" in blocks.block_sums.__doc__


def test_a_call_is_the_kernels_where_it_was_checked(blocks):
    args = arguments()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sums, total = blocks.block_sums.block_sums(*args)
    expected = blocks.block_sums._task.eager(
        **dict(zip(["x", "weight", "index", "width", "keep", "scale", "eps"], args, strict=True))
    )
    torch.testing.assert_close((sums, total), expected)
    assert calls(blocks, "block_sums") == [((4, 7), 2, True, 7 / 4, 1e-6)]


def test_what_does_not_fit_the_task_goes_to_its_eager(blocks):
    function = blocks.block_sums.block_sums
    x, weight, index, width, keep, scale, eps = arguments()
    for other in (
        (x, weight, index, width, keep, scale + 1, eps),  # a formula gives another value
        (x, weight, index, width, keep, scale, 0.5),  # kernels know another constant
        (x, weight[:2], index, width, keep, scale, eps),
        (x, weight, index.int(), width, keep, scale, eps),
        (x, weight.double(), index, width, keep, scale, eps),
        (x, weight, index, 5, keep, scale, eps),  # was not checked
    ):
        function(*other)
    assert calls(blocks, "block_sums") == []


def test_the_operator_passes_torchs_checks(blocks):
    op = blocks.block_sums._operator.op
    torch.library.opcheck(op, arguments())
    compiled = torch.compile(blocks.block_sums.block_sums, fullgraph=True, backend="aot_eager")
    args = arguments()
    torch.testing.assert_close(compiled(*args), blocks.block_sums.block_sums(*args))
    module = blocks.block_sums.BlockSums()
    torch.testing.assert_close(module(*args), compiled(*args))
    assert blocks.block_sums.LAYERS["BlockSums"] is blocks.block_sums.BlockSums
    assert not blocks.block_sums.BlockSums.has_backward


def test_the_function_says_that_it_has_no_gradient_and_when_torch_is_used(blocks):
    said = " ".join(inspect.getdoc(blocks.block_sums.block_sums).split())
    assert "No gradient: " in said
    assert "fewer elements than the smallest measured call (CARD.md: least size) use torch" in said


def test_asking_for_a_gradient_is_an_error(blocks):
    x, *rest = arguments()
    sums, _ = blocks.block_sums.block_sums(x.requires_grad_(), *rest)
    with pytest.raises(NotImplementedError, match="block_sums has no gradient"):
        sums.sum().backward()


@pytest.mark.parametrize("kernel", [None, ADD_KERNEL])
def test_arguments_that_are_written(tmp_path, kernel):
    lib, _ = library_of(tmp_path, ADD, ADD_REFERENCE, kernel)
    for x in (torch.randn(3, 5), torch.randn(5, 3).T):
        y, old = torch.randn(3, 5), x.clone()
        torch.testing.assert_close(lib.add_into.add_into(x, y), old)
        torch.testing.assert_close(x, old + y)
    if kernel:
        assert calls(lib, "add_into") == [True, True]
    torch.library.opcheck(lib.add_into._operator.op, (torch.randn(3, 5), torch.randn(3, 5)))
    with pytest.raises(NotImplementedError, match="no gradient"):
        lib.add_into.add_into(torch.randn(3, 5), torch.randn(3, 5, requires_grad=True))


def test_an_operator_without_results(tmp_path):
    toml = ADD.replace("mutates = true", "writes = { k = 2.0 }").replace("add_into", "add_only")
    toml = "\n".join(line for line in toml.splitlines() if not line.startswith("results"))
    reference = ADD_REFERENCE.replace("    before = x.clone()\n", "").replace("before", "None")
    kernel = "CALLS = []\ndef add_only(x, y):\n    CALLS.append(1)\n    x += y\n"
    lib, _ = library_of(tmp_path, toml, reference, kernel)
    x, y = torch.randn(3, 5), torch.randn(3, 5)
    expected = x + y
    assert lib.add_only.add_only(x, y) is None
    torch.testing.assert_close(x, expected)
    assert calls(lib, "add_only") == [1]
    torch.library.opcheck(lib.add_only._operator.op, (x, y))
    assert lib.add_only._operator.by_reference(x, y) is None
    torch.testing.assert_close(x, expected + y)  # opcheck works on copies


INDEX_FIRST = SAME.replace(
    'arguments = [{ name = "x", shape = ["M", "N"] }',
    'arguments = [{ name = "i", shape = ["M"], dtype = "int64" }, '
    '{ name = "x", shape = ["M", "N"] }',
)
NO_TENSOR_OF_THE_DTYPE = SAME.replace(
    'shape = ["M", "N"] }', 'shape = ["M", "N"], dtype = "int8" }'
)
NO_TENSOR_OF_THE_DTYPE = NO_TENSOR_OF_THE_DTYPE.replace('"bfloat16"', '"float32"')


@pytest.mark.parametrize(
    ("toml", "dtype_from", "given"),
    [
        (INDEX_FIRST, 1, (torch.zeros(3, dtype=torch.int64), torch.randn(3, 5), torch.randn(3, 5))),
        (NO_TENSOR_OF_THE_DTYPE, "float32", (torch.ones(3, 5, dtype=torch.int8),) * 2),
    ],
)
def test_a_call_has_the_dtype_of_the_tasks_cases_not_of_its_first_tensor(
    tmp_path, toml, dtype_from, given
):
    task = task_of(tmp_path / "drawn", toml, SAME_REFERENCE)
    assert dtype_source(task) == dtype_from
    names = ", ".join(a.name for a in task.arguments)
    kernel = f"CALLS = []\ndef same({names}):\n    CALLS.append(1)\n    return x.float() * 1\n"
    reference = SAME_REFERENCE.replace("*, x, y", f"*, {names}")
    lib, _ = library_of(tmp_path, toml, reference, kernel)
    table = tmp_path / "lib" / "portfolio" / "same.json"
    table.write_text(json.dumps({**json.loads(table.read_text()), "dtype_from": dtype_from}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = lib.same.same(*given)
    torch.testing.assert_close(found, given[-2].float())
    assert calls(lib, "same") == [1]
    fake = torch.library.opcheck(lib.same._operator.op, given, test_utils="test_faketensor")
    assert set(fake.values()) == {"SUCCESS"}


def test_a_dtype_that_no_tensor_has_is_refused_where_cases_are_of_several(tmp_path):
    toml = NO_TENSOR_OF_THE_DTYPE.replace('"float32"', '"bfloat16"', 1)
    with pytest.raises(TaskError, match=r"\$dtype.* and the cases have several"):
        operator_source(task_of(tmp_path / "task", toml, SAME_REFERENCE))


def test_a_reference_that_returns_its_argument_is_copied(tmp_path):
    lib, _ = library_of(tmp_path, SAME, SAME_REFERENCE)
    x = torch.randn(3, 5)
    y = lib.same.same(x, x)
    assert torch.equal(x, y)
    assert x.data_ptr() != y.data_ptr()


@pytest.mark.parametrize(
    "task", ["gelu", "softmax", "attention", "cross_entropy", "linear_cross_entropy"]
)
def test_the_built_in_tasks_would_do(task, tmp_path):
    found = find_task(task)
    text = operator_source(found)
    assert needs_reference(text)
    assert not needs_reference((found.folder / "operator.py").read_text())
    lib, _ = library_of(
        tmp_path,
        (found.folder / "task.toml").read_text(),
        (found.folder / "reference.py").read_text(),
    )
    module = vars(lib)[task]
    case = found.cpu.check[0]
    reference = found.reference()
    tensors = reference.inputs(case, torch.Generator().manual_seed(0), torch.device("cpu"))
    known = {**case.dims, "ignore_index": -100}
    args = [tensors[a.name] if a.shape is not None else known[a.name] for a in found.arguments]
    ours = module._operator.op(*args)
    named = dict(zip((a.name for a in found.arguments), args, strict=True))
    torch.testing.assert_close(ours, reference.eager(**named))
    torch.library.opcheck(module._operator.op, tuple(args), test_utils="test_faketensor")


def test_names_are_found_where_the_exporter_looks(tmp_path):
    task = task_of(tmp_path / "task", BLOCKS, BLOCKS_REFERENCE)

    class Made:
        task = "block_sums"
        operator_py = operator_source(load_task(tmp_path / "task"))

    names = names_of(Made)
    assert (names.function, names.layers) == ("block_sums", ("BlockSums",))
    assert task.entry == names.function


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('{ name = "width", value = "width" },', ""), "width cannot be read off its arguments"),
        (('name = "index"', 'name = "torch"'), "torch are taken"),
        (('name = "index"', 'name = "_index"'), "are taken"),
    ],
)
def test_tasks_that_need_an_operator_of_their_own_are_told_so(tmp_path, change, message):
    task = task_of(tmp_path / "task", BLOCKS.replace(*change), BLOCKS_REFERENCE)
    with pytest.raises(TaskError, match=message) as caught:
        operator_source(task)
    assert "operator.py" in str(caught.value)


# -- calls that are not of the task's dtypes, ranks and sizes --------------------------------------

NORM = (
    """
name = "normed"
summary = "RMS norm"
entry = "normed"
signature = "normed(x: [M, N], weight: [N], offset: [M] float32) -> y: [M, N]"
bytes = "M * N * itemsize"
flops = "M * N"
dims = { M = "rows", N = "columns" }
arguments = [
  { name = "x", shape = ["M", "N"] },
  { name = "weight", shape = ["N"] },
  { name = "offset", shape = ["M"], dtype = "float32" },
  { name = "eps", value = 1e-6 },
]
results = [{ name = "y", shape = ["M", "N"], k = 2.0 }]
"""
    + CASES % (("M = 3, N = 5",) * 4)
)
NORM_REFERENCE = """
import torch

def inputs(case, generator, device): ...
def reference(**arguments): ...
def experts(): return {}
def eager(*, x, weight, offset, eps):
    scaled = x * weight * torch.rsqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps)
    return scaled + offset[:, None].to(x.dtype) / 2
"""
NORM_KERNEL = """
import torch
CALLS = []
def normed(x, weight, offset, eps):
    CALLS.append(tuple(x.shape))
    scaled = x * weight * torch.rsqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps)
    return scaled + offset[:, None].to(x.dtype) / 2
"""


@pytest.fixture
def compiler():
    """torch's, without its caches: they know an operator by its name, and not its results."""
    torch.compiler.reset()
    with torch.compiler.config.patch(force_disable_caches=True):
        yield


@pytest.fixture
def norm(tmp_path, compiler):
    lib, _ = library_of(tmp_path, NORM, NORM_REFERENCE, NORM_KERNEL)
    return lib


def normed_arguments(x=torch.float32, weight=torch.float32, offset=torch.float32, m=4, n=6):
    tensors = torch.randn(m, n), torch.randn(n), torch.randn(m)
    wanted = (x, weight, offset)
    return *(t.mul(3).to(d) for t, d in zip(tensors, wanted, strict=True)), 1e-6


OTHER_CALLS = {
    "x half": normed_arguments(x=torch.float16),
    "weight double": normed_arguments(weight=torch.float64),
    "offset double": normed_arguments(offset=torch.float64),
    "a dtype of no case": normed_arguments(*[torch.float64] * 2),
    "whole numbers": normed_arguments(*[torch.int32] * 2),
    "another rank": (torch.randn(3, 4, 6), *normed_arguments()[1:]),
    "weight broadcast": (*normed_arguments()[:1], torch.randn(1), *normed_arguments()[2:]),
    "x broadcast": (torch.randn(4, 1), *normed_arguments()[1:]),
    "offset broadcast": (*normed_arguments()[:2], torch.randn(1), 1e-6),
}


@pytest.mark.sampled(one_in=3)
@pytest.mark.filterwarnings("ignore:.*torch's own implementation is used.*")
@pytest.mark.parametrize("kind", OTHER_CALLS)
@pytest.mark.parametrize("least", [0, 1000])
def test_other_calls_are_torchs_in_values_dtype_and_shape_at_every_size(norm, kind, least):
    given, module = OTHER_CALLS[kind], norm.normed
    module._operator.least = least
    expected = module._task.eager(**dict(zip(("x", "weight", "offset", "eps"), given, strict=True)))
    compiled = torch.compile(module.normed, fullgraph=True)
    for call in (module.normed, module.normed, module._operator.op):
        torch.testing.assert_close(call(*given), expected, rtol=0, atol=0)
    torch.testing.assert_close(compiled(*given), expected, rtol=4e-3, atol=4e-3)
    assert calls(norm, "normed") == []
    torch.library.opcheck(module._operator.op, given)


def test_calls_of_the_task_are_the_kernels_while_compiling_for_any_size(norm):
    module = norm.normed
    compiled = torch.compile(module.normed, fullgraph=True, dynamic=True)
    for m, n in ((4, 6), (5, 9), (1, 7)):
        given = normed_arguments(m=m, n=n)
        torch.testing.assert_close(compiled(*given), module._operator.by_reference(*given))
    assert calls(norm, "normed") == [(4, 6), (5, 9), (1, 7)]


def test_an_exported_program_takes_any_size_that_the_task_does(blocks):
    rows, columns, halves = (torch.export.Dim(n, min=3) for n in ("rows", "columns", "halves"))
    x, weight, index, *scalars = arguments()
    exported = torch.export.export(
        blocks.block_sums.BlockSums(),
        (x, weight, index, *scalars),
        dynamic_shapes=({0: rows, 1: columns}, {0: halves}, {0: rows}, *[None] * len(scalars)),
    )
    assert "block_sums.default" in exported.graph_module.code
    other = (*arguments(m=6, n=12)[:3], *scalars)
    torch.testing.assert_close(exported.module()(*other), blocks.block_sums.block_sums(*other))


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("compiles", [False, True])
def test_what_is_written_in_a_call_of_other_shapes_is_torchs_too(tmp_path, compiles):
    lib, _ = library_of(tmp_path, ADD, ADD_REFERENCE, ADD_KERNEL)
    add = lib.add_into.add_into
    call = torch.compile(add, fullgraph=True) if compiles else add
    x, y = torch.randn(2, 3, 5), torch.randn(5, dtype=torch.float64)
    before = x.clone()
    assert torch.equal(call(x, y), before)
    torch.testing.assert_close(x, (before + y).float())
    assert calls(lib, "add_into") == []
