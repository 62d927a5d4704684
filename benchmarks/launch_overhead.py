"""Cost of a launch from Python in µs per call, beside the least that there is.

A C++ kernel of nothing against the bare ctypes call; on a GPU a CUDA kernel of nothing against
cuda-core's own launch, and against Triton's launcher on the same parameters. Host functions ask for
their kernel by name and source on every call, so that is measured as well.

python benchmarks/launch_overhead.py
"""

import ctypes
import importlib
import tempfile
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from call_time import us_per_call
from kagent_sandbox.runtime import Observed, cpp_kernel, cuda_kernel, observing

BATCHES = 100
PADDING = "// " + "as long as a real source " * 200 + "\n"
CPP = (
    PADDING
    + """
#include <cstdint>
extern "C" void nothing(const float* x, float* y, int64_t rows, int64_t columns, int64_t stride,
                        float scale) {}
"""
)
CUDA = (
    PADDING
    + """
extern "C" __global__ void nothing(const float* x, float* y, long long rows, long long columns,
                                   long long stride, float scale) {}
"""
)
DEFINES = {"ELEMENTS": 32, "THREADS": 256, "SCHEDULE": "static"}


def us(call: Callable[[], object], settle: Callable[[], object] = lambda: None) -> float:
    (found,) = us_per_call(call, settle=settle, blocks=BATCHES)
    return found


def row(name: str, us: float, least: float) -> None:
    print(f"{name:58} {us:8.2f} {us - least:+8.2f}")


def on_the_cpu() -> None:
    x = torch.ones(4, 8)
    y = torch.empty_like(x)
    kernel = cpp_kernel("nothing", CPP, defines=DEFINES)
    seen: list[Observed] = []
    with observing(seen.append):
        kernel(x, y, 4, 8, 8, 0.5)
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(seen[0].binary)
        file.flush()
        bare = ctypes.CDLL(file.name).nothing
    bare.restype = None
    bare.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 3 + [ctypes.c_float]
    a, b = x.data_ptr(), y.data_ptr()

    def asked() -> None:
        cpp_kernel("nothing", CPP, defines=DEFINES)(x, y, x.shape[0], x.shape[1], x.stride(0), 0.5)

    least = us(lambda: bare(a, b, 4, 8, 8, 0.5))
    row("C++: bare ctypes call", least, least)
    row("C++: kernel(...)", us(lambda: kernel(x, y, 4, 8, 8, 0.5)), least)
    row("C++: cpp_kernel(name, SOURCE, defines=...)(...)", us(asked), least)


@triton.jit
def _nothing(x_ptr, y_ptr, rows, columns, stride, scale, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202, ARG001
    if rows < 0:
        tl.store(y_ptr + tl.arange(0, BLOCK), scale)


class _TorchStream:
    """torch's current stream, as cuda-core takes it."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, torch.cuda.current_stream().cuda_stream


def on_the_gpu() -> None:
    x = torch.ones(4, 8, device="cuda")
    y = torch.empty_like(x)
    kernel = cuda_kernel("nothing", CUDA, defines=DEFINES)
    seen: list[Observed] = []
    with observing(seen.append):
        kernel.launch((4,), (256,), x, y, 4, 8, 8, 0.5, shared=1024)
    core = importlib.import_module("cuda.core")
    device = core.Device(torch.cuda.current_device())
    device.set_current()
    stream = device.create_stream(_TorchStream())
    loaded = core.ObjectCode.from_cubin(seen[0].binary).get_kernel(seen[0].symbol)
    config = core.LaunchConfig(grid=4, block=256, shmem_size=1024)
    a, b, scale = x.data_ptr(), y.data_ptr(), ctypes.c_float(0.5)
    settle = torch.cuda.synchronize

    def asked() -> None:
        cuda_kernel("nothing", CUDA, defines=DEFINES).launch(
            (x.shape[0],), (256,), x, y, x.shape[0], x.shape[1], x.stride(0), 0.5, shared=1024
        )

    def own() -> None:
        kernel.launch((4,), (256,), x, y, 4, 8, 8, 0.5, shared=1024)

    least = us(lambda: core.launch(stream, config, loaded, a, b, 4, 8, 8, scale), settle)
    row("CUDA: cuda-core's launch, everything prepared", least, least)
    row("CUDA: kernel.launch(...)", us(own, settle), least)
    row(
        "CUDA: cuda_kernel(name, SOURCE, defines=...).launch(...)",
        us(asked, settle),
        least,
    )
    triton_us = us(lambda: _nothing[(4,)](x, y, 4, 8, 8, 0.5, BLOCK=32), settle)
    row("Triton: kernel[grid](...)", triton_us, least)


if __name__ == "__main__":
    print(f"{'':58} {'µs':>8} {'more':>8}")
    on_the_cpu()
    if torch.cuda.is_available():
        on_the_gpu()
    else:
        print("CUDA: not measured: torch finds no GPU here")
