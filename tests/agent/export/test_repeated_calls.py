"""Calls that are repeated without their host function: Triton's own way to a launch, with a driver
that computes on the host what its launches would, and the runtime's, with a watcher that does.
"""

import ctypes
import gc
import math
import subprocess
import sys
import threading
from unittest import mock

import numpy as np
import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from kagent.export.library import _repeated
from kagent.export.library._kernels import load
from kagent.export.library._repeated import Repeated
from kagent_sandbox import runtime
from kagent_sandbox.builder.trace.triton import Driver
from kagent_sandbox.data.target import parse_target
from kagent_sandbox.runtime import (
    StructArgument,
    cpp_kernels,
    cuda_kernel,
    cuda_kernels,
    struct,
    tensor_map,
)
from kagent_sandbox.runtime import launches as runtime_launches
from kagent_sandbox.runtime.launches import Launching, LaunchWatcher, watch
from kagent_sandbox.runtime.tensor_maps import described
from torch.multiprocessing.reductions import StorageWeakRef
from triton.tools.tensor_descriptor import TensorDescriptor

N = 128
SOURCE = """
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

CALLS, KEPT = [], []

@triton.jit
def add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask=i < n) + tl.load(y_ptr + i, mask=i < n))

@triton.jit
def double(desc, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.reshape(desc.load([0, 0]), [BLOCK]) * 2.0)

def launch(x, y, out):
    add[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, out, n=x.numel(), BLOCK=128)
    return out

def sums(x, y):
    CALLS.append("sums")
    return launch(x, y, torch.empty_like(x))

def chained(x, y):
    CALLS.append("chained")
    ones = torch.full((128,), 1.0)
    out = torch.empty((2, 64))
    launch(x.view(-1), ones, out.view(-1))
    total = torch.zeros(128)
    launch(out.view(-1), y, total)
    return total, out

def described(x, y):
    CALLS.append("described")
    out = torch.empty(128)
    double[(1,)](TensorDescriptor(x.view(1, 128), [1, 128], [128, 1], [1, 128]), out, 128)
    return launch(out, y, torch.empty(128))

def computes(x, y):
    CALLS.append("computes")
    return launch(x, y, torch.empty_like(x)) * 1.0

def looks(x, y):
    CALLS.append("looks")
    return launch(x, y if x[0].item() > 0 else x, torch.empty_like(x))

def keeps(x, y):
    CALLS.append("keeps")
    if not KEPT:
        KEPT.append(torch.empty(128))
    launch(x, y, KEPT[0])
    return launch(KEPT[0], y, torch.empty_like(x))

def launches_nothing(x, y):
    CALLS.append("launches_nothing")
    return torch.zeros(128)
"""


def on_host(pointer, count=N):
    return np.frombuffer((ctypes.c_float * count).from_address(pointer), np.float32)


class Launcher:
    """Computes what a kernel would; is told of each launch as Triton's is."""

    def __init__(self, src, _metadata):
        self._name = src.fn.fn.__name__

    def __call__(self, x, y, z, stream, _function, _packed, _metadata, _enter, _exit, *args):
        launches.append((self._name, (x, y, z), stream))
        if self._name == "add":
            first, second, out = (on_host(t.data_ptr()) for t in args[:3])
            out[:] = first + second
        else:
            on_host(args[1].data_ptr())[:] = 2 * on_host(args[0].base.data_ptr())


launches = []


class Device(Driver):
    """Compiles for a GPU that is not here, and has its launches computed."""

    launcher_cls = Launcher
    stream = 7

    def get_current_stream(self, device=None):
        return self.stream


@pytest.fixture(scope="module")
def device():
    found = Device(parse_target("sm_90a"))
    with (
        mock.patch.object(triton.runtime.driver, "_active", found),
        mock.patch.object(_repeated, "_stream_of", return_value=found.get_current_stream),
    ):
        yield found


def imported(folder, name, source):
    path = folder / f"{name}.py"
    path.write_text(source)
    return sys.modules[load("tests", path, "sums", {}, "0").__module__]


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    return imported(tmp_path_factory.mktemp("kernels"), "kernels_of_this_test", SOURCE)


@pytest.fixture
def within(host):
    """Makes a function of this file one of the kernels' file."""

    def made(function):
        function.__module__ = host.__name__
        return function

    return made


@pytest.fixture(autouse=True)
def forgotten(host):
    launches.clear()
    host.CALLS.clear()
    host.KEPT.clear()


def drawn(seed, offset=0):
    """A vector that begins as torch's allocator has them on a GPU, or some elements later."""
    room = torch.randn(N + 256, generator=torch.Generator().manual_seed(seed))
    first = -(room.data_ptr() // 4) % 128
    return room[first + offset : first + offset + N]


EXPECTED = {
    "sums": lambda x, y: x + y,
    "chained": lambda x, y: (x + 1 + y, (x + 1).view(2, 64)),
    "described": lambda x, y: 2 * x + y,
    "computes": lambda x, y: x + y,
    "looks": lambda x, y: x + (y if x[0] > 0 else x),
    "keeps": lambda x, y: x + y + y,
    "launches_nothing": lambda x, y: torch.zeros(N),
}


def check(function, name, seed):
    x, y = drawn(2 * seed), drawn(2 * seed + 1)
    torch.testing.assert_close(function(x, y), EXPECTED[name](x, y))


@pytest.mark.parametrize("name", ["sums", "chained", "described"])
def test_the_third_call_does_without_the_host_function(host, device, name):
    function = Repeated(getattr(host, name))
    for seed in range(5):
        device.stream = seed
        check(function, name, seed)
    assert [name] * 2 == host.CALLS
    each = len(launches) // 5
    assert [stream for *_, stream in launches] == [s for s in range(5) for _ in range(each)]
    assert len({(kernel, grid) for kernel, grid, _ in launches}) <= each


@pytest.mark.parametrize("name", ["computes", "looks", "keeps", "launches_nothing"])
def test_what_is_not_repeated_is_called_each_time(host, device, name):
    function = Repeated(getattr(host, name))
    for seed in range(4):
        check(function, name, seed)
    assert [name] * 4 == host.CALLS


def test_tensors_that_begin_elsewhere_are_the_host_functions(host, device):
    function = Repeated(host.sums)
    for seed in range(3):
        check(function, "sums", seed)
    x, strided = drawn(8, offset=1), drawn(9).view(2, 64).mT.reshape(-1)[::1]
    torch.testing.assert_close(function(x, strided), x + strided)
    every_other = torch.randn(2 * N)[::2]
    function(drawn(10), every_other)
    assert host.CALLS == ["sums"] * 4


def test_rows_that_are_alone_and_have_another_stride_are_the_host_functions(host, device, within):
    seen = []

    def strided(x, y):
        seen.append(x.stride())
        return host.launch(x, y, torch.empty(N))

    function, y = Repeated(within(strided)), drawn(1)
    column = drawn(0).view(N, 1).mT
    assert column.is_contiguous()
    for x in [drawn(seed).view(1, N) for seed in range(3)] + [column]:
        torch.testing.assert_close(function(x, y), x.view(N) + y)
    assert seen == [(N, 1), (N, 1), (1, 1)]


def test_one_tensor_in_two_places_is_not_repeated(host, device):
    function, x = Repeated(host.sums), drawn(0)
    for _ in range(3):
        torch.testing.assert_close(function(x, x), x + x)
    for seed in range(2):
        check(function, "sums", seed)
    assert host.CALLS == ["sums"] * 4
    torch.testing.assert_close(function(x, x), x + x)
    assert host.CALLS == ["sums"] * 4


def test_launches_of_other_threads_are_not_repeated(host, device):
    theirs = drawn(20), drawn(21)

    def beside(x, y):
        other = threading.Thread(target=host.sums, args=theirs)
        other.start()
        other.join()
        return host.sums(x, y)

    beside.__module__ = host.__name__
    function = Repeated(beside)
    for seed in range(3):
        check(function, "sums", seed)
    assert len(launches) == 2 + 2 + 1
    assert not hasattr(triton.runtime.jit.JITFunction.run, "__wrapped__")


def test_a_watch_of_compiled_kernels_that_others_have_taken_away_records_nothing(
    host, device, within
):
    compiled = triton.compiler.compiler.CompiledKernel
    before, theirs = compiled.run, []

    def sums(x, y):
        found = host.sums(x, y)
        theirs.append(property(before.fget))
        compiled.run = theirs[-1]
        return found

    function = Repeated(within(sums))
    try:
        for seed in range(4):
            check(function, "sums", seed)
        assert compiled.run is theirs[-1]
        assert host.CALLS == ["sums"] * 4
    finally:
        compiled.run = before


def test_a_call_that_another_thread_has_recorded_meanwhile_is_not_recorded_again(
    host, device, monkeypatch
):
    function, lock, recorded = Repeated(host.sums), mock.Mock(), []
    check(function, "sums", 0)

    def acquire(blocking):
        lock.acquire.side_effect = None
        check(function, "sums", 1)
        recorded.append(function._repeat)
        return True

    lock.acquire.side_effect = acquire
    monkeypatch.setattr(_repeated, "_watching", lambda: lock)
    check(function, "sums", 2)
    assert recorded == [function._repeat]
    assert lock.acquire.call_count == lock.release.call_count == 2
    check(function, "sums", 3)
    assert host.CALLS == ["sums"] * 3


def test_a_watch_that_others_have_taken_away_records_nothing(host, device):
    def sums(x, y):
        found = host.sums(x, y)
        triton.runtime.jit.JITFunction.run = before
        return found

    before, sums.__module__ = triton.runtime.jit.JITFunction.run, host.__name__
    function = Repeated(sums)
    for seed in range(4):
        check(function, "sums", seed)
    assert host.CALLS == ["sums"] * 4
    assert triton.runtime.jit.JITFunction.run is before


def test_launches_on_another_stream_are_not_recorded(host, device):
    def sums(x, y):
        first = host.launch(x, y, torch.empty(N))
        with mock.patch.object(device, "stream", 99):
            return host.launch(first, y, torch.empty(N))

    sums.__module__ = host.__name__
    function = Repeated(sums)
    for seed in range(4):
        check(function, "keeps", seed)
    assert [stream for *_, stream in launches] == [device.stream, 99] * 4


def test_a_failure_leaves_tritons_launch_as_it_was(host, device):
    def fails(x, y):
        host.sums(x, y)
        raise ValueError("of this test")

    before, function = triton.runtime.jit.JITFunction.run, Repeated(fails)
    for _ in range(3):
        with pytest.raises(ValueError, match="of this test"):
            function(drawn(0), drawn(1))
    assert triton.runtime.jit.JITFunction.run is before


@pytest.mark.parametrize("line", ["import cutlass", "from .. import _others", "import cupy"])
def test_a_file_that_imports_what_may_launch_is_called_each_time(device, tmp_path, line):
    module = imported(tmp_path, "others_of_this_test", SOURCE + f"\ndef never():\n    {line}\n")
    function = Repeated(module.sums)
    for seed in range(4):
        check(function, "sums", seed)
    assert module.CALLS == ["sums"] * 4


@pytest.mark.parametrize(
    "shared", [lambda x: x.view(2, 64), lambda x: x[64:], lambda x: x.view(torch.int32)]
)
def test_arguments_that_share_memory_are_not_recorded(host, device, within, shared):
    function = Repeated(within(lambda x, y: host.launch(x, x.view(N), torch.empty_like(x))))
    x = drawn(0)
    for _ in range(3):
        torch.testing.assert_close(function(x, shared(x)), x + x)
    for seed in range(4):
        x, y = drawn(2 * seed), shared(drawn(2 * seed + 1)).clone()
        torch.testing.assert_close(function(x, y), x + x)


def test_kernels_that_are_launched_otherwise_are_not_repeated(host, device, within):
    def compiled(x, y):
        out = torch.zeros(N)
        kernel = host.add[(1,)](x, y, out, N, BLOCK=N)
        kernel[(1, 1, 1)](x, out, out, N, N)
        return out

    function = Repeated(within(compiled))
    for seed in range(4):
        x, y = drawn(2 * seed), drawn(2 * seed + 1)
        torch.testing.assert_close(function(x, y), x + y + x)
    inner = Repeated(host.sums)
    function = Repeated(within(lambda x, y: host.launch(inner(x, y), y, torch.empty(N))))
    for seed in range(5):
        check(function, "keeps", seed)


def test_a_tensor_in_the_place_of_one_that_is_gone_is_another_one(host, device, within):
    def constant(x, y):
        for _ in range(20):
            host.launch(x, y, torch.empty(N))
        return host.launch(x, torch.tensor([1.0] * N), torch.empty(N))  # no allocation that is seen

    function = Repeated(within(constant))
    for seed in range(4):
        x, y = drawn(2 * seed), drawn(2 * seed + 1)
        torch.testing.assert_close(function(x, y), x + 1)


def test_memory_that_the_host_function_frees_is_freed(host, device, within, monkeypatch):
    results, most = [], []
    launch = Launcher.__call__

    def counting(self, *args):
        results.append(StorageWeakRef(args[-3].untyped_storage()))
        most.append(sum(not r.expired() for r in results))
        launch(self, *args)

    def chain(x, y):
        for _ in range(8):
            x = host.launch(x, y, torch.empty(N))
        return x

    monkeypatch.setattr(Launcher, "__call__", counting)
    function = Repeated(within(chain))
    for seed in range(4):
        x, y = drawn(2 * seed), drawn(2 * seed + 1)
        torch.testing.assert_close(function(x, y), x + 8 * y)
        results.clear()
    assert len(most) == 4 * 8
    assert max(most) == 2


def test_a_call_that_fails_is_not_the_first(host, device, within):
    def sums(x, y):
        if not host.KEPT:
            host.KEPT.append(torch.empty(1))
            raise ValueError("of this test")
        return host.sums(x, y)

    function = Repeated(within(sums))
    with pytest.raises(ValueError, match="of this test"):
        function(drawn(0), drawn(1))
    for seed in range(4):
        check(function, "sums", seed)
    assert host.CALLS == ["sums"] * 2


def test_a_descriptor_that_changes_between_launches_is_another_one(host, device, within):
    shapes = []

    def seen(self, _x, _y, _z, _stream, _function, _packed, _metadata, _enter, _exit, *args):
        shapes.append(list(args[0].shape))

    def changes(x, y):
        out = torch.empty(N)
        desc = TensorDescriptor(x.view(1, N), [1, N], [N, 1], [1, N])
        host.double[(1,)](desc, out, N)
        desc.shape[1] = 64
        host.double[(1,)](desc, out, N)
        return out

    function = Repeated(within(changes))
    with mock.patch.object(Launcher, "__call__", seen):
        for seed in range(4):
            function(drawn(2 * seed), drawn(2 * seed + 1))
    assert shapes == [[1, N], [1, 64]] * 4


def test_numbers_that_are_equal_and_not_the_same_are_not_repeated(host, device, within):
    def scaled(x, s):
        return host.launch(x, torch.full((N,), s), torch.empty(N)), math.copysign(1.0, s)

    function, x = Repeated(within(lambda x, s: scaled(x, s)[0])), drawn(0)
    for _ in range(3):
        function(x, 0.0)
    found = function(torch.full((N,), -0.0), -0.0)
    assert torch.signbit(found).all()


def test_a_result_that_is_conjugated_is_so_again(host, device, within):
    def conjugated(x, y):
        return torch.view_as_complex(host.launch(x, y, torch.empty(N)).view(-1, 2)).conj()

    function = Repeated(within(conjugated))
    for seed in range(4):
        x, y = drawn(2 * seed), drawn(2 * seed + 1)
        expected = torch.view_as_complex((x + y).view(-1, 2)).conj()
        torch.testing.assert_close(function(x, y), expected)


@pytest.mark.parametrize(
    "copied",
    [
        lambda t: t.contiguous().view(N),
        lambda t: t.reshape(N),
        lambda t: t.flatten(),
        lambda t: t.to(torch.float32, copy=True, memory_format=torch.contiguous_format).view(N),
    ],
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_copy_is_no_view_though_its_operation_may_be_one(host, device, within, mode, copied):
    called = []

    def transposes(x, y):
        called.append(1)
        return host.launch(copied(x.view(2, 64).mT), y, torch.empty(N))

    function = Repeated(within(transposes))
    with mode():  # inference mode shows the operation as it was called
        for seed in range(4):
            x, y = drawn(2 * seed), drawn(2 * seed + 1)
            torch.testing.assert_close(function(x, y), x.view(2, 64).mT.reshape(N) + y)
    assert len(called) == 2


@pytest.mark.parametrize(
    ("multiplied", "calls"),
    [
        (lambda a, b: a @ b, 2),
        (lambda a, b: torch.mm(a, b, out=torch.empty(8, 8)), 2),
        (lambda a, b: torch.matmul(a, b, out=torch.empty(8, 8)), 2),
        (lambda a, b: torch.addmm(torch.zeros(8, 8), a / 2, b, alpha=2.0, beta=3.0), 4),
        (lambda a, b: torch.addmm(torch.zeros(8, 8), a, b, beta=3.0), 2),
        (lambda a, b: torch.bmm(a.view(1, 8, 16), b.unsqueeze(0))[0], 2),
        (lambda a, b: torch.zeros(8, 8).copy_((a @ b).to(torch.float64)), 2),
    ],
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_products_and_copies_of_torch_are_done_again(host, device, within, mode, multiplied, calls):
    called = []

    def multiplies(x, y):
        called.append(1)
        product = multiplied(x.view(8, 16), y.view(8, 16).t())
        out = torch.empty(N)
        host.launch(x, y, out)
        return product, out

    function = Repeated(within(multiplies))
    with mode():
        for seed in range(4):
            x, y = drawn(2 * seed), drawn(2 * seed + 1)
            product, total = function(x, y)
            torch.testing.assert_close(product, x.view(8, 16) @ y.view(8, 16).t())
            torch.testing.assert_close(total, x + y)
    assert len(called) == calls  # a quotient is not done again


def test_who_watches_tritons_launches_sees_them(host, device, monkeypatch):
    function = Repeated(host.sums)
    for seed in range(3):
        check(function, "sums", seed)
    jit, seen = triton.runtime.jit.JITFunction, []
    run = jit.run
    monkeypatch.setattr(jit, "run", lambda *args, **named: seen.append(run(*args, **named)))
    check(function, "sums", 3)
    assert len(seen) == 1


def test_recording_a_call_does_not_import_torchs_compiler():
    """Which takes a second."""
    program = """
import sys
import torch
from kagent.export.library._repeated import _Tape

x = torch.zeros(8)
with _Tape([x]) as tape:
    torch.empty_like(x.view(2, 4))
assert tape._seen == 2
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_hook_that_takes_a_launch_away_is_not_recorded(host, device, within):
    def maybe(x, y):
        out = torch.zeros(N)
        host.add[(1,)](x, y, out, N, BLOCK=N, num_warps=8)
        return out

    function = Repeated(within(maybe))
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_cache_hook = lambda **_: True
        for seed in range(4):
            assert function(drawn(2 * seed), drawn(2 * seed + 1)).eq(0).all()


STEPS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.booleans()), max_size=6)


@settings(max_examples=25, deadline=None)
@given(steps=STEPS)
def test_any_chain_of_launches_is_repeated_as_it_was(host, device, steps):
    def chain(x, y):
        vectors = [x, y]
        for first, second, viewed in steps:
            pair = [vectors[first % len(vectors)], vectors[second % len(vectors)]]
            pair = [v.view(2, -1).flatten() if viewed else v for v in pair]
            vectors.append(host.launch(*pair, torch.empty(N)))
        return tuple(vectors[2:])

    chain.__module__ = host.__name__
    function = Repeated(chain)
    for seed in range(4):
        x, y = drawn(2 * seed), drawn(2 * seed + 1)
        torch.testing.assert_close(function(x, y), chain(x, y), rtol=0, atol=0)


BY_RUNTIME = """
from .._runtime import cuda_kernel, struct

SOURCE = "// of this test"

def by_runtime(x, y):
    CALLS.append("by_runtime")
    out, sizes = torch.empty_like(x), [1]
    cuda_kernel("add", SOURCE).launch(sizes, (128,), x, y, out, 128, shared=64, pdl=True)
    sizes[0] = 99
    return out

def structured(x, y):
    CALLS.append("structured")
    ones, out = torch.full((128,), 1.0), torch.empty((2, 64))
    cuda_kernel("add_of", SOURCE).launch(1, 128, struct(x, struct(y, out.view(-1))))
    return launch(out.view(-1), ones, torch.empty(128)), None

def by_both(x, y):
    CALLS.append("by_both")
    ones, total = torch.full((128,), 1.0), torch.empty(128)
    cuda_kernel("add", SOURCE).launch(1, 128, launch(x, y, torch.empty(128)), ones, total, 128)
    return total

def keeps_by_runtime(x, y):
    CALLS.append("keeps_by_runtime")
    if not KEPT:
        KEPT.append(torch.empty(128))
    cuda_kernel("add", SOURCE).launch(1, 128, x, y, KEPT[0], 128)
    return KEPT[0].view(128)

KEPT_METHOD = cuda_kernel("add", SOURCE + " as well").launch

def by_kept_method(x, y):
    CALLS.append("by_kept_method")
    first, out = torch.zeros(128), torch.empty(128)
    KEPT_METHOD(1, 128, x, y, first, 128)
    cuda_kernel("add", SOURCE).launch(1, 128, first, y, out, 128)
    return out

def catches(x, y):
    CALLS.append("catches")
    out = torch.empty(128)
    for name in ("refused", "add"):
        try:
            cuda_kernel(name, SOURCE).launch(1, 128, x, y, out, 128)
        except ValueError:
            pass
    return out

def looks_by_runtime(x, y):
    CALLS.append("looks_by_runtime")
    out = torch.empty(128)
    cuda_kernel("add", SOURCE).launch(1, 128, x, y if x[0].item() > 0 else x, out, 128)
    return out
"""
EXPECTED |= {
    "by_runtime": lambda x, y: x + y,
    "structured": lambda x, y: (x + y + 1, None),
    "by_both": lambda x, y: x + y + 1,
    "keeps_by_runtime": lambda x, y: x + y,
    "by_kept_method": lambda x, y: x + y + y,
    "catches": lambda x, y: x + y,
    "looks_by_runtime": EXPECTED["looks"],
}


def add_instead(source, args, launching):
    """Compute what a kernel of the runtime would."""
    if source.name == "refused":
        raise ValueError("of this test")
    if source.name == "add_of":
        assert isinstance(args[0], StructArgument)
        args = [tensor for _, tensor in args[0].placed]
    first, second, out = (on_host(t.data_ptr()) for t in args[:3])
    out[:] = first + second
    launches.append((source.name, launching, None))
    return True


def ship_runtime(monkeypatch):
    """A library of this test has the runtime."""
    monkeypatch.setitem(sys.modules, "tests._runtime", runtime)
    for module in (cpp_kernels, cuda_kernels, runtime_launches):
        name = module.__name__.rpartition(".")[2]
        monkeypatch.setitem(sys.modules, f"tests._runtime.{name}", module)


@pytest.fixture
def by_runtime(host, device, tmp_path, monkeypatch):
    """The kernels' file, with more of them that the runtime launches."""
    ship_runtime(monkeypatch)
    monkeypatch.setattr(watch, "instead", add_instead)
    monkeypatch.setattr(watch, "any", True)
    return imported(tmp_path, "of_the_runtime", SOURCE + BY_RUNTIME)


@pytest.mark.parametrize("name", ["by_runtime", "structured", "by_both"])
def test_launches_of_the_runtime_are_repeated(by_runtime, name):
    function, launch = Repeated(getattr(by_runtime, name)), cuda_kernels.CudaKernel.launch
    for seed in range(5):
        x, y = drawn(2 * seed), drawn(2 * seed + 1)
        found, expected = function(x, y), EXPECTED[name](x, y)
        torch.testing.assert_close(found, expected)
    assert [name] * 2 == by_runtime.CALLS
    each = len(launches) // 5
    assert each == (1 if name == "by_runtime" else 2)
    assert len({(kernel, given) for kernel, given, _ in launches if kernel != "add"}) <= each
    assert cuda_kernels.CudaKernel.launch is launch
    assert (watch.instead, watch.any) == (add_instead, True)
    if name == "by_runtime":
        (launching,) = {given for _, given, _ in launches}
        assert (launching.grid, launching.block) == ((1, 1, 1), (128, 1, 1))
        assert (launching.shared, launching.pdl) == (64, True)


@pytest.mark.parametrize(
    "name", ["keeps_by_runtime", "looks_by_runtime", "by_kept_method", "catches"]
)
def test_launches_of_the_runtime_that_depend_on_more_are_not_repeated(by_runtime, name):
    function = Repeated(getattr(by_runtime, name))
    for seed in range(4):
        check(function, name, seed)
    assert [name] * 4 == by_runtime.CALLS


def test_tensor_maps_and_structures_are_made_anew_and_keep_no_memory(by_runtime, monkeypatch):
    seen, memory = [], []

    def take(source, args, launching):
        map_, structure, number, null, out = args
        (_, inner), (_, pointed) = structure.placed
        first, second, third = (on_host(t.data_ptr()) for t in (map_.tensor, inner.tensor, pointed))
        on_host(out.data_ptr())[:] = first + 2 * second + 4 * third
        tensors = (map_.tensor, inner.tensor, pointed, out)
        memory.extend(StorageWeakRef(t.untyped_storage()) for t in tensors)
        offsets = [offset for offset, _ in structure.placed]
        described_as = [described(m) for m in (map_, inner)]
        seen.append((described_as, structure.data, offsets, number, type(number), null, launching))
        return True

    def mapped(x, y):
        ones, out = torch.ones(N), torch.empty(N)
        structure = struct(np.int32(3), tensor_map(y.view(2, 64), (1, 64)), struct(ones))
        cuda_kernel("mapped", "//").launch(
            *([1, 2], 128, tensor_map(x.view(2, 64), (2, 32), swizzle=128, oob_nan=True)),
            *(structure, np.float32(0.5), None, out),
            cluster=[1, 2],
            cooperative=True,
        )
        return out

    monkeypatch.setattr(watch, "instead", take)
    mapped.__module__ = by_runtime.__name__
    function = Repeated(mapped)
    for seed in range(4):
        x, y = drawn(2 * seed), drawn(2 * seed + 1)
        torch.testing.assert_close(function(x, y), x + 2 * y + 4)
    del x, y
    assert function._repeat is not None
    assert all(one == seen[0] for one in seen)
    assert seen[0][-1].cluster == (1, 2, 1)
    assert seen[0][-1].cooperative
    gc.collect()
    assert all(m.expired() for m in memory)


def test_sizes_in_lists_are_repeated_as_tuples_whose_configurations_are_kept(by_runtime):
    def listed(x, y):
        out = torch.empty(N)
        cuda_kernel("add", "//").launch([1], [64, 2], x, y, out, 128, cluster=[1])
        return out

    listed.__module__ = by_runtime.__name__
    function, kernel, sizes = Repeated(listed), cuda_kernels.CudaKernel, []
    for seed in range(2):
        check(function, "sums", seed)
    launch = kernel.launch

    def seen(self, grid, block, *args, cluster):
        sizes.append((grid, block, cluster))
        launch(self, grid, block, *args, cluster=cluster)

    with mock.patch.object(kernel, "launch", seen):
        check(function, "sums", 2)
    assert sizes == [((1,), (64, 2), (1,))]


def test_arguments_that_the_runtime_writes_are_written_again(by_runtime):
    def writes(x, y):
        cuda_kernel("add", "//").launch(1, 128, x, y, x, 128)

    writes.__module__ = by_runtime.__name__
    function = Repeated(writes)
    for seed in range(4):
        x, y = drawn(2 * seed), drawn(2 * seed + 1)
        expected = x + y
        assert function(x, y) is None
        assert torch.equal(x, expected)
    assert function._repeat is not None


def test_launches_of_the_runtime_on_another_stream_or_thread_are_not_recorded(by_runtime, device):
    theirs = drawn(20), drawn(21)

    def add(x, y):
        out = torch.empty(N)
        cuda_kernel("add", "//").launch(1, 128, x, y, out, 128)
        return out

    def elsewhere(x, y):
        first = add(x, y)
        with mock.patch.object(device, "stream", 99):
            return add(first, y)

    def beside(x, y):
        other = threading.Thread(target=add, args=theirs)
        other.start()
        other.join()
        return add(add(x, y), y)

    add.__module__ = elsewhere.__module__ = beside.__module__ = by_runtime.__name__
    for host_function, repeated in ((elsewhere, False), (beside, True)):
        function = Repeated(host_function)
        launches.clear()
        for seed in range(4):
            check(function, "keeps", seed)
        assert (function._repeat is not None) == repeated
        assert len(launches) == (2 + 2 + 3 + 3 if repeated else 8)


@pytest.mark.parametrize(
    ("line", "call"),
    [
        ("from .. import _runtime as lang", "lang.cuda_kernel"),
        ("from .._runtime import cuda_kernel as made, struct", "made"),
        ("import tests._runtime as lang", "lang.cuda_kernel"),
    ],
)
def test_a_files_import_of_the_runtime_may_have_any_form(by_runtime, tmp_path, line, call):
    source = f"""
import torch

CALLS = []

def sums(x, y):
    {line}

    CALLS.append("sums")
    out = torch.empty(128)
    {call}("add", "//").launch(1, 128, x, y, out, 128)
    return out
"""
    module = imported(tmp_path, f"a_form_of_this_test_{len(line)}", source)
    function = Repeated(module.sums)
    for seed in range(4):
        check(function, "sums", seed)
    assert module.CALLS == ["sums"] * 2


@pytest.mark.parametrize(
    "line", ["from .._runtime.cuda_kernels import CudaKernel", "from .._runtime_b import x"]
)
def test_a_file_that_imports_more_than_the_runtimes_names_is_called_each_time(
    by_runtime, tmp_path, line
):
    source = SOURCE + BY_RUNTIME + f"\ndef never():\n    {line}\n"
    module = imported(tmp_path, f"more_of_the_runtime_{len(line)}", source)
    function = Repeated(module.by_runtime)
    for seed in range(4):
        check(function, "by_runtime", seed)
    assert module.CALLS == ["by_runtime"] * 4


def test_a_watch_of_the_runtime_that_others_have_taken_away_records_nothing(by_runtime):
    kernel = cuda_kernels.CudaKernel
    before = kernel.launch

    def theirs(self, *args, **options):
        return before(self, *args, **options)

    def sums(x, y):
        found = by_runtime.by_runtime(x, y)
        kernel.launch = theirs
        return found

    sums.__module__ = by_runtime.__name__
    function = Repeated(sums)
    try:
        for seed in range(4):
            check(function, "sums", seed)
        assert kernel.launch is theirs
        assert by_runtime.CALLS == ["by_runtime"] * 4
    finally:
        kernel.launch = before


def test_who_observes_launches_of_the_runtime_sees_repeated_ones(by_runtime, monkeypatch):
    function, seen = Repeated(by_runtime.by_runtime), []

    def see(source, *others):
        seen.append(source.name)
        return add_instead(source, *others)

    for seed in range(3):
        check(function, "by_runtime", seed)
    monkeypatch.setattr(watch, "instead", see)
    check(function, "by_runtime", 3)
    assert seen == ["add"]
    assert by_runtime.CALLS == ["by_runtime"] * 2


def test_a_watch_of_launches_that_another_thread_takes_away_is_asked_once():
    class Changing(LaunchWatcher):
        found = iter([lambda *_: True, None])
        instead = property(lambda self: next(self.found))

    changing = Changing()
    assert changing.took(None, (), Launching())
    assert not changing.took(None, (), Launching())


def test_a_launch_that_the_runtime_refuses_leaves_it_as_it_was(by_runtime, monkeypatch):
    def refuse(source, args, launching):
        raise ValueError("of this test")

    function, launch = Repeated(by_runtime.by_runtime), cuda_kernels.CudaKernel.launch
    check(function, "by_runtime", 0)
    with monkeypatch.context() as during:
        during.setattr(watch, "instead", refuse)
        with pytest.raises(ValueError, match="of this test"):
            function(drawn(2), drawn(3))
    assert cuda_kernels.CudaKernel.launch is launch
    for seed in range(4):
        check(function, "by_runtime", seed)
    assert by_runtime.CALLS == ["by_runtime"] * 3


BY_CPP = """
import numpy as np
import torch
from .._runtime import cpp_kernel

CALLS = []
SOURCE = '''
extern "C" void add(const float* x, const float* y, float* out, long n, float times) {
  for (long i = 0; i < n; ++i) out[i] = x[i] + times * y[i];
}
'''

def sums(x, y):
    CALLS.append("sums")
    twice = torch.empty_like(x)
    cpp_kernel("add", SOURCE)(x, y, twice, np.int64(128), 2.0)
    out = torch.empty((2, 64))
    cpp_kernel("add", SOURCE)(twice.view(2, 64), y, out, 128, -1.0)
    return out.view(128)

def by_thread(x, y):
    CALLS.append("by_thread")
    shares, out = torch.empty(torch.get_num_threads(), 128), torch.empty(128)
    for share in shares:
        cpp_kernel("add", SOURCE)(x, y, share, 128, 1.0)
    cpp_kernel("add", SOURCE)(shares[-1], y, out, 128, float(len(shares)))
    return out

def caught(x, y):
    CALLS.append("caught")
    out = torch.zeros(128)
    try:
        cpp_kernel("add", SOURCE)(x, y, out, "128", 1.0)
    except (TypeError, ValueError):
        cpp_kernel("add", SOURCE)(x, y, out, 128, 1.0)
    return out
"""


@pytest.fixture
def by_cpp(tmp_path, monkeypatch):
    """A file of C++ kernels, really compiled, that imports no Triton."""
    ship_runtime(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return imported(tmp_path, "of_cpp", BY_CPP)


def test_calls_of_cpp_kernels_are_repeated(by_cpp):
    function, call, seen = Repeated(by_cpp.sums), cpp_kernels.CppKernel.__call__, []
    for seed in range(5):
        check(function, "sums", seed)
    assert cpp_kernels.CppKernel.__call__ is call
    with runtime.observing(seen.append):
        check(function, "sums", 5)
    assert [o.source.name for o in seen] == ["add"] * 2
    assert by_cpp.CALLS == ["sums"] * 2


def test_tensors_that_begin_elsewhere_are_the_host_functions_on_a_cpu_as_well(by_cpp):
    function = Repeated(by_cpp.sums)
    for seed in range(3):
        check(function, "sums", seed)
    aligned, odd, y = drawn(6, offset=16), drawn(7, offset=1), drawn(8)  # to 64 bytes, and to 4
    torch.testing.assert_close(function(aligned, y), aligned + y)
    assert by_cpp.CALLS == ["sums"] * 2
    torch.testing.assert_close(function(aligned, odd), aligned + odd)
    assert by_cpp.CALLS == ["sums"] * 3


def test_memory_for_each_thread_is_as_much_as_there_are_threads(by_cpp):
    function, threads = Repeated(by_cpp.by_thread), torch.get_num_threads()
    try:
        for seed, count in enumerate([1, 1, 1, 3, 1, 2]):
            torch.set_num_threads(count)
            x, y = drawn(2 * seed), drawn(2 * seed + 1)
            torch.testing.assert_close(function(x, y), x + (1 + count) * y)
    finally:
        torch.set_num_threads(threads)
    assert by_cpp.CALLS == ["by_thread"] * 4


def test_a_call_that_catches_a_refused_cpp_kernel_is_not_repeated(by_cpp):
    function = Repeated(by_cpp.caught)
    for seed in range(4):
        check(function, "sums", seed)
    assert by_cpp.CALLS == ["caught"] * 4
