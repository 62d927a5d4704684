"""Calls of the kept library's kernels, repeated without their host function on this GPU."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from kagent.export.library._repeated import Repeated
from repeated_calls import host_functions

pytestmark = pytest.mark.gpu

LIBRARY = Path(__file__).parents[2] / "library"
HOST_FUNCTIONS = host_functions(LIBRARY)


@pytest.fixture(scope="module")
def harness():
    sys.path[:0] = [str(LIBRARY / "tests"), str(LIBRARY / "build/torch-universal")]
    return importlib.import_module("harness")


@pytest.fixture(params=HOST_FUNCTIONS)
def called(request, harness):
    """Host function, what repeats it, how often the first was called, and how to draw a call."""
    host, calls = HOST_FUNCTIONS[request.param](), []

    def counted(*args):
        calls.append(request.param)
        return host(*args)

    counted.__module__ = host.__module__
    task = harness.Task(request.param)
    case = next(c for c in task.cases() if c.kind == "gpu" and not c.noncontiguous)
    return host, Repeated(counted), calls, task, case


def results(function, task, arguments):
    own = task.own(arguments)
    return task.with_written(function(*own.values()), own)


def same(found, expected):
    for one, other in zip(found, expected, strict=True):
        # Sums by atomic additions have no order.
        torch.testing.assert_close(one.float(), other.float(), rtol=2e-2, atol=2e-2, equal_nan=True)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_later_calls_give_what_the_host_function_gives(called, mode):
    host, repeated, calls, task, case = called
    with mode():
        for seed in range(5):
            arguments = task.arguments(case, seed)
            same(results(repeated, task, arguments), results(host, task, arguments))
    assert len(calls) == 2


def test_on_another_stream_and_in_a_graph(called):
    host, repeated, _, task, case = called
    for seed in range(3):
        results(repeated, task, task.arguments(case, seed))
    arguments, stream = task.arguments(case, 3), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = results(repeated, task, arguments)
    stream.synchronize()
    same(found, results(host, task, arguments))

    static, graph = task.own(arguments), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        returned = repeated(*static.values())
    for seed in (4, 5):
        drawn = task.arguments(case, seed)
        for name, value in drawn.items():
            if isinstance(value, torch.Tensor):
                static[name].copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        same(task.with_written(returned, static), results(host, task, drawn))
