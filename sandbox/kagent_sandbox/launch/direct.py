"""Run CUDA and C++ kernels on real tensors: a candidate's file, tried or shipped outside of the
sandbox.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence

import torch

from kagent_sandbox.build import kernels
from kagent_sandbox.build.arguments import PointerOf, kernel_arguments
from kagent_sandbox.plan import Arg, Launch, Null, Pointer, Scalar, TensorMap

_CTYPES: dict[str, type] = {
    "i1": ctypes.c_bool, "i8": ctypes.c_int8, "u8": ctypes.c_uint8, "i16": ctypes.c_int16,
    "u16": ctypes.c_uint16, "i32": ctypes.c_int32, "u32": ctypes.c_uint32, "i64": ctypes.c_int64,
    "u64": ctypes.c_uint64, "f32": ctypes.c_float, "f64": ctypes.c_double,
}  # fmt: skip


def run(
    source: kernels.Source,
    values: Sequence[object],
    launch: kernels.Launching,
    map_of: Callable[[object, PointerOf], TensorMap],
) -> None:
    """Compile if need be, and launch on the current stream or call.

    Raises:
        CompileError: The source was refused.
        TypeError: An argument does not fit its parameter, or a tensor is on another device.
        LaunchFailed: The launch asks for what the device cannot give.
    """
    tensors: list[torch.Tensor] = []
    kind = "cpu" if source.language == "cpp" else "cuda"

    def pointer_of(tensor: torch.Tensor) -> Pointer:
        if tensor.device.type != kind:
            raise TypeError(f"got a tensor on {tensor.device}; move it to {kind}")
        tensors.append(tensor)
        return Pointer(len(tensors) - 1, 0)

    kernel = kernels.compiled(source, "cpu" if kind == "cpu" else _gpu_target())
    args = kernel_arguments(
        source.name, values, kernel.parameters, pointer_of, lambda v: map_of(v, pointer_of)
    )
    addresses = [t.data_ptr() for t in tensors]
    if kind == "cpu":
        _function(kernel.binary, source.name)(*[_c_argument(a, addresses) for a in args])
        return
    device = tensors[0].device.index if tensors else torch.cuda.current_device()
    with torch.cuda.device(device):
        _launch(kernel, launch, args, addresses, device)


def _gpu_target() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def _launch(
    kernel: kernels.Compiled,
    launch: kernels.Launching,
    args: tuple[Arg, ...],
    addresses: Sequence[int],
    device: int,
) -> None:
    loaded = _kernels(device, torch.cuda.current_stream().cuda_stream)
    loaded.add({kernel.info.hash: kernel.binary})
    op = Launch(
        kernel=kernel.info.hash,
        grid=launch.grid,
        block=launch.block,
        args=args,
        shared=launch.shared,
        cluster=launch.cluster,
        cooperative=launch.cooperative,
        pdl=launch.pdl,
    )
    loaded.bind(op, kernel.info, addresses.__getitem__)()


@functools.cache
def _kernels(device: int, stream: int):  # type: ignore[no-untyped-def]  # noqa: ANN202
    from kagent_sandbox.launch.gpu_kernels import Kernels  # needs the driver

    return Kernels(device, stream)


@functools.cache
def _function(binary: bytes, name: str) -> Callable[..., object]:
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory(prefix="kagent_") as folder:
        path = Path(folder, "kernel.so")
        path.write_bytes(binary)
        function = getattr(ctypes.CDLL(str(path)), name)
    function.restype = None
    return function  # type: ignore[no-any-return]


def _c_argument(arg: Arg, addresses: Sequence[int]) -> object:
    if isinstance(arg, Pointer):
        return ctypes.c_void_p(addresses[arg.buffer])
    if isinstance(arg, Scalar):
        return _CTYPES[arg.type](arg.value)
    assert isinstance(arg, Null), "C++ kernels take no tensor maps"
    return ctypes.c_void_p(None)
