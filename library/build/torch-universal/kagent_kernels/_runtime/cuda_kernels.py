"""CUDA kernels on tensors in device memory.

A launch costs a few dictionary look-ups and conversions beside the driver's own work: what depends
on the device is made once, the launch configuration once for each thread, stream and shape, and
only the parameters are written anew.
"""

from __future__ import annotations

import contextlib
import math
import struct
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .arguments import converted
from .cuda_loading import load
from .cuda_parameters import cuda_parameters
from .cuda_values import KernelParameters, StructLayout, launch_attributes, launch_config
from .driver import call, driver, failure, make_current
from .errors import KernelUnavailable
from .launches import Launching, Observed, Size, watch
from .made_once import made_once
from .source import Source
from .structs import StructArgument
from .tensor_maps import TensorMapArgument

_PORTABLE_CLUSTER = 8
_MOST_CONFIGS = 1024
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: a thread that has not used the device
_loading = threading.RLock()
_Key = tuple[int, Size, Size, int, Size | None, bool, bool]


def cuda_kernel(
    name: str,
    source: str,
    *,
    options: Sequence[str] = (),
    defines: Mapping[str, object] | None = None,
) -> CudaKernel:
    """A `__global__` function of a CUDA C++ source.

    Args:
        name: Its name, plain or `namespace::name`, or an instance of a template: `rows<128,
            float>`.
        source: CUDA C++. Headers of the toolkit (cuda_bf16.h, mma.h, cooperative_groups.h,
            cuda/barrier, cuda.h for CUtensorMap) can be included; host code cannot.
        options: Options of NVRTC that change code, for example `--use_fast_math`.
        defines: Macros: names to numbers or text.

    Returns:
        The kernel. `CudaKernel.launch` launches it; nothing is compiled before.

    Example:
        Double every element of a tensor on a GPU, 256 threads a block:

            import torch

            double_all = cuda_kernel("double_all", '''
                __global__ void double_all(const float* x, float* y, long long n) {
                    long long i = blockIdx.x * 256ll + threadIdx.x;
                    if (i < n) y[i] = 2 * x[i];
                }
            ''')

            x = torch.randn(4, 1000, device="cuda")  # float32, contiguous
            y = torch.empty_like(x)
            double_all.launch((x.numel() + 255) // 256, 256, x, y, x.numel())
            assert torch.equal(y, 2 * x)
    """
    kernel: CudaKernel = made_once(CudaKernel, "cuda", name, source, options, defines)
    return kernel


class CudaKernel:
    """A CUDA kernel, compiled when first launched on a device if no cubin came for it."""

    __slots__ = ("_devices", "source")

    def __init__(self, source: Source) -> None:
        self.source = source
        self._devices: dict[int, _LoadedModule] = {}

    def launch(
        self,
        grid: Size,
        block: Size,
        *args: object,
        shared: int = 0,
        cluster: Size | None = None,
        cooperative: bool = False,
        pdl: bool = False,
    ) -> None:
        """Launch on the current stream of the first tensor's device.

        Args:
            grid: Blocks per axis, up to three (all blocks, clusters or not).
            block: Threads per axis, up to three.
            args: Tensors (their first element's address), numbers by the type of the parameter,
                numpy scalars (explicit types), None (a null pointer), `tensor_map(...)`,
                `struct(...)`.
            shared: Dynamic shared memory of a block in bytes.
            cluster: Blocks of a cluster per axis (sm_90 and later).
            cooperative: All blocks run at once and may wait for each other.
            pdl: Start before the kernel ahead has ended (programmatic dependent launch, sm_90 and
                later).

        Raises:
            TypeError: An argument does not fit its parameter, or a tensor is on another device.
            ValueError: A size is not positive.
            CompileError: The source was refused.
            KernelUnavailable: There is no GPU, driver or compiler, and no cubin for the device.
            LaunchError: The driver refuses the launch.
        """
        if watch.any:
            launching = Launching.of(grid, block, shared, cluster, cooperative, pdl)
            if watch.took(self.source, args, launching):
                return
        index = _device_of(args)
        loaded = self._devices.get(index)
        if loaded is None:
            loaded = self._load(index)
        if watch.observer is not None:
            loaded.show(self.source, args, launching)
        if index == _current_device():
            loaded.launch(grid, block, args, shared, cluster, cooperative, pdl)
        else:
            with torch.cuda.device(index):
                loaded.launch(grid, block, args, shared, cluster, cooperative, pdl)

    def _load(self, index: int) -> _LoadedModule:
        with _loading:
            if index not in self._devices:
                with torch.cuda.device(index):
                    self._devices[index] = _LoadedModule(self.source, index)
            return self._devices[index]


def _device_of(args: Sequence[object]) -> int:
    """Index of the device of the first tensor that is on one; else of the current device.

    Raises:
        KernelUnavailable: There is no GPU.
    """
    structs = [v for value in args if isinstance(value, StructArgument) for _, v in value.placed]
    for value in (*args, *structs):
        tensor = value.tensor if isinstance(value, TensorMapArgument) else value
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
            return tensor.get_device()
    if not torch.cuda.is_available():
        raise KernelUnavailable("CUDA kernels need an NVIDIA GPU and a build of torch for CUDA")
    return torch.cuda.current_device()


def _current_device() -> int:
    return torch._C._cuda_getDevice()  # noqa: SLF001 - the public form asks more than this


def _stream(index: int) -> int:
    return torch._C._cuda_getCurrentRawStream(index)  # noqa: SLF001 - as Triton and Inductor do


def target_of(index: int) -> str:
    """Name the target of kernels for a device: sm_80, sm_90a."""
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


class _Lane(threading.local):
    """Launch state of one thread: memory for parameters, and configurations."""

    def __init__(self, layout: StructLayout, index: int) -> None:
        make_current(index)
        self.parameters = KernelParameters(layout)
        self.address = self.parameters.address
        self.configs: dict[_Key, Any] = {}


class _LoadedModule:
    """A kernel on one device, whose context is current."""

    def __init__(self, source: Source, index: int) -> None:
        self._name = source.name
        self._index = index
        self._target = target_of(index)
        torch.cuda.current_stream(index)  # torch makes its context
        make_current(index)
        loaded = load(source, self._target)
        self._binary, self._symbol, self._function = loaded.binary, loaded.symbol, loaded.function
        self._parameters = cuda_parameters(source.name, source.text, loaded.parameter_bytes)
        layout = StructLayout(self._parameters, index)
        self._converters = layout.converters
        self._lane = _Lane(layout, index)
        self._enqueue = driver().cuLaunchKernelEx
        self._shared = 0  # bytes that it has been opted into

    def launch(
        self,
        grid: Size,
        block: Size,
        args: Sequence[object],
        shared: int,
        cluster: Size | None,
        cooperative: bool,
        pdl: bool,
    ) -> None:
        """See `CudaKernel.launch`."""
        lane = self._lane
        key = _stream(self._index), grid, block, shared, cluster, cooperative, pdl
        try:
            config = lane.configs[key]
        except (KeyError, TypeError):  # a list cannot be a key
            config = self._config(lane, key)
        self._write(lane.parameters, args)
        (status,) = self._enqueue(config, self._function, lane.address, 0)
        if status == _NO_CONTEXT:
            make_current(self._index)
            (status,) = self._enqueue(config, self._function, lane.address, 0)
        if status:
            raise failure(
                status,
                f"launching {self._name} with grid={grid}, block={block}, shared={shared}, "
                f"cluster={cluster}, cooperative={cooperative}, pdl={pdl}",
            )

    def show(self, source: Source, args: Sequence[object], launching: Launching) -> None:
        """Tell the observer of a launch."""
        assert watch.observer is not None
        values = converted(self._name, args, self._parameters, self._check)
        watch.observer(
            Observed(source, self._target, self._binary, self._symbol, values, launching)
        )

    def _write(self, parameters: KernelParameters, args: Sequence[object]) -> None:
        if len(args) == len(self._converters):
            try:
                parameters.pack([c(a) for c, a in zip(self._converters, args, strict=True)])
            except (TypeError, OverflowError, struct.error):
                pass  # rare values are converted below, wrong ones refused
            else:
                return
        parameters.write(converted(self._name, args, self._parameters, self._check))

    def _check(self, value: torch.Tensor | TensorMapArgument) -> None:
        tensor = value.tensor if isinstance(value, TensorMapArgument) else value
        if not tensor.is_cuda:
            raise TypeError(f"got a tensor on {tensor.device}; move it to cuda")
        if tensor.get_device() != self._index:
            raise TypeError(
                f"got a tensor on {tensor.device}; the kernel is launched on cuda:{self._index}"
            )
        if isinstance(value, TensorMapArgument) and tensor.data_ptr() % 16:
            raise TypeError("the tensor of a tensor map must start at a multiple of 16 bytes")

    def _config(self, lane: _Lane, key: _Key) -> Any:
        """A new configuration, with what the kernel must be opted into for it."""
        stream, grid, block, shared, cluster, cooperative, pdl = key
        launching = Launching.of(grid, block, shared, cluster, cooperative, pdl)
        with _loading:
            if launching.shared > self._shared:
                self._set("MAX_DYNAMIC_SHARED_SIZE_BYTES", launching.shared)
                self._shared = launching.shared
            if launching.cluster and math.prod(launching.cluster) > _PORTABLE_CLUSTER:
                self._set("NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1)
        config = launch_config(launching, stream, launch_attributes(launching))
        if len(lane.configs) >= _MOST_CONFIGS:
            lane.configs.clear()
        with contextlib.suppress(TypeError):
            lane.configs[key] = config
        return config

    def _set(self, name: str, value: int) -> None:
        attribute = getattr(driver().CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
        doing = f"setting {name} of {self._name} to {value}"
        call("cuFuncSetAttribute", self._function, attribute, value, doing=doing)
