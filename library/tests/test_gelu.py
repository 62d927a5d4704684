"""gelu: against float64 and torch; gradients, opcheck, autocast, torch.compile."""

import pytest
import torch
from harness import (
    DEVICES,
    Task,
    as_tuple,
    checks_for,
    chosen,
    floating,
    leaves,
    operator_of,
    table_for,
    transposed,
    with_one_thread,
)
from tolerance import allowed, measure, share

from kagent_kernels import _portfolio
from kagent_kernels._portfolio import Chosen
from kagent_kernels.operators import gelu as module

TASK = Task("gelu")
ELEMENTS = _portfolio.elements
function = module.gelu
OPERATOR = operator_of("gelu")
GRADIENT = not any("writes" in a or a.get("mutates") for a in TASK.data["arguments"]) and all(
    getattr(layer, "has_backward", True) for layer in module.LAYERS.values()
)
with_gradient = pytest.mark.skipif(not GRADIENT, reason="it is computed forward only")


@pytest.fixture(params=DEVICES)
def arguments(request):
    """Of the smallest ordinary case."""
    return TASK.arguments(TASK.smallest(request.param))


@pytest.mark.parametrize("case", TASK.cases(), ids=str)
def test_agrees_with_float64(case):
    arguments = TASK.arguments(case)
    TASK.check(lambda own: OPERATOR.op(*own.values()), arguments)
    TASK.check(lambda own: TASK.all_results(function, own), arguments)
    # From the third call on a kernel does without its host function.
    for seed in (1, 2):
        TASK.check(lambda own: OPERATOR.op(*own.values()), TASK.arguments(case, seed))


@pytest.mark.parametrize("case", TASK.cases("bench"), ids=str)
def test_agrees_with_float64_where_it_was_timed(case):
    arguments = TASK.arguments(case)
    TASK.check(lambda own: OPERATOR.op(*own.values()), arguments)


def test_a_kernel_runs_where_one_was_the_fastest(monkeypatch):
    def refuse(*_):
        raise AssertionError("the reference was called, and not the kernel")

    monkeypatch.setattr(OPERATOR, "_reference", refuse)
    asked = 0
    for case in TASK.cases("bench"):
        arguments = TASK.arguments(case)
        if isinstance(chosen(OPERATOR, arguments), Chosen):
            asked += 1
            OPERATOR.op(*arguments.values())
    if not asked:
        pytest.skip("no kernel was measured on a device like those here, or torch was faster")


@pytest.mark.parametrize("device", DEVICES)
def test_below_the_smallest_measured_shape_torch_is_called(device, monkeypatch):
    monkeypatch.setattr(_portfolio, "elements", ELEMENTS)
    table = table_for("gelu", torch.device(DEVICES[device]))
    smallest = TASK.smallest(device)
    points = table.points if table is not None else ()
    if any(ELEMENTS(p.dims) <= ELEMENTS(smallest.dims) for p in points):
        pytest.skip("as small a shape was measured")
    assert not isinstance(chosen(OPERATOR, TASK.arguments(smallest)), Chosen)


@pytest.mark.parametrize("device", DEVICES)
def test_two_threads_may_call_it_at_once(device):
    given = [TASK.arguments(TASK.largest(device), seed) for seed in (0, 1)]
    TASK.check_together(lambda own: OPERATOR.op(*own.values()), given)


def test_one_thread_is_enough():
    """A worker of a data loader has no more, and what calls torch.set_num_threads(1)."""
    if table_for("gelu", torch.device("cpu")) is None:
        pytest.skip("no kernel was measured on a CPU like the one here")
    arguments = TASK.arguments(TASK.largest("cpu"))
    with_one_thread(lambda: TASK.check(lambda own: OPERATOR.op(*own.values()), arguments))


def test_inputs_that_are_not_contiguous(arguments):
    turned = {n: transposed(v) if n in TASK.tensors else v for n, v in arguments.items()}
    TASK.check(lambda own: TASK.all_results(function, own), arguments, turned)


def test_inputs_that_are_empty(arguments):
    nothing = TASK.empty(arguments)
    own = TASK.own(nothing)
    results = TASK.with_written(TASK.all_results(function, own), own)
    for result, expected in zip(results, TASK.eager(nothing), strict=True):
        torch.testing.assert_close(result, expected, equal_nan=True)


def test_opcheck(arguments):
    torch.library.opcheck(OPERATOR.op, tuple(arguments.values()), test_utils=checks_for(arguments))


@with_gradient
@pytest.mark.filterwarnings("ignore::kagent_kernels._library.FallbackWarning")
def test_gradients_by_finite_differences(arguments):
    """In float64, which no kernel takes: the reference's path."""
    wide = {n: v.double().requires_grad_() if floating(v) else v for n, v in arguments.items()}
    names = [n for n, v in wide.items() if floating(v)]

    def of(*values):
        return TASK.call(function, {**wide, **dict(zip(names, values, strict=True))})

    assert torch.autograd.gradcheck(of, leaves(wide), fast_mode=True)


@with_gradient
def test_gradients_agree_with_torch(arguments):
    """Of a weighted sum of the result: within `k` times what torch errs, and the floor."""
    result = TASK.data["results"][0]
    if len(as_tuple(TASK.call(function, arguments))) < len(TASK.data["results"]):
        pytest.skip("the gradients are results of the task, and are compared as such")
    wide = {n: v.double() if floating(v) else v for n, v in arguments.items()}
    eager = TASK.reference.eager
    expected = TASK.gradients(lambda own: eager(**own), wide)
    yardstick = TASK.gradients(lambda own: eager(**own), arguments)
    found = TASK.gradients(lambda own: TASK.call(function, own), arguments)
    tolerance = {"k": result["k"], "floor": result.get("floor", 1.0), "bias": 1.0}
    for own, torch_s, exact in zip(found, yardstick, expected, strict=True):
        limit = allowed(measure(torch_s, exact, 1), own.dtype, **tolerance)
        assert share(measure(own, exact, 1), limit) <= 1


def test_torch_compile_takes_it_whole(arguments):
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True)
    TASK.check(lambda own: TASK.all_results(function, own, compiled), arguments)


@with_gradient
def test_torch_compile_takes_its_gradient_whole(arguments):
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True)
    expected = TASK.gradients(lambda own: TASK.call(function, own), arguments)
    found = TASK.gradients(lambda own: TASK.call(function, own, compiled), arguments)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_autocast(arguments):
    device, own = arguments[TASK.tensors[0]].device.type, TASK.own(arguments)
    with torch.autocast(device, dtype=torch.bfloat16):
        result = TASK.with_written(TASK.call(function, own), own)[0]
    expected = as_tuple(TASK.reference.reference(**arguments))[0].double()
    off = torch.linalg.vector_norm(result.double() - expected)
    assert off <= 0.02 * torch.linalg.vector_norm(expected)
