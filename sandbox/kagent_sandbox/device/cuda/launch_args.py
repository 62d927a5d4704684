"""Conversion of a plan's launch to the driver's arguments: parameters, attributes, the device's
limits.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import cuda.bindings.driver as driver

from kagent_sandbox.data.language import compiled_by_triton
from kagent_sandbox.data.plan import Arg, KernelInfo, Launch, Null, Pointer, Struct, TensorMap
from kagent_sandbox.device.cuda.driver import GpuError, device_attribute
from kagent_sandbox.errors import DeviceError
from kagent_sandbox.runtime import cuda_values
from kagent_sandbox.runtime.errors import KernelUnavailable, LaunchError
from kagent_sandbox.runtime.launches import Launching
from kagent_sandbox.runtime.scalars import scalar_bytes
from kagent_sandbox.runtime.tensor_maps import Described

Address = Callable[[int], int]
"""Device address of a buffer, by its id."""

_PARAMETER_ALIGN = 64  # a CUtensorMap must be aligned to this; nothing needs more
PORTABLE_CLUSTER = 8
LARGEST_CLUSTER = 16
DEFAULT_SHARED_BYTES = 48 << 10  # more than this is opted into per kernel


def tensor_map_bytes(tensor_map: TensorMap, base: int) -> bytes:
    """The 128 bytes of a TMA descriptor of a buffer at device address `base`.

    Raises:
        GpuError: The driver refuses the sizes, strides or box.
    """
    described = Described(
        **{field.name: getattr(tensor_map, field.name) for field in dataclasses.fields(Described)}
    )
    try:
        return cuda_values.encoded(base + tensor_map.offset, described)
    except LaunchError as e:
        raise GpuError(e.name, e.text, e.doing) from None
    except KernelUnavailable as e:
        raise DeviceError(str(e)) from None


def argument(arg: Arg, address: Address) -> bytes:
    """One kernel parameter.

    Raises:
        GpuError: A tensor map cannot be encoded.
    """
    if isinstance(arg, Pointer):
        return struct.pack("<Q", address(arg.buffer) + arg.offset)
    if isinstance(arg, Null):
        return bytes(8)
    if isinstance(arg, TensorMap):
        return tensor_map_bytes(arg, address(arg.buffer))
    if isinstance(arg, Struct):
        data = bytearray(arg.data)
        for offset, inside in arg.placed:
            content = argument(inside, address)
            data[offset : offset + len(content)] = content
        return bytes(data)
    return scalar_bytes(arg.type, arg.value)


class ParameterBlock:
    """Parameters of one launch in host memory, and the array of pointers that the driver takes.

    The driver copies them when the kernel is launched or captured; this must live until then.
    """

    def __init__(self, parameters: Sequence[bytes]) -> None:
        slots = [-(-len(p) // _PARAMETER_ALIGN) * _PARAMETER_ALIGN for p in parameters]
        self._memory = ctypes.create_string_buffer(sum(slots) + _PARAMETER_ALIGN)
        start = ctypes.addressof(self._memory)
        start += -start % _PARAMETER_ALIGN
        self._pointers = (ctypes.c_void_p * max(1, len(parameters)))()
        for i, (parameter, slot) in enumerate(zip(parameters, slots, strict=True)):
            ctypes.memmove(start, parameter, len(parameter))
            self._pointers[i] = start
            start += slot

    @property
    def address(self) -> int:
        """Address of the array of pointers (void **)."""
        return ctypes.addressof(self._pointers)


def launch_config(op: Launch, kernel: KernelInfo, stream: int) -> driver.CUlaunchConfig:
    """The driver's launch configuration. The plan's grid counts blocks, clusters or not."""
    launching = Launching(op.grid, op.block, op.shared, op.cluster, op.cooperative, op.pdl)
    attributes = cuda_values.launch_attributes(launching)
    if op.cluster is not None and compiled_by_triton(kernel.language):  # as Triton's launcher does
        spread = driver.CUlaunchAttribute()
        ids = driver.CUlaunchAttributeID
        spread.id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE
        policy = driver.CUclusterSchedulingPolicy.CU_CLUSTER_SCHEDULING_POLICY_SPREAD
        spread.value.clusterSchedulingPolicyPreference = policy
        attributes.insert(1, spread)
    return cuda_values.launch_config(launching, stream, attributes)


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Limits of a device for one launch."""

    threads_per_block: int
    block: tuple[int, int, int]
    grid: tuple[int, int, int]
    shared_bytes: int  # static and dynamic, after opting in
    multiprocessors: int
    clusters: bool


@dataclass(frozen=True, slots=True)
class KernelLimits:
    """Needs of a loaded kernel, as the driver reports them."""

    threads_per_block: int  # limit by its registers
    static_shared_bytes: int
    registers: int


def device_limits(index: int) -> DeviceLimits:
    """Limits of a device.

    Raises:
        GpuError: The driver does not answer.
    """

    def three(kind: str) -> tuple[int, int, int]:
        x, y, z = (device_attribute(index, f"MAX_{kind}_DIM_{axis}") for axis in "XYZ")
        return x, y, z

    return DeviceLimits(
        threads_per_block=device_attribute(index, "MAX_THREADS_PER_BLOCK"),
        block=three("BLOCK"),
        grid=three("GRID"),
        shared_bytes=device_attribute(index, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        multiprocessors=device_attribute(index, "MULTIPROCESSOR_COUNT"),
        clusters=device_attribute(index, "COMPUTE_CAPABILITY_MAJOR") >= 9,
    )


def over_limit(op: Launch, name: str, kernel: KernelLimits, device: DeviceLimits) -> str | None:
    """Describe what a launch asks for and cannot have, or None. The driver judges occupancy."""
    threads = math.prod(op.block)
    blocks = f"{name} is launched with blocks of {'x'.join(map(str, op.block))} threads"
    if threads > device.threads_per_block:
        return f"{blocks}: {threads}, the device allows {device.threads_per_block}"
    if any(n > most for n, most in zip(op.block, device.block, strict=True)):
        return f"{blocks}: the device allows {'x'.join(map(str, device.block))}"
    if threads > kernel.threads_per_block:
        return (
            f"{blocks}: with its {kernel.registers} registers per thread it can have "
            f"{kernel.threads_per_block}"
        )
    if any(n > most for n, most in zip(op.grid, device.grid, strict=True)):
        return (
            f"{name} is launched with a grid of {'x'.join(map(str, op.grid))} blocks: the device "
            f"allows {'x'.join(map(str, device.grid))}"
        )
    shared = kernel.static_shared_bytes + op.shared
    if shared > device.shared_bytes:
        return (
            f"{name} asks for {shared} bytes of shared memory: the device allows "
            f"{device.shared_bytes} per block"
        )
    return None if op.cluster is None else _over_cluster(op, name, op.cluster, device)


def _over_cluster(
    op: Launch, name: str, cluster: tuple[int, int, int], device: DeviceLimits
) -> str | None:
    text = "x".join(map(str, cluster))
    if not device.clusters:
        return f"{name} is launched in clusters of {text} blocks: this device has no clusters"
    if math.prod(cluster) > LARGEST_CLUSTER:
        return f"{name} is launched in clusters of {text} blocks: at most {LARGEST_CLUSTER} fit"
    if any(n % c for n, c in zip(op.grid, cluster, strict=True)):
        grid = "x".join(map(str, op.grid))
        return f"{name}: a grid of {grid} blocks is no multiple of its clusters of {text}"
    return None
