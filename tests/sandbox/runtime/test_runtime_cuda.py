"""CUDA kernels outside of a build, up to the driver's door: compiled by NVRTC, kept, packed.

The driver's structures are the real ones; its functions are written down.
"""

import contextlib
import ctypes
import importlib
import os
import struct
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kagent_sandbox.builder.binary.inspect import kernel_info
from kagent_sandbox.builder.compile import cuda
from kagent_sandbox.device.table import find_device
from kagent_sandbox.errors import DeviceError, ToolchainError
from kagent_sandbox.runtime import (
    CudaKernel,
    KernelUnavailable,
    LaunchError,
    Source,
    cuda_kernel,
    cuda_kernels,
    cuda_loading,
    headers,
    nvrtc,
    observing,
    tensor_map,
)
from kagent_sandbox.runtime import driver as driver_module
from kagent_sandbox.runtime import store as places
from kagent_sandbox.runtime.arguments import Parameter
from kagent_sandbox.runtime.cuda_parameters import cuda_parameters
from kagent_sandbox.runtime.cuda_values import KernelParameters, StructLayout
from kagent_sandbox.runtime.scalars import SCALAR_BYTES, scalar_bytes
from kagent_sandbox.runtime.structs import struct as struct_of

HERE = -1  # index of the device of tensors on the CPU
AXPY = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
template <int N> __global__ void axpy(const float* x, float* y, float a, long long n, bool add,
                                      __half h, __nv_bfloat16 b, double d) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = a * x[i] + N + (add ? float(h) : 0.0f)
      + float(b) + float(d);
}
"""
MAPPED = """
#include <cuda.h>
extern "C" __global__ void mapped(const __grid_constant__ CUtensorMap map, float* y, unsigned n) {
  y[0] = reinterpret_cast<const float*>(&map)[n];
}
"""


class Driver:
    """The real module's structures, and functions that write down what they are given."""

    def __init__(self):
        self._real = importlib.import_module("cuda.bindings.driver")
        self.sizes = ()
        self.loaded = []
        self.set = []
        self.launches = []
        self.fail = 0
        self.too_new = []
        self.contexts = set()

    def __getattr__(self, name):
        return getattr(self._real, name)

    def status(self, code=0):
        return self._real.CUresult(code)

    def cuCtxGetCurrent(self):
        return self.status(), int(threading.get_ident() in self.contexts)

    def cuDeviceGet(self, index):
        return self.status(), index

    def cuDevicePrimaryCtxRetain(self, device):
        return self.status(), 1

    def cuCtxSetCurrent(self, context):
        self.contexts.add(threading.get_ident())
        return (self.status(),)

    def cuThreadExchangeStreamCaptureMode(self, mode):
        return self.status(), mode

    def cuLibraryLoadData(self, code, *rest):
        self.loaded.append(code)
        if code in self.too_new:
            return self.status(200), None
        return self.status(), "library"

    def cuLibraryGetKernel(self, library, name):
        self.sizes = kernel_info(self.loaded[-1], name.decode(), "cuda").param_bytes
        return self.status(), name

    def cuKernelGetFunction(self, kernel):
        return self.status(), kernel

    def cuKernelGetParamInfo(self, kernel, index):
        if index < len(self.sizes):
            return self.status(), 0, self.sizes[index]
        return self.status(1), None, None

    def cuFuncSetAttribute(self, function, attribute, value):
        self.set.append((attribute.name.removeprefix("CU_FUNC_ATTRIBUTE_"), value))
        return (self.status(),)

    def cuTensorMapEncodeTiled(self, *values):
        self.map = ctypes.create_string_buffer(bytes(range(128)), 128)
        made = type("Map", (), {"getPtr": lambda _: ctypes.addressof(self.map)})()
        return self.status(), made

    def cuLaunchKernelEx(self, config, function, address, extra):
        if self.fail:
            code, self.fail = self.fail, 0
            return (self.status(code),)
        places_ = (ctypes.c_void_p * len(self.sizes)).from_address(address)
        values = [ctypes.string_at(p, n) for p, n in zip(places_, self.sizes, strict=True)]
        self.launches.append((config, function, values))
        return (self.status(),)

    def cuGetErrorString(self, status):
        return self.status(), b"as the driver says"


@pytest.fixture
def device(monkeypatch, tmp_path):
    """A device on which tensors of the CPU lie."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    stub = Driver()
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", stub)
    driver_module.driver.cache_clear()
    monkeypatch.setattr(cuda_kernels, "_device_of", lambda args: HERE)
    monkeypatch.setattr(cuda_kernels, "_current_device", lambda: HERE)
    monkeypatch.setattr(cuda_kernels, "_stream", lambda index: 7)
    monkeypatch.setattr(cuda_kernels, "target_of", lambda index: "sm_90a")
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: None)
    yield stub
    driver_module.driver.cache_clear()


def axpy():
    return CudaKernel(Source("cuda", "axpy<4>", AXPY))


def values(x, y):
    return x, y, 3.0, x.numel(), True, 0.5, 1.25, 2.0


def test_built_in_functions_are_loaded_with_their_compiler():
    """NVRTC 13.0, which torch's CUDA build pins, finds them only where the loader looks."""
    nvrtc.nvrtc_version()
    with open("/proc/self/maps") as maps:
        loaded = {line.split()[-1] for line in maps if "libnvrtc" in line}
    folders = {path.rsplit("/", 1)[0] for path in loaded}
    builtins = {f"{f}/{n}" for f in folders for n in os.listdir(f) if "builtins.so" in n}
    assert builtins <= loaded


def test_parameters_and_configuration_reach_the_driver(device):
    kernel = axpy()
    x, y = torch.ones(5), torch.empty(5)
    kernel.launch((6, 2), 256, *values(x, y), shared=1024)
    kernel.launch((6, 2), 256, *values(y, x), shared=1024)
    (config, function, got), (again, _, swapped) = device.launches
    assert again is config
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (6, 2, 1)
    assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (256, 1, 1)
    assert (config.sharedMemBytes, config.numAttrs, int(config.hStream)) == (1024, 0, 7)
    assert b"axpy" in function
    pointers = [struct.pack("<Q", t.data_ptr()) for t in (x, y)]
    assert got[:2] == pointers
    assert swapped[:2] == pointers[::-1]
    numbers = [("f32", 3.0), ("i64", 5), ("i1", 1), ("f16", 0.5), ("bf16", 1.25), ("f64", 2.0)]
    assert got[2:] == [scalar_bytes(t, v) for t, v in numbers]
    assert len(device.loaded) == 1


def test_rare_values_are_packed_as_well(device):
    rare = (None, None, np.float32(1e9), np.int64(-2), 1, 1e9, float("nan"), 2)
    axpy().launch([1], [1, 1], *rare)
    ((_, _, got),) = device.launches
    numbers = [("f32", 1e9), ("i64", -2), ("i1", 1), ("f16", 1e9), ("bf16", float("nan"))]
    assert got[:2] == [bytes(8)] * 2
    assert got[2:] == [scalar_bytes(t, v) for t, v in (*numbers, ("f64", 2.0))]


@pytest.mark.parametrize(
    ("index", "value", "says"),
    [
        (3, 2.5, r"argument 4 \(i64\): got 2.5, a float; pass int"),
        (3, 2**63, "does not fit i64"),
        (0, 4096, r"argument 1 \(a pointer\): got the number 4096; pass the tensor itself"),
        (2, torch.ones(()), "got a tensor; pass a number"),
        (2, "3", "got str; pass a tensor, a number, None, tensor_map"),
    ],
)
def test_what_does_not_fit_is_said(device, index, value, says):
    given_ = [None, *values(torch.ones(2), None)[1:]]
    given_[index] = value
    with pytest.raises(TypeError, match=says):
        axpy().launch(1, 1, *given_)
    with pytest.raises(TypeError, match="takes 8 arguments, got 7"):
        axpy().launch(1, 1, *given_[:7])
    assert not device.launches


def test_attributes_and_what_a_kernel_is_opted_into(device):
    kernel, given_ = axpy(), values(torch.ones(2), None)
    for shared in (0, 100_000, 60_000, 200_000):
        kernel.launch(32, 128, *given_, shared=shared)
    kernel.launch(32, 128, *given_, cluster=16, cooperative=True, pdl=True)
    kernel.launch(32, 128, *given_, cluster=16, cooperative=True, pdl=True)
    assert device.set == [
        ("MAX_DYNAMIC_SHARED_SIZE_BYTES", 100_000),
        ("MAX_DYNAMIC_SHARED_SIZE_BYTES", 200_000),
        ("NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1),
    ]
    config = device.launches[-1][0]
    cluster, cooperative, pdl = config.attrs
    size = cluster.value.clusterDim
    assert (size.x, size.y, size.z) == (16, 1, 1)
    assert cooperative.value.cooperative == 1
    assert pdl.value.programmaticStreamSerializationAllowed == 1


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("grid", [0, (1, 1, 1, 1), (2, -1)])
def test_sizes_are_checked(grid):
    with pytest.raises(ValueError, match="expected one to three positive sizes"):
        axpy().launch(grid, 1)


def test_a_launch_that_the_driver_refuses(device):
    kernel, given_ = axpy(), values(torch.ones(2), None)
    kernel.launch(1, 1, *given_)
    device.fail = 1
    with pytest.raises(
        LaunchError, match=r"INVALID_VALUE \(as the driver says\) launching axpy<4>"
    ):
        kernel.launch(1, 4096, *given_)
    device.fail = 201  # no context: entered, and tried again
    kernel.launch(1, 1, *given_)
    assert len(device.launches) == 2


def test_each_thread_has_memory_and_a_context_of_its_own(device):
    kernel, x = axpy(), torch.ones(2)
    launched = threading.Barrier(4)

    def work(number):
        for _ in range(200):
            kernel.launch(1, 1, x, None, float(number), number, True, 0.5, 1.25, 2.0)
        launched.wait(30)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(device.launches) == 800
    for _, _, got in device.launches:
        assert struct.unpack("<f", got[2])[0] == struct.unpack("<q", got[3])[0]
    assert len(device.loaded) == 1


def test_tensor_maps_are_encoded_once_for_each_place(device):
    kernel = CudaKernel(Source("cuda", "mapped", MAPPED))
    x, y = torch.ones(64, 64), torch.empty(1)
    for _ in range(2):
        kernel.launch(1, 1, tensor_map(x, (16, 32)), y, 3)
    for _, _, got in device.launches:
        assert got == [bytes(range(128)), struct.pack("<Q", y.data_ptr()), struct.pack("<I", 3)]
    with pytest.raises(TypeError, match="got a tensor on cpu; move it to cuda"):
        kernel.launch(1, 1, tensor_map(x.flatten()[1:], (16,)), y, 3)  # at no multiple of 16 bytes


STRUCTS = """
#include <cuda.h>
struct Problem { float* y; CUtensorMap map; int n; float scale; };
extern "C" __global__ void k(const __grid_constant__ Problem problem, float* x) {
  problem.y[0] = x[0] * problem.scale * problem.n + (problem.map.opaque[0] != 0);
}
"""


def test_structures_are_passed_by_value(device, monkeypatch):
    kernel = CudaKernel(Source("cuda", "k", STRUCTS))
    x, y = torch.zeros(16, 64), torch.zeros(1)
    with pytest.raises(TypeError, match="got a tensor on cpu"):
        kernel.launch(1, 1, struct_of(y, bytes(248)), x)
    monkeypatch.setattr(cuda_kernels._LoadedModule, "_check", lambda self, tensor: None)
    problem = struct_of(y, tensor_map(x, (8, 32)), np.int32(7), np.float32(0.5))
    assert len(problem.data) == 256
    assert [offset for offset, _ in problem.placed] == [0, 64]
    kernel.launch(1, 1, problem, x)
    ((_, _, (got, _)),) = device.launches
    assert got[:8] == struct.pack("<Q", y.data_ptr())
    assert got[64:192] == bytes(range(128))
    assert got[192:200] == struct.pack("<if", 7, 0.5)
    with pytest.raises(TypeError, match=r"\(of 256 bytes\): got a structure of 8 bytes"):
        kernel.launch(1, 1, struct_of(y), x)
    with pytest.raises(TypeError, match=r"the parameter is a structure: pass struct"):
        kernel.launch(1, 1, 3, x)


def test_fields_of_a_structure_have_sizes():
    inner = struct_of(np.int8(1), np.int64(2))
    assert inner.data == b"\x01" + bytes(7) + b"\x02" + bytes(7)
    assert struct_of(np.float16(0), inner, b"abc", None).data[24:27] == b"abc"
    for wrong in (3, 0.5, "text", [1]):
        with pytest.raises(TypeError, match="field 2 of a structure is"):
            struct_of(None, wrong)
    with pytest.raises(ValueError, match="expected 1 to 32764"):
        struct_of()


def test_cubins_are_kept_and_shipped(device, tmp_path, monkeypatch):
    axpy().launch(1, 1, *values(torch.ones(2), None))
    (kept,) = (tmp_path / "kagent-kernels").iterdir()
    source = axpy().source
    assert kept.name.startswith(source.key("sm_90a"))
    cubin, symbol = places.unpacked_cubin(kept.read_bytes())
    assert kernel_info(cubin, symbol, "cuda").name == symbol
    monkeypatch.setattr(cuda_loading, "compile_cuda", None)  # not needed any more
    axpy().launch(1, 1, *values(torch.ones(2), None))
    shipped = tmp_path / "cubins"
    shipped.mkdir()
    kept.rename(shipped / f"{source.key('sm_90a')}.cubin")
    monkeypatch.setattr(places, "CUBINS", shipped)
    monkeypatch.setattr(cuda_loading, "compiler_version", None)  # nor is NVRTC
    axpy().launch(1, 1, *values(torch.ones(2), None))
    assert device.loaded == [cubin] * 3


def test_a_shipped_cubin_that_the_driver_refuses_is_compiled_here(device, tmp_path, monkeypatch):
    monkeypatch.setattr(places, "CUBINS", tmp_path)
    source = axpy().source
    shipped = tmp_path / f"{source.key('sm_90a')}.cubin"
    shipped.write_bytes(places.packed_cubin(b"of a later toolkit", "axpy"))
    device.too_new.append(b"of a later toolkit")
    axpy().launch(1, 1, *values(torch.ones(2), None))
    assert len(device.loaded) == 2
    assert len(device.launches) == 1
    device.too_new.append(device.loaded[1])
    with pytest.raises(LaunchError, match=r"INVALID_IMAGE .* loading axpy<4>"):
        axpy().launch(1, 1, *values(torch.ones(2), None))


def test_observers_see_what_is_launched(device):
    kernel, shown = axpy(), []
    with observing(shown.append):
        kernel.launch((3, 1), 64, None, None, 1, 2, False, 0, 0, 0)
    (launch,) = shown
    assert launch.launching.grid == (3, 1, 1)
    assert launch.arguments[0] is None
    assert [a.type for a in launch.arguments[2:]] == ["f32", "i64", "i1", "f16", "bf16", "f64"]
    assert (launch.target, launch.binary) == ("sm_90a", device.loaded[0])
    assert len(device.launches) == 1


def test_without_a_gpu_or_cuda_bindings_it_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(KernelUnavailable, match="need an NVIDIA GPU"):
        cuda_kernel("k", 'extern "C" __global__ void k(float* x) {}').launch(1, 1, torch.ones(1))
    driver_module.driver.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(KernelUnavailable, match="pip install cuda-bindings"):
        driver_module.driver()
    driver_module.driver.cache_clear()


@pytest.fixture
def no_toolkit(monkeypatch):
    """A machine without NVIDIA's wheels and without a toolkit of its own."""
    caches = (nvrtc._nvrtc, headers.include_dirs)
    for each in caches:
        each.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    monkeypatch.setattr(headers, "_candidates", lambda: iter(()))
    yield
    for each in caches:
        each.cache_clear()


def test_without_the_toolkit_a_library_names_packages_and_kagent_its_extra(no_toolkit):
    with pytest.raises(KernelUnavailable, match=r"here .*: install it with `pip install cuda"):
        nvrtc.compile_cuda("k", "", "sm_90a")
    with pytest.raises(KernelUnavailable, match="the headers of the CUDA toolkit are neither"):
        headers.include_dirs()
    for look in (cuda.look_for_toolkit, lambda: cuda.compile_cuda("k", "", "sm_90a")):
        with pytest.raises(ToolchainError) as error:
            look()
        assert str(error.value).endswith(": pip install 'kagent[cuda]'")
        assert "\n" not in str(error.value)


def test_without_bindings_the_device_says_what_to_install(no_toolkit):
    entry = find_device("gpu")
    opens = (entry.facts, lambda i: entry.open(i, products=True), entry.baselines)
    for each in opens:
        with pytest.raises(DeviceError, match=r"no GPU can be used .*: pip install 'kagent\[cuda"):
            each(0)
    assert entry.timing_version() >= 1  # stored figures can be read without


NUMBERS = st.one_of(
    st.booleans(), st.integers(-(2**65), 2**65), st.floats(width=64), st.floats(width=16)
)


@given(st.lists(st.tuples(st.sampled_from(sorted(SCALAR_BYTES)), NUMBERS), min_size=1, max_size=6))
def test_fast_packing_agrees_with_the_slow_one(cases):
    """What the converters take is what a scalar's bytes are; what they refuse is for the other."""
    for type_, value in cases:
        layout = StructLayout([Parameter(8), Parameter(SCALAR_BYTES[type_], type_, False)], HERE)
        memory = KernelParameters(layout)
        try:
            memory.pack([c(v) for c, v in zip(layout.converters, (None, value), strict=True)])
        except (TypeError, OverflowError, struct.error):
            continue
        pointers = (ctypes.c_void_p * 2).from_address(memory.address)
        assert ctypes.string_at(pointers[1], SCALAR_BYTES[type_]) == scalar_bytes(type_, value)


def test_parameters_of_unknown_type_take_numbers_by_their_size():
    parameters = cuda_parameters("k", "__global__ void k(T a, T b, T c) {}", [8, 4, 2])
    layout = StructLayout(parameters, HERE)
    x = torch.ones(1)
    converted = [c(v) for c, v in zip(layout.converters, (x, 1.5, -1), strict=True)]
    assert converted == [x.data_ptr(), *struct.unpack("<IH", struct.pack("<fh", 1.5, -1))]
    assert layout.converters[0](-1) == 2**64 - 1
