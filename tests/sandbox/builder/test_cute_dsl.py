"""CuTe DSL without a device: its host functions become plans, and what does not add up is said."""

import ctypes
import importlib.util
import struct

import pytest
import torch
from kagent_sandbox.builder.binary.fatbin import cubin_at
from kagent_sandbox.builder.binary.inspect import InspectError
from kagent_sandbox.builder.trace.llvm_layout import launched_layouts, layout_of
from kagent_sandbox.builder.trace.recorder import Recorder
from kagent_sandbox.data.build import Built
from kagent_sandbox.data.language import CUTE, language_of_source
from kagent_sandbox.data.plan import Pointer, Struct
from kagent_sandbox.data.plan_json import plan_identity
from test_builder import case, request

installed = pytest.mark.skipif(
    importlib.util.find_spec("nvidia_cutlass_dsl") is None,
    reason="nvidia-cutlass-dsl is not installed",
)

DOUBLE = """
import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack


@cute.kernel
def _double(x: cute.Tensor, y: cute.Tensor):
    row, _, _ = cute.arch.block_idx()
    lane, _, _ = cute.arch.thread_idx()
    for c in cutlass.range(lane, x.shape[1], 128):
        y[row, c] = x[row, c] + x[row, c]


@cute.jit
def _launch(x: cute.Tensor, y: cute.Tensor):
    _double(x, y).launch(grid=(x.shape[0], 1, 1), block=(128, 1, 1), smem=1024)


def softmax(x):
    y = torch.empty_like(x)
    _launch(from_dlpack(x).mark_layout_dynamic(), from_dlpack(y[1:]).mark_layout_dynamic())
    return y
"""


@installed
def test_a_host_function_becomes_a_plan(builder):
    assert language_of_source(DOUBLE) == CUTE
    plans = []
    for _ in range(2):
        built = builder.build(request(DOUBLE, [case(5, 64)]))
        assert isinstance(built, Built), f"{built.status}: {built.message}"
        plans.append(built.plans[0, "5x64"])
    (launch,) = plans[0].launches
    assert (launch.grid, launch.block, launch.shared) == ((5, 1, 1), (128, 1, 1), 1024)
    x, y = launch.args
    sizes = struct.pack("<ii", 5, 64)
    assert x.placed == ((0, Pointer(0, 0)),)
    assert y.placed == ((0, Pointer(1, 4 * 64)),)
    assert x.data[8:16] == sizes
    (kernel,) = plans[0].kernels
    assert kernel.language == "cute"
    assert kernel.registers
    assert plan_identity(plans[0]) == plan_identity(plans[1])


@installed
def test_what_cannot_be_launched_is_refused(builder):
    large = DOUBLE.replace("smem=1024", "smem=300_000")
    assert "bytes of shared memory" in builder.build(request(large, [case(5, 64)])).message
    wrong = DOUBLE.replace("+ x[row, c]", "+ z[row, c]")
    assert "z" in builder.build(request(wrong, [case(5, 64)])).message


@pytest.mark.parametrize(
    ("text", "nbytes", "padding"),
    [
        ("i32", 4, set()),
        ("!llvm.ptr<1>", 8, set()),
        ("!llvm.struct<(ptr<1>, struct<(i32, i64)>)>", 24, {12, 13, 14, 15}),
        ("!llvm.struct<(i8, i32, array<3 x i16>)>", 16, {1, 2, 3, 14, 15}),
        ("!llvm.struct<packed (i8, i32)>", 5, set()),
        ("!llvm.array<2 x struct<(i32, i8)>>", 16, {5, 6, 7, 13, 14, 15}),
        ("!llvm.struct<()>", 0, set()),
    ],
)
def test_layouts_of_types(text, nbytes, padding):
    found = layout_of(text)
    assert (found.nbytes, found.padding) == (nbytes, padding)


@pytest.mark.parametrize("text", ["", "i", "struct<(i32>", "vector<4xi32>", "i32 i32", "array<x>"])
def test_what_is_no_type_is_refused(text):
    with pytest.raises(ValueError, match="LLVM"):
        layout_of(text)


def test_parameters_of_launches_are_found_in_a_module():
    module = """
    %79 = llvm.alloca %78 x !llvm.ptr : (i32) -> !llvm.ptr
    %81 = llvm.alloca %77 x !llvm.struct<(ptr<1>, struct<(i32, i64)>)> : (i32) -> !llvm.ptr
    %84 = llvm.alloca %77 x i32 {alignment = 4 : i64} : (i32) -> !llvm.ptr
    %88 = llvm.call @_cudaLaunchKernelEx(%76, %87, %79) : (!llvm.ptr) -> i32
    """
    ((first, second),) = launched_layouts(module)
    assert (first.nbytes, second.nbytes) == (24, 4)


def test_addresses_are_told_from_numbers():
    recorder = Recorder(torch.device("cuda", 0), "sm_90a")
    with recorder:
        x = recorder.input("x", torch.empty(8, device="meta"))
        assert recorder.pointer_of_address(x.data_ptr()) == Pointer(0, 0)
        assert recorder.pointer_of_address(x.data_ptr() + 14) == Pointer(0, 14)
    for number in (0, 7, 1 << 44, struct.unpack("<Q", struct.pack("<ii", 4096, 8192))[0]):
        assert recorder.pointer_of_address(number) is None


def test_the_cubin_of_a_fat_binary():
    elf = b"\x7fELF".ljust(32, b"\0") + struct.pack("<QQI6H", 0, 64, 0, 64, 0, 0, 64, 1, 0)
    elf = elf.ljust(128, b"\1")
    ptx = struct.pack("<HHIQ", 1, 0, 16, 8) + bytes(8)
    entry = struct.pack("<HHIQ", 2, 0, 16, len(elf)) + elf
    for data in (elf, _fat(ptx + entry)):
        kept = ctypes.create_string_buffer(data, len(data))
        assert cubin_at(ctypes.addressof(kept)) == elf
    for data, says in (
        (_fat(ptx), "without machine code"),
        (_fat(struct.pack("<HHIQ", 2, 0, 16, 8) + bytes(8)), "compressed"),
        (bytes(64), "begins with 00000000"),
    ):
        kept = ctypes.create_string_buffer(data, len(data))
        with pytest.raises(InspectError, match=says):
            cubin_at(ctypes.addressof(kept))


def _fat(entries):
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries


QUACK = """
from quack.softmax import softmax_fwd


def softmax(x):
    return softmax_fwd(x)
"""
FA4 = """
from flash_attn.cute import flash_attn_func


def softmax(x):
    q = x.view(1, -1, 1, x.shape[1])
    out = flash_attn_func(q, q, q, causal=True)
    return (out[0] if isinstance(out, tuple) else out).view(x.shape)
"""


@pytest.mark.parametrize(
    ("package", "source", "parameters"), [("quack", QUACK, 2), ("flash_attn", FA4, 27)]
)
def test_kernels_of_libraries_as_they_are_installed(builder, package, source, parameters):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    built = builder.build(request(source, [case(256, 128, "bfloat16")]))
    assert isinstance(built, Built), f"{built.status}: {built.message}"
    (launch,) = built.plans[0, "256x128"].launches
    assert len(launch.args) == parameters
    placed = [p for arg in launch.args if isinstance(arg, Struct) for _, p in arg.placed]
    assert {p.buffer for p in placed} >= {0, 1}
