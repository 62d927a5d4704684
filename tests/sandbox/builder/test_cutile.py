"""cuTile without a device: its launches become plans, and what cannot be recorded is said."""

import importlib.util

import pytest
from kagent_sandbox.builder.trace.cutile import _factor
from kagent_sandbox.data.build import Built
from kagent_sandbox.data.language import CUTILE, language_of_source
from kagent_sandbox.data.plan import Pointer, Scalar
from kagent_sandbox.data.plan_json import plan_identity
from kagent_sandbox.data.verdict import Status
from test_builder import case, request

installed = pytest.mark.skipif(
    importlib.util.find_spec("cuda.tile") is None, reason="cuda-tile is not installed"
)

DOUBLE = """
import cuda.tile as ct
import torch


@ct.kernel
def double(x, y, factor, T: ct.Constant[int]):
    row = ct.bid(0)
    t = ct.load(x, index=(row, 0), shape=(1, T), padding_mode=ct.PaddingMode.ZERO)
    ct.store(y, index=(row, 0), tile=t * factor)


def softmax(x):
    y = torch.empty_like(x)
    stream = torch.cuda.current_stream()
    ct.launch(stream, (x.shape[0],), double, (x, y[1:], 2.0, 64))
    return y
"""


def test_a_file_that_imports_it_is_in_cutile():
    assert language_of_source(DOUBLE) == CUTILE
    assert language_of_source("from cuda import tile as ct\n") == CUTILE
    assert language_of_source("from cuda import bindings\n") != CUTILE


@pytest.mark.parametrize(
    ("number", "found"), [(0, 16), (1, 1), (6, 2), (16, 16), (48, 16), (1024, 16), (12, 4)]
)
def test_what_a_number_is_a_multiple_of(number, found):
    assert _factor(number, 16) == found


@installed
def test_a_launch_becomes_part_of_a_plan(builder):
    plans = []
    for _ in range(2):
        built = builder.build(request(DOUBLE, [case(5, 64)]))
        assert isinstance(built, Built), f"{built.status}: {built.message}"
        plans.append(built.plans[0, "5x64"])
    (launch,) = plans[0].launches
    assert (launch.grid, launch.block, launch.shared) == ((5, 1, 1), (1, 1, 1), 0)
    sizes = [Scalar("i32", n) for n in (5, 64, 64, 1)]  # and strides
    rest = [Scalar("i32", n) for n in (4, 64, 64, 1)]
    assert launch.args == (
        *(Pointer(0, 0), *sizes),
        *(Pointer(1, 4 * 64), *rest),
        Scalar("f32", 2.0),
    )
    (kernel,) = plans[0].kernels
    assert kernel.language == "cutile"
    assert kernel.registers
    assert kernel.spill_bytes == 0
    assert plan_identity(plans[0]) == plan_identity(plans[1])


@installed
def test_one_binary_serves_calls_whose_sizes_divide_alike(builder):
    built = builder.build(request(DOUBLE, [case(5, 64), case(13, 128), case(5, 65)]))
    assert isinstance(built, Built), f"{built.status}: {built.message}"
    first, second, odd = (
        built.plans[0, name].kernels[0].hash for name in ("5x64", "13x128", "5x65")
    )
    assert first == second
    assert first != odd


@installed
@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("t * factor", "t * factors", "factors"),
        ("2.0, 64", "2.0, 60", "60"),
        ("2.0, 64", "[2.0], 64", "plans know tensors and numbers"),
        ("2.0, 64", "64", "it has 4 parameters"),
        ("2.0, 64", "True, 64", "is a flag"),
    ],
)
def test_what_cannot_be_recorded_is_refused(builder, right, wrong, message):
    refused = builder.build(request(DOUBLE.replace(right, wrong), [case(5, 64)]))
    assert refused.status in {Status.COMPILE_ERROR, Status.POLICY}
    assert message in refused.message
