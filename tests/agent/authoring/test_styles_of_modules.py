"""Tasks made of modules and of what they call, in the styles in which people write them."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
import triton
from kagent.authoring.draft.draft import DraftKind, TaskDraft
from kagent.authoring.draft.inputs import draw_example
from kagent.authoring.draft.rooms import find_rooms
from kagent.authoring.errors import AuthoringError
from kagent.authoring.tracing.drawing import drawn_by, recorded
from kagent.authoring.tracing.operation import make_operation
from kagent.authoring.tracing.source_file import load_module, named
from kagent.authoring.tracing.trace import trace
from kagent_sandbox.errors import UserError
from torch import nn
from torch.func import grad, vmap
from traced_functions import every_axis, traced, written

X = torch.randn(24, 16)


class Affine(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 8)

    def forward(self, x):
        return self.linear(x).relu()

    def loss(self, x):
        return self(x).square().mean()


def computes(found, *tensors):
    """What a written task's eager computes, and what the operation itself does."""
    space = {}
    exec(written(found), space)
    examples = [found.operation.examples[i] for i in found.used]
    inputs = dict(zip([e.name for e in examples], tensors, strict=True))
    return space["eager"](**{n: t.clone() for n, t in inputs.items()}), inputs


# Devices.


class OnGpu(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, device="cuda"))

    def forward(self, x):
        mask = torch.ones(x.shape[1], x.shape[1], device=torch.device("cuda:0")).tril()
        return x.cuda() * self.weight.to("cuda") @ mask


@pytest.mark.skipif(torch.cuda.is_available(), reason="where no GPU is")
def test_code_that_names_a_gpu_needs_none():
    operation = make_operation(OnGpu, lambda: torch.randn(24, 16, device="cuda").cuda())
    assert [e.drawing.words() for e in operation.examples] == [
        "normal with mean 0 and deviation 1",
        "evenly from 0.5 to 1.5",
    ]
    found = trace(operation, [(0, 0)])
    mine, inputs = computes(found, X, torch.randn(16))
    assert torch.allclose(mine, inputs["x"] * inputs["weight"] @ torch.ones(16, 16).tril())


# Compiled and scripted code.


@torch.compile
def compiled_function(x):
    return x.softmax(-1) * 2


class HoldsCompiled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.compile(Affine())

    def forward(self, x):
        return self.inner(x) + 1


def test_compiled_code_is_taken_as_it_was_before():
    mine, _ = computes(traced(compiled_function, X), X)
    assert torch.allclose(mine, X.softmax(-1) * 2)
    operation = make_operation(torch.compile(Affine()), X)
    assert [e.name for e in operation.examples] == ["x", "linear_weight", "linear_bias"]
    assert operation.name == "affine"
    found = traced(HoldsCompiled(), X)
    assert found.results[0].shape == ("M", "N")
    assert found.operation.examples[1].name == "inner_linear_weight"
    with pytest.raises(UserError, match="is a scripted module: name the module it is made of"):
        make_operation(torch.jit.script(Affine()), X)


# Modules with a state.


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.last = torch.zeros(24, 16)

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        self.last = x - self.mean
        return self.last * 2


def test_a_buffer_that_a_module_replaces_is_written_and_what_it_keeps_else_is_not():
    found = traced(Counts(), X)
    names = [found.operation.examples[i].name for i in found.written]
    assert names == ["mean"]
    assert len(found.results) == 1
    assert "last" not in written(found)


class Steps(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("place", torch.tensor([0]))

    def forward(self, x):
        self.steps += 1
        first = x.index_select(0, self.place)
        self.place += 1
        return first / self.steps


def test_a_counter_that_a_call_writes_is_drawn_from_more_numbers_than_the_examples():
    found = next(find_rooms(make_operation(Steps(), X))).trace
    words = [e.drawing.words() for e in found.operation.examples]
    assert words[1:] == ["whole numbers from 3 to 102", "whole numbers from 0 to 23"]
    draft = TaskDraft(found, DraftKind((), ()), DraftKind((), ()))
    places = [int(draw_example(draft, 2, {"M": 9, "N": 16})) for _ in range(20)]
    assert max(places) < 9


class Appends(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.past, self.calls = nn.Linear(16, 8), [], None

    def forward(self, x):
        self.past.append(self.linear(x))
        self.calls = torch.cat(self.past)
        return self.calls


class Cache:
    def __init__(self):
        self.rows = None

    def add(self, x):
        self.rows = x if self.rows is None else torch.cat([self.rows, x])
        return self.rows


CACHE = Cache()


def test_calls_of_a_module_do_not_depend_on_earlier_ones():
    module = Appends()
    found = traced(module, X)
    assert found.results[0].shape == ("M", "N")
    with pytest.raises(AuthoringError, match="goes on with what an earlier call of it kept"):
        [traced(lambda x: CACHE.add(x) * 2, X) for _ in range(2)]


# Other ways to write functions and modules.


def test_a_modules_method_has_the_modules_parameters_as_arguments():
    module = Affine()
    for own in (True, False):
        operation = make_operation(module.loss, X, own=own)
        assert operation.name == "loss"
        assert [e.name for e in operation.examples] == ["x", "linear_weight", "linear_bias"]
        given = [X, *(p.detach() for p in module.parameters())]
        assert torch.equal(operation.call(*given), module.loss(X))


def test_functions_with_transforms_of_torch_func_are_operations():
    def gradients(w, x):
        return vmap(grad(lambda w, x: (x @ w).tanh().sum()), (None, 0))(w, x) + w

    w = torch.randn(16, 8)
    mine, _ = computes(traced(gradients, w, X), w, X)
    assert torch.allclose(mine, gradients(w, X), atol=1e-6)


def off(x):
    with torch.autocast("cpu", enabled=False):
        return x.float() @ x.mT


def on(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x @ x.mT


def test_autocast_that_is_off_is_nothing_and_else_is_refused():
    mine, _ = computes(traced(off, X), X)
    assert torch.equal(mine, off(X))
    with pytest.raises(AuthoringError, match=r"under torch.autocast, .*: write them out"):
        traced(on, X)


@triton.jit
def nothing(x):
    pass


def calls_triton(x):
    nothing[(1,)](x)
    return x * 2


def test_a_triton_kernel_is_refused_in_words():
    with pytest.raises(AuthoringError, match=r"it calls a Triton kernel, .*: name a function that"):
        traced(calls_triton, X)


@torch.library.custom_op("styles::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


twice.register_fake(torch.empty_like)


def test_operations_that_torch_has_not_and_those_of_functions_are_refused():
    with pytest.raises(AuthoringError, match="calls styles::twice, an operation that torch has"):
        written(traced(lambda x: twice(x).relu(), X))
    with pytest.raises(AuthoringError, match="it calls cond, which takes functions: write what"):
        traced(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), X)


class Output(OrderedDict):
    pass


def test_tensors_in_a_mapping_of_its_own_class_are_results():
    found = traced(lambda x: Output(y=x * 2, more={"z": x.sum(-1)}), X)
    assert [r.shape for r in found.results] == [("M", "N"), ("M",)]


def test_examples_that_numpy_draws_are_examples():
    def example():
        return torch.from_numpy(np.random.default_rng(0).standard_normal((24, 16))), X * 2

    drawn = recorded(example)
    assert [d.drawing.kind for d in drawn] == ["normal", "normal"]
    assert drawn[1].drawing.b == pytest.approx(2, abs=0.3)
    few = recorded(lambda: torch.tensor([1.0, 2.0]) * torch.ones(2))  # small ones stay as they are
    assert drawn_by(few.drawing).tolist() == [1, 2]


# Words on what cannot be taken.

FILE = """
import torch
from collections import OrderedDict
from torch import nn

class Act(nn.Module):
    def forward(self, x):
        return x @ x

    @staticmethod
    def example():
        return torch.randn(24, 16)

class Plain:
    pass

net = nn.Sequential(nn.Tanh())
"""


def test_names_of_a_file_may_have_dots_and_those_of_other_files_are_not_told(tmp_path):
    file = tmp_path / "act.py"
    file.write_text(FILE)
    module = load_module(file)
    assert named(module, "Act.example", file)().shape == (24, 16)
    with pytest.raises(UserError, match=r"defines no 'Act.x'; there are Act, Plain, net$"):
        named(module, "Act.x", file)
    with pytest.raises(UserError, match=r"Plain is a class and no nn.Module: name a function, or"):
        make_operation(module.Plain, X)
    operation = make_operation(module.Act, module.Act.example)
    with pytest.raises(AuthoringError, match=r"symbolic tensors \(act.py, line 8\): a and b must"):
        trace(operation, every_axis(operation))


def test_long_words_of_an_error_are_cut():
    def example():
        raise ValueError("no GPU " * 100)

    with pytest.raises(
        UserError, match=r"ValueError: (no GPU )+.{0,9} \[...\]. It is called without"
    ):
        make_operation(torch.tanh, example)


@pytest.mark.parametrize(
    ("example", "kind"), [(None, "NoneType"), ((3, "x"), "int, str"), (np.ones(3), "ndarray")]
)
def test_an_example_without_tensors_is_refused(example, kind):
    with pytest.raises(UserError, match=f"arguments are {kind}, expected a tensor, or a tuple"):
        make_operation(torch.tanh, lambda: example)


def test_a_module_without_sizes_and_a_function_that_makes_one_are_refused():
    with pytest.raises(UserError, match="weight has no size before the module's first call: call"):
        make_operation(nn.LazyLinear(8), X)
    with pytest.raises(AuthoringError, match=r"gives Affine, .* makes the module: name what it"):
        next(find_rooms(make_operation(lambda x: Affine(), X)))
