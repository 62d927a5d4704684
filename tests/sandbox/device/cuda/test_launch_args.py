"""Packing of kernel parameters, launch attributes and limits: all that needs no GPU."""

import ctypes
import math
import struct

import cuda.bindings.driver as driver
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kagent_sandbox.data.plan import SCALAR_BYTES, KernelInfo, Launch, Null, Pointer, Struct
from kagent_sandbox.data.verdict import Status
from kagent_sandbox.device.cuda.driver import GpuError, call
from kagent_sandbox.device.cuda.launch_args import (
    DeviceLimits,
    KernelLimits,
    ParameterBlock,
    argument,
    launch_config,
    over_limit,
)
from kagent_sandbox.device.detect import target_name
from kagent_sandbox.errors import DeviceError
from kagent_sandbox.runtime.scalars import scalar_bytes

H100 = DeviceLimits(
    threads_per_block=1024,
    block=(1024, 1024, 64),
    grid=(2**31 - 1, 65535, 65535),
    shared_bytes=232_448,
    multiprocessors=132,
    clusters=True,
)
LIGHT = KernelLimits(threads_per_block=1024, static_shared_bytes=0, registers=32)


def launch(**changes):
    fields = {"grid": (8, 1, 1), "block": (128, 1, 1), "args": (), **changes}
    return Launch(kernel="0" * 64, **fields)


def info(language="cuda"):
    return KernelInfo("0" * 64, language, "k", ())


# -- parameters ----------------------------------------------------------------------------------


def test_addresses_are_written_into_a_structure():
    arg = Struct(b"\x07" * 8 + bytes(8) + b"\x09" * 4, ((8, Pointer(1, 16)),))
    data = argument(arg, lambda buffer: 0x1000 * buffer)
    assert data == b"\x07" * 8 + struct.pack("<Q", 0x1010) + b"\x09" * 4


@pytest.mark.parametrize("kind", sorted(SCALAR_BYTES))
@pytest.mark.parametrize("value", [0, 1])
def test_scalars_have_their_size_and_value(kind, value):
    data = scalar_bytes(kind, value)
    assert len(data) == SCALAR_BYTES[kind]
    if kind[0] in "iu":
        assert int.from_bytes(data, "little") == value


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("i32", -2, "<i"),
        ("u32", 2**32 - 1, "<I"),
        ("i64", -(2**63), "<q"),
        ("u64", 2**64 - 1, "<Q"),
        ("f64", 0.1, "<d"),
        ("f16", 0.5, "<e"),
    ],
)
def test_scalars_are_little_endian(kind, value, expected):
    assert scalar_bytes(kind, value) == struct.pack(expected, value)


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_floats_are_rounded_like_torch_rounds(value):
    for kind, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16), ("f16", torch.float16)):
        data = bytearray(scalar_bytes(kind, value))
        got = torch.frombuffer(data, dtype=dtype).double()
        # torch rounds a Python number to float32 first, as a kernel's float parameter is
        via = torch.tensor(value, dtype=torch.float64)
        expected = (via if kind != "bf16" else via.float()).to(dtype).double()
        assert got.equal(expected.view(1)) or (math.isnan(value) and got.isnan().all())


@given(st.lists(st.binary(min_size=1, max_size=200), max_size=20))
def test_the_driver_finds_each_parameter_aligned(parameters):
    packed = ParameterBlock(parameters)
    pointers = (ctypes.c_void_p * len(parameters)).from_address(packed.address)
    for pointer, parameter in zip(pointers, parameters, strict=True):
        assert pointer % 64 == 0
        assert ctypes.string_at(pointer, len(parameter)) == parameter


def test_pointers_are_addresses_of_buffers():
    addresses = {3: 0x7F00_0000_0000}
    assert argument(Pointer(3, 512), addresses.__getitem__) == struct.pack("<Q", 0x7F00_0000_0200)
    assert argument(Null(), addresses.__getitem__) == bytes(8)


# -- launch attributes ---------------------------------------------------------------------------


def attributes(config):
    return {a.id.name.removeprefix("CU_LAUNCH_ATTRIBUTE_"): a.value for a in config.attrs or ()}


def test_a_plain_launch_has_no_attributes():
    config = launch_config(launch(grid=(3, 4, 5), block=(6, 7, 1), shared=99), info(), 1234)
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (3, 4, 5)
    assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (6, 7, 1)
    assert config.sharedMemBytes == 99
    assert int(config.hStream) == 1234
    assert config.numAttrs == 0


def test_all_attributes_are_set():
    op = launch(cluster=(4, 2, 1), cooperative=True, pdl=True)
    config = launch_config(op, info(), 0)
    found = attributes(config)
    assert config.numAttrs == 3
    assert set(found) == {
        "CLUSTER_DIMENSION",
        "COOPERATIVE",
        "PROGRAMMATIC_STREAM_SERIALIZATION",
    }
    size = found["CLUSTER_DIMENSION"].clusterDim
    assert (size.x, size.y, size.z) == (4, 2, 1)
    assert found["COOPERATIVE"].cooperative == 1
    assert found["PROGRAMMATIC_STREAM_SERIALIZATION"].programmaticStreamSerializationAllowed == 1


def test_clusters_of_triton_are_spread_as_its_own_launcher_does():
    config = launch_config(launch(cluster=(2, 1, 1)), info("triton"), 0)
    policy = attributes(config)["CLUSTER_SCHEDULING_POLICY_PREFERENCE"]
    spread = driver.CUclusterSchedulingPolicy.CU_CLUSTER_SCHEDULING_POLICY_SPREAD
    assert policy.clusterSchedulingPolicyPreference == spread


# -- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "kernel", "text"),
    [
        (launch(block=(2048, 1, 1)), LIGHT, "2048, the device allows 1024"),
        (launch(block=(1, 1, 128)), LIGHT, "1024x1024x64"),
        (launch(block=(1024, 1, 1)), KernelLimits(512, 0, 128), "128 registers .* can have 512"),
        (launch(grid=(1, 70_000, 1)), LIGHT, "grid of 1x70000x1"),
        (launch(shared=232_449), LIGHT, "asks for 232449 bytes"),
        (launch(shared=200_000), KernelLimits(1024, 40_000, 32), "asks for 240000 bytes"),
        (launch(cluster=(32, 1, 1), grid=(32, 1, 1)), LIGHT, "at most 16"),
        (launch(cluster=(3, 1, 1)), LIGHT, "no multiple"),
    ],
)
def test_what_is_over_a_limit_is_named(op, kernel, text):
    import re

    assert re.search(text, over_limit(op, "k", kernel, H100) or "")


@pytest.mark.parametrize(
    "op",
    [
        launch(),
        launch(block=(1024, 1, 1), shared=232_448),
        launch(grid=(2**31 - 1, 65535, 65535)),
        launch(cluster=(8, 1, 1)),
        launch(cluster=(16, 1, 1), grid=(32, 1, 1)),
    ],
)
def test_what_fits_is_let_through(op):
    assert over_limit(op, "k", LIGHT, H100) is None


def test_devices_before_hopper_have_no_clusters():
    import dataclasses

    old = dataclasses.replace(H100, clusters=False)
    assert "no clusters" in (over_limit(launch(cluster=(2, 1, 1)), "k", LIGHT, old) or "")


# -- errors --------------------------------------------------------------------------------------


def failing(name):
    return lambda: (getattr(driver.CUresult, name),)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_without_a_driver_the_machine_is_to_blame():
    with pytest.raises(DeviceError, match="driver"):
        call(driver.cuInit, 0, doing="starting")


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("CUDA_ERROR_ILLEGAL_ADDRESS", Status.GPU_FAULT),
        ("CUDA_ERROR_LAUNCH_FAILED", Status.GPU_FAULT),
        ("CUDA_ERROR_ECC_UNCORRECTABLE", Status.GPU_FAULT),
        ("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", Status.RESOURCE_LIMIT),
        ("CUDA_ERROR_INVALID_VALUE", Status.RUNTIME_ERROR),
    ],
)
def test_errors_say_what_they_mean_for_the_candidate(name, status):
    error = GpuError(name, "text", "running k")
    assert error.status is status
    assert str(error) == f"{name} (text) running k"


def test_results_come_without_the_status():
    ok = driver.CUresult.CUDA_SUCCESS
    assert call(lambda: (ok,), doing="x") == ()
    assert call(lambda: (ok, 1), doing="x") == 1
    assert call(lambda: (ok, 1, 2), doing="x") == (1, 2)


def test_hopper_and_later_compile_for_their_own_instructions():
    assert [target_name(8, 0), target_name(9, 0), target_name(10, 0)] == [
        "sm_80",
        "sm_90a",
        "sm_100a",
    ]
