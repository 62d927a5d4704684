"""Binaries on the device: loading them, checking that a launch fits, launching."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import cuda.bindings.driver as driver

from kagent_sandbox.data.language import compiled_by_triton
from kagent_sandbox.data.plan import KernelInfo, Launch
from kagent_sandbox.data.plan_json import argument_bytes
from kagent_sandbox.data.verdict import Status
from kagent_sandbox.device.cuda.driver import GpuError, blame_of, call
from kagent_sandbox.device.cuda.launch_args import (
    DEFAULT_SHARED_BYTES,
    PORTABLE_CLUSTER,
    Address,
    KernelLimits,
    ParameterBlock,
    argument,
    device_limits,
    launch_config,
    over_limit,
)
from kagent_sandbox.device.interface import LaunchFailed


@dataclass
class _Loaded:
    """A kernel on the device, with what it has been opted into so far."""

    code: object  # cuda-core's ObjectCode, which owns the kernel
    handle: driver.CUkernel
    limits: KernelLimits
    param_bytes: tuple[int, ...]
    dynamic_shared_bytes: int = 0  # opted into; 0: the default's limit
    wide_clusters: bool = False


class Kernels:
    """Loads binaries when a launch first needs them."""

    def __init__(self, index: int, stream: int) -> None:
        self._index = index
        self._stream = stream
        self._limits = device_limits(index)
        self._device = call(driver.cuDeviceGet, index, doing="opening the device")
        self._core = importlib.import_module("cuda.core")
        self._core.Device(index).set_current()
        self._binaries: dict[str, bytes] = {}
        self._loaded: dict[tuple[str, str], _Loaded] = {}

    def add(self, binaries: Mapping[str, bytes]) -> None:
        """Take binaries by hash, for later."""
        self._binaries.update(binaries)

    def bind(self, op: Launch, kernel: KernelInfo, address: Address) -> Callable[[], None]:
        """A function that enqueues one launch.

        Raises:
            LaunchFailed: The binary does not load, or the launch asks for too much.
            GpuError: The driver refuses something else.
        """
        loaded = self._load(kernel)
        sizes = tuple(argument_bytes(a) for a in op.args)
        if sizes != loaded.param_bytes:
            raise LaunchFailed(
                Status.TAMPER,
                f"{kernel.name} in the binary takes parameters of {list(loaded.param_bytes)} "
                f"bytes, the plan passes {list(sizes)}",
            )
        excess = over_limit(op, kernel.name, loaded.limits, self._limits)
        if excess is not None:
            raise LaunchFailed(Status.RESOURCE_LIMIT, excess)
        self._opt_in(op, kernel, loaded)
        config = launch_config(op, kernel, self._stream)
        self._check_occupancy(op, kernel, loaded, config)
        parameters = ParameterBlock([argument(a, address) for a in op.args])
        function = driver.CUfunction(int(loaded.handle))
        doing = f"launching {kernel.name}"

        def launch() -> None:
            call(driver.cuLaunchKernelEx, config, function, parameters.address, 0, doing=doing)

        return launch

    def _load(self, kernel: KernelInfo) -> _Loaded:
        key = kernel.hash, kernel.name
        if key in self._loaded:
            return self._loaded[key]
        if kernel.hash not in self._binaries:
            raise LaunchFailed(
                Status.RUNTIME_ERROR, f"no binary was loaded for {kernel.name} ({kernel.hash[:12]})"
            )
        try:
            code = self._core.ObjectCode.from_cubin(self._binaries[kernel.hash], name=kernel.name)
            found = code.get_kernel(kernel.name)
            sizes = tuple(int(p.size) for p in found.arguments_info)
        except Exception as e:  # noqa: BLE001 - cuda-core raises its own private classes
            raise LaunchFailed(
                Status.RUNTIME_ERROR,
                f"the binary of {kernel.name} does not load: {e}",
                blame=blame_of(str(e)),
            ) from None
        handle = driver.CUkernel(int(found.handle))

        def read(name: str) -> int:
            attribute = getattr(driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
            doing = f"reading {name} of {kernel.name}"
            return int(
                call(driver.cuKernelGetAttribute, attribute, handle, self._device, doing=doing)
            )

        limits = KernelLimits(
            threads_per_block=read("MAX_THREADS_PER_BLOCK"),
            static_shared_bytes=read("SHARED_SIZE_BYTES"),
            registers=read("NUM_REGS"),
        )
        loaded = _Loaded(code, handle, limits, sizes)
        self._loaded[key] = loaded
        return loaded

    def _opt_in(self, op: Launch, kernel: KernelInfo, loaded: _Loaded) -> None:
        attributes = driver.CUfunction_attribute
        large = op.shared + loaded.limits.static_shared_bytes > DEFAULT_SHARED_BYTES
        if large and op.shared > loaded.dynamic_shared_bytes:
            self._set(attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, op.shared, loaded)
            loaded.dynamic_shared_bytes = op.shared
            if compiled_by_triton(kernel.language):  # as Triton's own loader does
                call(
                    driver.cuKernelSetCacheConfig,
                    loaded.handle,
                    driver.CUfunc_cache.CU_FUNC_CACHE_PREFER_SHARED,
                    self._device,
                    doing=f"preferring shared memory for {kernel.name}",
                )
        wide = op.cluster is not None and math.prod(op.cluster) > PORTABLE_CLUSTER
        if wide and not loaded.wide_clusters:
            self._set(attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1, loaded)
            loaded.wide_clusters = True

    def _set(self, attribute: object, value: int, loaded: _Loaded) -> None:
        doing = f"setting {attribute} to {value}"
        call(
            driver.cuKernelSetAttribute, attribute, value, loaded.handle, self._device, doing=doing
        )

    def _check_occupancy(
        self, op: Launch, kernel: KernelInfo, loaded: _Loaded, config: driver.CUlaunchConfig
    ) -> None:
        """Clusters and cooperative grids must be resident at once: ask the driver how many fit."""
        function = driver.CUfunction(int(loaded.handle))
        doing = f"computing the occupancy of {kernel.name}"
        if op.cluster is not None:
            fit = call(driver.cuOccupancyMaxActiveClusters, function, config, doing=doing)
            if fit < 1:
                raise LaunchFailed(
                    Status.RESOURCE_LIMIT,
                    f"{kernel.name}: not one cluster of {'x'.join(map(str, op.cluster))} blocks "
                    f"with {math.prod(op.block)} threads and {op.shared} bytes of shared memory "
                    "fits",
                )
        threads = math.prod(op.block)
        per_unit = call(
            driver.cuOccupancyMaxActiveBlocksPerMultiprocessor,
            function,
            threads,
            op.shared,
            doing=doing,
        )
        if per_unit < 1:
            raise LaunchFailed(
                Status.RESOURCE_LIMIT,
                f"{kernel.name}: not one block of {threads} threads with {loaded.limits.registers} "
                f"registers each and {op.shared} bytes of shared memory fits a multiprocessor",
            )
        most = per_unit * self._limits.multiprocessors
        if op.cooperative and math.prod(op.grid) > most:
            raise LaunchFailed(
                Status.RESOURCE_LIMIT,
                f"{kernel.name}: a cooperative grid of {math.prod(op.grid)} blocks, "
                f"{most} fit at once",
            )


def failed(error: GpuError) -> LaunchFailed:
    """A driver's error as the candidate's failure."""
    return LaunchFailed(error.status, str(error), blame=error.blame)
