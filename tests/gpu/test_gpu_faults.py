"""Kernels that fault, hang or ask for too much end as verdicts; the device works afterwards."""

import os
import signal
import time

import pytest
import torch
from kagent_sandbox.data.plan import Fill, Pointer, Scalar, TorchOp
from kagent_sandbox.data.verdict import Status
from kagent_sandbox.device.interface import LaunchFailed
from kagent_sandbox.errors import DeviceError, DeviceWedged
from plans import Sketch, cubin, flat

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

SOURCE = """
extern "C" __global__ void illegal(int* y) { *(int*)((char*)y + (1ull << 45)) = 1; }
extern "C" __global__ void misaligned(int* y) { *(int*)((char*)y + 2) = 1; }
extern "C" __global__ void trap(int* y) { asm volatile("trap;"); }
extern "C" __global__ void hang(int* y) { while (*(volatile int*)y != 12345) {} }
extern "C" __global__ void fine(int* y) { y[threadIdx.x] = 7; }
extern "C" __global__ __launch_bounds__(128) void narrow(int* y) { y[threadIdx.x] = 7; }
extern "C" __global__ void recurse(int* y) {
  volatile char big[100000]; big[y[0] & 1023] = 1; y[1] = big[y[2] & 1023];
}
"""
LIMIT = {"limit_s": 20.0}


def sketch(name, grid=(1,), block=(32,), **attributes):
    s = Sketch()
    y = s.alloc(1 << 20)
    s.ops.append(Fill(flat(y, 1024, "int32"), 0))
    s.launch(cubin(SOURCE), name, grid, block, Pointer(y, 0), **attributes)
    return s, flat(y, 1024, "int32")


def prepare(launcher, name, **more):
    s, y = sketch(name, **more)
    launcher.load(s.binaries)
    launcher.prepare("k", s.plan(y), s.offsets())


def works(backend, arena):
    """A fresh launcher over the same arena computes."""
    launcher = backend.launcher(arena)
    try:
        s, y = sketch("fine")
        launcher.load(s.binaries)
        launcher.prepare("k", s.plan(y), s.offsets())
        launcher.run("k", **LIMIT)
        return arena.view(y, 0)[:32].eq(7).all().item()
    finally:
        launcher.close()


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("illegal", "ILLEGAL_ADDRESS"),
        ("misaligned", "MISALIGNED_ADDRESS"),
        ("trap", "LAUNCH_FAILED|ILLEGAL_INSTRUCTION"),
    ],
)
def test_a_fault_is_named_with_its_kernel(backend, arena, launcher, name, error):
    prepare(launcher, name)
    with pytest.raises(LaunchFailed, match=error) as caught:
        launcher.run("k", **LIMIT)
    assert caught.value.status is Status.GPU_FAULT
    assert name in str(caught.value)
    assert works(backend, arena)


def test_a_fault_while_timing(backend, arena, launcher):
    """The first run is fine, a later one faults: the input decides."""
    source = """
    extern "C" __global__ void choose(const int* x, int* y) {
      *(int*)((char*)y + ((unsigned long long)(unsigned)x[0] << 40)) = 1; }
    """
    s = Sketch()
    x = s.input(64)
    y = s.alloc(64)
    s.launch(cubin(source), "choose", (1,), (1,), Pointer(x, 0), Pointer(y, 0))
    places = s.offsets()
    arena.view(flat(x, 1, "int32"), places[x]).zero_()
    launcher.load(s.binaries)
    launcher.prepare("k", s.plan(flat(y, 1, "int32")), places)
    launcher.run("k", **LIMIT)
    arena.view(flat(x, 1, "int32"), places[x]).fill_(32)
    with pytest.raises(LaunchFailed, match="ILLEGAL_ADDRESS") as caught:
        launcher.samples(["k"], 5, limit_s=20.0)
    assert caught.value.status is Status.GPU_FAULT
    assert works(backend, arena)


def test_an_endless_kernel_is_killed_at_its_limit(backend, arena, launcher):
    prepare(launcher, "hang")
    start = time.monotonic()
    with pytest.raises(LaunchFailed) as caught:
        launcher.run("k", limit_s=1.0)
    elapsed = time.monotonic() - start
    assert caught.value.status is Status.TIMEOUT
    print(f"killed, and the device found healthy, after {elapsed:.2f} s")
    assert elapsed < 30
    assert works(backend, arena)


@pytest.mark.parametrize(
    ("name", "attributes", "text"),
    [
        ("fine", {"block": (2048,)}, "2048"),
        ("fine", {"block": (1, 1, 128)}, "1x1x128"),
        ("fine", {"grid": (1, 70_000)}, "70000"),
        ("fine", {"shared": 233_000}, "233000 bytes"),
        ("narrow", {"block": (256,)}, "256"),
        ("fine", {"cluster": (32, 1, 1), "grid": (32,)}, "at most 16"),
        ("fine", {"grid": (7,), "cluster": (2, 1, 1)}, "no multiple"),
        ("fine", {"grid": (100_000,), "cooperative": True}, "cooperative grid of 100000"),
    ],
)
def test_what_the_device_cannot_do_is_a_resource_limit(launcher, name, attributes, text):
    with pytest.raises(LaunchFailed, match=text) as caught:
        prepare(launcher, name, **attributes)
    assert caught.value.status is Status.RESOURCE_LIMIT
    prepare(launcher, "fine")  # nothing is lost: the same process goes on
    launcher.run("k", **LIMIT)


def test_parameters_that_do_not_match_the_binary(launcher):
    s = Sketch()
    y = s.alloc(1 << 20)
    s.launch(cubin(SOURCE), "fine", (1,), (32,), Pointer(y, 0), Scalar("i32", 1))
    launcher.load(s.binaries)
    with pytest.raises(LaunchFailed, match=r"\[8\] bytes, the plan passes \[8, 4\]") as caught:
        launcher.prepare("k", s.plan(flat(y, 4)), s.offsets())
    assert caught.value.status is Status.TAMPER


@pytest.mark.parametrize("code", [b"not a binary", b"\x7fELF" + bytes(500)])
def test_a_binary_that_does_not_load(launcher, code):
    s = Sketch()
    y = s.alloc(1 << 20)
    s.launch(code, "fine", (1,), (32,), Pointer(y, 0))
    launcher.load(s.binaries)
    with pytest.raises(LaunchFailed, match=r"does not load|CUDA_ERROR|died") as caught:
        launcher.prepare("k", s.plan(flat(y, 4)), s.offsets())
    assert caught.value.status is Status.RUNTIME_ERROR


def test_a_kernel_that_is_not_in_its_binary(launcher):
    s = Sketch()
    y = s.alloc(1 << 20)
    s.launch(cubin(SOURCE), "absent", (1,), (32,), Pointer(y, 0))
    launcher.load(s.binaries)
    with pytest.raises(LaunchFailed, match="absent"):
        launcher.prepare("k", s.plan(flat(y, 4)), s.offsets())


def test_a_torch_operation_that_fails(launcher):
    s = Sketch()
    y = s.alloc(1 << 20)
    a = flat(y, 4)
    s.ops.append(TorchOp("aten::mm.out", (a, a), {}, (flat(y, 4, offset=8),)))
    launcher.load({})
    launcher.prepare("k", s.plan(a), s.offsets())
    with pytest.raises(LaunchFailed) as caught:
        launcher.run("k", **LIMIT)
    assert caught.value.status is Status.RUNTIME_ERROR


def test_a_launcher_that_dies_by_itself(backend, arena, launcher):
    prepare(launcher, "fine")
    os.kill(launcher._connection.child.pid(), signal.SIGKILL)
    time.sleep(0.5)
    with pytest.raises(LaunchFailed, match=r"SIGKILL|died|gone|ended"):
        launcher.run("k", **LIMIT)
    assert works(backend, arena)


def test_before_anything_is_loaded_the_machine_is_to_blame(launcher):
    s, y = sketch("fine")
    with pytest.raises(DeviceError):
        launcher.prepare("k", s.plan(y), dict.fromkeys(s.offsets(), 1 << 60))


def test_a_healthy_device_is_healthy(backend):
    start = time.monotonic()
    assert backend.healthy()
    print(f"health check in a fresh process: {time.monotonic() - start:.2f} s")


def test_a_device_that_answers_wrongly_is_wedged(backend, arena, monkeypatch):
    from kagent_sandbox.device.cuda import backend as gpu_backend

    launcher = backend.launcher(arena)
    prepare(launcher, "trap")
    monkeypatch.setattr(gpu_backend, "_HEALTHY", [1.0, 2.0])
    with pytest.raises(DeviceWedged, match="no longer computes"):
        launcher.run("k", **LIMIT)
    monkeypatch.undo()
    assert backend.healthy()


def test_too_large_an_arena(backend):
    free, _ = torch.cuda.mem_get_info()
    with pytest.raises(DeviceError, match="OUT_OF_MEMORY"):
        backend.arena(2 * free + (8 << 30))
