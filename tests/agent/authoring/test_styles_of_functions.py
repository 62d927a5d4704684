"""Tasks made of examples, functions and decorators in the styles in which people write them."""

import functools
import sys

import numpy as np
import pytest
import torch
from kagent.authoring.errors import AuthoringError
from kagent.authoring.tracing.devices import OnCPU
from kagent.authoring.tracing.drawing import observed, recorded
from kagent.authoring.tracing.operation import make_operation
from kagent.authoring.tracing.source_file import load_module, named
from kagent.authoring.tracing.trace import trace
from kagent_sandbox.errors import UserError
from torch import nn
from torch.nn import functional as F
from traced_functions import every_axis, traced, written


def words(function):
    return [d.drawing.words() for d in recorded(function)]


def test_examples_of_numpy_and_of_lists_are_drawn_as_their_values_are():
    def example():
        numbers = np.random.default_rng(0).standard_normal((64, 48)).astype(np.float32)
        yield torch.from_numpy(numbers)
        yield torch.tensor(numbers) * 0 + 3
        yield torch.tensor([i % 7 for i in range(300)])

    first, second, third = words(example)
    assert first.startswith("normal with mean 0 ")
    assert second == "evenly from 1.5 to 4.5"
    assert third == "whole numbers from 0 to 6"


def test_examples_like_others_are_drawn():
    def example():
        x = torch.empty(8, 16)
        like = torch.rand_like(x), torch.randn_like(x, dtype=torch.bfloat16)
        return *like, torch.randint_like(x, 5), torch.randint_like(x, 2, 5)

    assert words(example) == [
        "evenly from 0 to 1",
        "normal with mean 0 and deviation 1",
        "whole numbers from 0 to 4",
        "whole numbers from 2 to 4",
    ]


def test_numbers_that_are_all_the_same_are_drawn_around_them():
    def example():
        masked = torch.zeros(4, 4)
        masked[0] = 1
        vectors = torch.zeros(8), torch.ones(8).bfloat16(), torch.full((8,), -2.0)
        return *vectors, torch.ones(4, 4), masked, torch.tensor(0.5), torch.zeros(4).long()

    code = "as the example's own code draws it"
    expected = ["evenly from 0 to 0.1", "evenly from 0.5 to 1.5", "evenly from -3 to -1"]
    assert words(example) == [
        *expected,
        "evenly from 1 to 1",  # it may be a mask
        code,
        "evenly from 0.25 to 0.75",
        code,
    ]
    given = observed((torch.zeros(8), torch.ones(8), torch.full((8,), -2.0), torch.ones(4, 4)))
    assert [d.drawing.words() for d in given] == [*expected, "evenly from 1 to 1"]


def test_memory_for_results_is_drawn():
    def example():
        x = torch.randn(8, 16)
        return torch.empty(8), torch.empty_like(x).bfloat16(), torch.empty_like(x)

    assert words(example)[::2] == ["normal with mean 0 and deviation 1"] * 2


def on_gpu():
    x = torch.randn(8, 16, device="cuda")
    return x, torch.ones(16).cuda(), torch.rand(8, 16).to("cuda:0")


def added_there(x, weight, y):
    return x.to(torch.device("cuda")) * weight + y + torch.arange(16, device="cuda")


def test_a_gpu_that_code_names_is_not_needed():
    operation = make_operation(added_there, on_gpu)
    assert [e.shape for e in operation.examples] == [(8, 16), (16,), (8, 16)]
    assert "cuda" not in written(trace(operation, every_axis(operation)))
    with torch.device("meta"), OnCPU():  # the default device is another
        assert torch.zeros(2).device.type == torch.rand(2, device="cuda").device.type == "cpu"


@torch.compile
def compiled(x):
    return torch.relu(x) * 2


@torch.jit.script
def scripted(x, scale: float):
    return torch.relu(x) * scale


def printing(x):
    print("called")  # noqa: T201
    return torch.relu(x) * 2


@functools.wraps(printing)
def wrapped(*args):
    return printing(*args)


@torch.inference_mode()
def inferred(x):
    with torch.autocast("cuda", enabled=False):
        return torch.relu(x) * 2


@pytest.mark.parametrize(
    "target",
    [compiled, lambda x: compiled(x), wrapped, inferred, torch.compile(nn.ReLU())],
)
def test_decorated_functions_run_as_they_are_written(target, capfd):
    found = traced(target, torch.randn(8, 16))
    assert next(e.name for e in found.operation.examples) in ("x", "input")
    assert found.dims == {"M": 8, "N": 16}
    text = written(found)
    assert "relu" in text
    assert "autocast" not in text
    assert capfd.readouterr().out == ""


def multiplied(x):
    try:
        return x @ x
    except RuntimeError:
        return x * x


def test_what_a_function_tries_is_not_logged(caplog):
    assert "aten.mul" in written(traced(multiplied, torch.randn(8, 16)))
    assert not [r for r in caplog.records if r.levelname == "ERROR"]


def test_scripted_functions_have_names():
    operation = make_operation(scripted, (torch.randn(8, 16), 2.0))
    assert [e.name for e in operation.examples] == ["x"]
    assert operation.numbers == {"scale": 2.0}


def test_torch_func_is_recorded():
    def loss(w, x):
        return (x @ w).tanh().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    w, x = torch.randn(16), torch.randn(8, 16)
    found, space = traced(each, w, x), {}
    assert found.shapes == (("N",), ("M", "N"))
    exec(written(found), space)
    named = dict(zip((e.name for e in found.operation.examples), (w, x), strict=True))
    torch.testing.assert_close(space["eager"](**named), each(w, x))


def test_tensors_of_a_dict_have_the_names_of_its_keys():
    def mlp(params, x):
        return F.silu(x @ params["up"]) @ params["down"]

    params = {"up": torch.randn(16, 24), "down": torch.randn(24, 8)}
    operation = make_operation(mlp, (params, torch.randn(4, 16)))
    assert [e.name for e in operation.examples] == ["params_up", "params_down", "x"]


def test_a_method_forward_is_its_module():
    operation = make_operation(nn.Linear(16, 8).forward, torch.randn(4, 16))
    assert [e.name for e in operation.examples] == ["input", "weight", "bias"]


class Held:
    """No module."""

    def __init__(self, size=128):
        self.weight = torch.rand(size)

    def __call__(self, x):
        return x * self.weight

    @staticmethod
    def doubled(x):
        return x * 2


@torch.library.custom_op("kagent_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x):
    return torch.empty_like(x)


def asserting(x):
    assert x.is_cuda, "x must be on a GPU"
    return x * 2


def backwards(x):
    x = x.detach().requires_grad_()
    x.square().sum().backward()
    return x.grad


def with_autocast(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x @ x.T


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (Held(16 * 128), r"holds a tensor \[2048\] that is no argument: make it one, or a param"),
        (with_autocast, "under torch.autocast, whose casts depend on the device: write them out"),
        (twice, r"it calls kagent_tests::twice, an operation that torch has not by itself"),
        (asserting, r"an assertion failed \(x must be on a GPU.*\): it must hold .* on a CPU"),
        (backwards, r"a gradient where gradients are off: .*enable_grad\(\):`, or .* --backward"),
        (lambda x: torch.from_numpy(np.sqrt(x.numpy())), "it leaves torch: write it with"),
        (lambda x: x[:, : x.long().max().item()], "a size, a branch or a Python number depends"),
    ],
)
def test_styles_that_cannot_be_a_task_are_said(function, expected):
    with pytest.raises(AuthoringError, match=expected):
        written(traced(function, torch.randn(8, 2048)))


@pytest.mark.parametrize(
    ("target", "inputs", "expected"),
    [
        (
            Held,
            torch.randn(4),
            r"Held is a class and no nn.Module: name a function, or an instance",
        ),
        (
            torch.jit.script(nn.ReLU()),
            torch.randn(4),
            "is a scripted module: name the module it is",
        ),
        (printing, lambda: None, "the example's arguments are NoneType, expected a tensor, or"),
        (printing, lambda: sys.exit("no GPU"), "raised SystemExit: no GPU. It is called without"),
    ],
)
def test_targets_and_examples_that_are_none_are_said(target, inputs, expected):
    with pytest.raises(UserError, match=expected):
        make_operation(target, inputs)


def test_a_file_that_exits_or_lacks_a_package_is_said(tmp_path):
    file = tmp_path / "norm.py"
    file.write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(UserError, match=r"norm.py: SystemExit: 0"):
        load_module(file)
    file.write_text("import no_such_package_there\n")
    with pytest.raises(UserError, match=r"named 'no_such_package_there': install no_such_pack"):
        load_module(file)


AUTOCAST = """
import torch

class Ops:
    @staticmethod
    @torch.autocast("cuda", dtype=torch.bfloat16)
    def product(x):
        return x @ x.T
"""


def test_autocast_on_a_gpu_is_no_float32_where_there_is_none(tmp_path):
    file = tmp_path / "ops.py"
    file.write_text(AUTOCAST)
    product = named(load_module(file), "Ops.product", file)
    with pytest.raises(AuthoringError, match="it computes under"):
        traced(product, torch.randn(8, 16))


def test_a_file_of_a_package_may_import_relatively(tmp_path):
    folder = tmp_path / "own_package" / "ops"
    folder.mkdir(parents=True)
    for path in (folder, folder.parent):
        (path / "__init__.py").touch()
    (folder.parent / "numbers.py").write_text("HALF = 0.5\n")
    (folder / "beside.py").write_text("TWO = 2\n")
    file = folder / "mine.py"
    file.write_text(
        "from ..numbers import HALF\nfrom .beside import TWO\nimport beside\n"
        "def f(x):\n    return x * HALF\n\ndef make_inputs():\n    raise ValueError('none')\n"
    )
    module = load_module(file)
    assert module.f(4) == 2
    with pytest.raises(UserError, match=r"make_inputs\(\) \(mine.py, line 8\) raised ValueError"):
        make_operation(module.f, module.make_inputs)
