"""CUDA launches as the driver takes them: packed parameters, tensor maps, launch configurations."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .arguments import Parameter, ScalarArgument, Value, plain_converter, scalar
from .driver import call, driver
from .launches import Launching
from .scalars import FORMAT, TENSOR_MAP_ALIGN, TENSOR_MAP_BYTES, scalar_bytes
from .structs import StructArgument
from .tensor_maps import Described, TensorMapArgument, described

_TENSOR_MAP_DTYPE = {
    "bool": "UINT8", "uint8": "UINT8", "int8": "UINT8", "float8_e4m3fn": "UINT8",
    "float8_e5m2": "UINT8", "float8_e8m0fnu": "UINT8", "float4_e2m1fn_x2": "UINT8",
    "uint16": "UINT16", "int16": "UINT16", "float16": "FLOAT16",
    "bfloat16": "BFLOAT16", "uint32": "UINT32", "int32": "INT32", "float32": "FLOAT32",
    "uint64": "UINT64", "int64": "INT64", "float64": "FLOAT64",
}  # fmt: skip
_MOST_MAPS = 1024
_UNSIGNED = {1: "B", 2: "H", 4: "I", 8: "Q"}
_maps: dict[tuple[int, Described], bytes] = {}
Convert = Callable[[object], object]


class StructLayout:
    """Layout of a kernel's parameters in one block of memory, for one device.

    `converters` take plain values, as host code nearly always passes them, to what `pack` takes,
    and raise TypeError for all others: those go through `arguments.converted`, which is slower and
    says what is wrong.
    """

    def __init__(self, parameters: Sequence[Parameter], index: int) -> None:
        self.offsets: list[int] = []
        text, end = "<", 0
        for parameter in parameters:
            align = TENSOR_MAP_ALIGN if parameter.nbytes > 8 else 8  # a structure may have maps
            start = -(-end // align) * align
            self.offsets.append(start)
            text += f"{start - end}x{_code(parameter)}"
            end = start + parameter.nbytes
        self.nbytes = end
        self.packer = struct.Struct(text)
        self.converters = [_converter(p, index) for p in parameters]


class KernelParameters:
    """Memory for the parameters of one launch, and the array of pointers that the driver takes.

    The driver copies them when the kernel is launched or captured: then they may be overwritten.
    """

    def __init__(self, layout: StructLayout) -> None:
        self._memory = ctypes.create_string_buffer(layout.nbytes + TENSOR_MAP_ALIGN)
        base = ctypes.addressof(self._memory)
        skip = -base % TENSOR_MAP_ALIGN
        self._view = memoryview(self._memory).cast("B")[skip:]
        places = [base + skip + offset for offset in layout.offsets]
        self._pointers = (ctypes.c_void_p * max(1, len(places)))(*places)
        self._layout = layout
        self.address = ctypes.addressof(self._pointers)

    def pack(self, values: Sequence[object]) -> None:
        """Write what the converters gave.

        Raises:
            struct.error, OverflowError: One is out of its parameter's range.
        """
        self._layout.packer.pack_into(self._view, 0, *values)

    def write(self, values: Sequence[Value]) -> None:
        """Write converted arguments."""
        for offset, value in zip(self._layout.offsets, values, strict=True):
            data = _bytes(value)
            self._view[offset : offset + len(data)] = data


def _bytes(value: Value) -> bytes:
    if isinstance(value, torch.Tensor):
        return struct.pack("<Q", value.data_ptr())
    if isinstance(value, ScalarArgument):
        return scalar_bytes(value.type, value.value)
    if isinstance(value, StructArgument):
        data = bytearray(value.data)
        for offset, inside in value.placed:
            content = _bytes(inside)
            data[offset : offset + len(content)] = content
        return bytes(data)
    return bytes(8) if value is None else tensor_map_bytes(value)


def _code(parameter: Parameter) -> str:
    """Return a parameter's code for `struct`."""
    if parameter.type is not None:
        return FORMAT[parameter.type]
    return _UNSIGNED.get(parameter.nbytes, f"{parameter.nbytes}s")


def _converter(parameter: Parameter, index: int) -> Convert:
    if parameter.type == "bf16" or (parameter.type is None and parameter.nbytes in {1, 2, 4}):
        return lambda value: _by_bytes(value, parameter)
    if parameter.type is not None:
        return plain_converter(parameter)
    if parameter.nbytes == 8:
        return _address(index, numbers=not parameter.pointer)
    return _map(index) if parameter.nbytes == TENSOR_MAP_BYTES else _nothing


def _address(index: int, *, numbers: bool) -> Convert:
    """Tensors on the kernel's device; `numbers` too where it is not known to be a pointer."""

    def address(value: object) -> int:
        if isinstance(value, torch.Tensor):
            if value.get_device() == index:
                return value.data_ptr()
        elif value is None:
            return 0
        elif numbers and type(value) is int and -(2**63) <= value < 2**64:
            return value & 0xFFFF_FFFF_FFFF_FFFF
        raise TypeError

    return address


def _by_bytes(value: object, parameter: Parameter) -> int:
    """Numbers of which only the size is known, or that `struct` cannot write."""
    if isinstance(value, int | float):
        found = scalar(value, parameter)
        return int.from_bytes(scalar_bytes(found.type, found.value), "little")
    raise TypeError


def _map(index: int) -> Convert:
    def tensor_map(value: object) -> bytes:
        if isinstance(value, TensorMapArgument) and value.tensor.get_device() == index:
            return tensor_map_bytes(value)
        raise TypeError

    return tensor_map


def _nothing(_value: object) -> object:
    raise TypeError


# -- tensor maps -----------------------------------------------------------------------------------


def tensor_map_bytes(value: TensorMapArgument) -> bytes:
    """The 128 bytes of a descriptor, encoded once for each address and shape.

    Raises:
        TypeError: The tensor does not start at a multiple of 16 bytes.
        LaunchError: The driver refuses the sizes, strides or box.
    """
    address = value.tensor.data_ptr()
    if address % 16:
        raise TypeError("the tensor of a tensor map must start at a multiple of 16 bytes")
    key = address, described(value)
    found = _maps.get(key)
    if found is None:
        if len(_maps) >= _MOST_MAPS:
            _maps.clear()
        found = _maps[key] = encoded(*key)
    return found


def encoded(address: int, is_: Described) -> bytes:
    """A descriptor of memory at a device address.

    Raises:
        LaunchError: The driver refuses the sizes, strides or box.
    """
    d = driver()
    made = call(
        "cuTensorMapEncodeTiled",
        _choice("CUtensorMapDataType", "DATA_TYPE", _TENSOR_MAP_DTYPE[is_.dtype]),
        len(is_.dims),
        address,
        [d.cuuint64_t(n) for n in is_.dims],
        # one dimension has no stride: the driver ignores the list, the binding wants one
        [d.cuuint64_t(n) for n in is_.strides or (16,)],
        [d.cuuint32_t(n) for n in is_.box],
        [d.cuuint32_t(n) for n in is_.element_strides],
        _choice("CUtensorMapInterleave", "INTERLEAVE", _width(is_.interleave)),
        _choice("CUtensorMapSwizzle", "SWIZZLE", _width(is_.swizzle)),
        _choice("CUtensorMapL2promotion", "L2_PROMOTION", _width(is_.l2_promotion, "L2_")),
        _choice(
            "CUtensorMapFloatOOBfill",
            "FLOAT_OOB_FILL",
            "NAN_REQUEST_ZERO_FMA" if is_.oob_nan else "NONE",
        ),
        doing=f"encoding a tensor map of {list(is_.dims)} {is_.dtype} in boxes of "
        f"{list(is_.box)}, swizzle {is_.swizzle}",
    )
    return ctypes.string_at(made.getPtr(), TENSOR_MAP_BYTES)


def _choice(enum: str, prefix: str, name: str) -> object:
    return getattr(getattr(driver(), enum), f"CU_TENSOR_MAP_{prefix}_{name}")


def _width(nbytes: int, prefix: str = "") -> str:
    return f"{prefix}{nbytes}B" if nbytes else "NONE"


# -- configurations --------------------------------------------------------------------------------


def launch_attributes(launching: Launching) -> list[Any]:
    """Return the attributes that a launch asks for beside its sizes."""
    d = driver()
    ids = d.CUlaunchAttributeID
    attributes = []
    if launching.cluster is not None:
        cluster = d.CUlaunchAttribute()
        cluster.id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = cluster.value.clusterDim
        size.x, size.y, size.z = launching.cluster
        attributes.append(cluster)
    if launching.cooperative:
        cooperative = d.CUlaunchAttribute()
        cooperative.id = ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        cooperative.value.cooperative = 1
        attributes.append(cooperative)
    if launching.pdl:
        pdl = d.CUlaunchAttribute()
        pdl.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        pdl.value.programmaticStreamSerializationAllowed = 1
        attributes.append(pdl)
    return attributes


def launch_config(launching: Launching, stream: int, attributes: Sequence[Any]) -> Any:
    """The driver's launch configuration."""
    d = driver()
    config = d.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = launching.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = launching.block
    config.sharedMemBytes = launching.shared
    config.hStream = d.CUstream(stream)
    config.numAttrs = len(attributes)
    config.attrs = list(attributes)
    return config
