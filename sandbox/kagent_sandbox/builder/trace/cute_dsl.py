"""CuTe DSL's kernels while host code is traced: compiled for the target, recorded, never launched.

The DSL compiles its host function to machine code that calls CUDA through one library. Here that is
a stand-in (`cute_stand_in.cpp`): the host function runs with symbolic addresses, and what it would
launch becomes part of the plan. Addresses are found in kernels' parameters by their upper bits,
tensor maps by a mark.

In the builder's child only, which imports the DSL for candidates that use it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kagent_sandbox.builder.binary.fatbin import cubin_at
from kagent_sandbox.builder.binary.inspect import InspectError, kernel_info
from kagent_sandbox.builder.compile import kernels
from kagent_sandbox.builder.compile.cpp import compile_cpp
from kagent_sandbox.builder.compile.time_limit import compile_limit
from kagent_sandbox.builder.policy import BuildRejected, PolicyError
from kagent_sandbox.builder.trace import dlpack
from kagent_sandbox.builder.trace.llvm_layout import TypeLayout, launched_layouts
from kagent_sandbox.builder.trace.recorder import Recorder, current_recorder
from kagent_sandbox.builder.trace.symbolic import ADDRESS_TAG, SymbolicTensor
from kagent_sandbox.data.language import CUTE
from kagent_sandbox.data.plan import Arg, Pointer, Scalar, Struct, TensorMap
from kagent_sandbox.data.target import Target
from kagent_sandbox.data.verdict import Stage, Status
from kagent_sandbox.runtime.launches import Launching
from kagent_sandbox.runtime.scalars import (
    POINTER_BYTES,
    TENSOR_MAP_ALIGN,
    TENSOR_MAP_BYTES,
    ScalarType,
)

_STAND_IN = Path(__file__).with_name("cute_stand_in.cpp")
_MARK = b"kagent's stand-in for a map"  # begins a tensor map; its number follows
_UNSIGNED: dict[int, ScalarType] = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}
_ATTRIBUTE_BYTES = 72  # of a cudaLaunchAttribute: its id, and 64 bytes of value at byte 8
_COOPERATIVE, _CLUSTER, _OVERLAP, _PREFERENCES = 2, 4, 6, {0, 1, 3, 5, 8, 9, 10}
_DESCRIPTOR_BYTES, _DESCRIPTOR_ADDRESS = 64, (1 << 57) - 1
_REFUSED = 1  # cudaErrorInvalidValue

# As CUtensorMapDataType, ...Interleave, ...Swizzle, ...L2promotion number them.
_MAP_DTYPES = (
    *("uint8", "uint16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64"),
    "bfloat16",
)
_INTERLEAVES, _SWIZZLES, _PROMOTIONS = (0, 16, 32), (0, 32, 64, 128), (0, 64, 128, 256)

_maps: list[TensorMap] = []  # by their numbers
_layouts: list[tuple[TypeLayout, ...]] = []  # of the parameters of kernels, one for each launch
_held: list[object] = []  # functions that the stand-in calls


class _Config(ctypes.Structure):
    """cudaLaunchConfig_t."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    ]


_ON_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_char_p,
    ctypes.POINTER(_Config),
    ctypes.POINTER(ctypes.c_void_p),
)
_ON_MAP = ctypes.CFUNCTYPE(
    ctypes.c_int,
    *(ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p),
    *(ctypes.POINTER(ctypes.c_uint64),) * 2,
    *(ctypes.POINTER(ctypes.c_uint32),) * 2,
    *(ctypes.c_int,) * 4,
)


def install(target: Target, folder: Path) -> None:
    """Import the DSL, and have it compile for a target and record instead of launching.

    Args:
        target: A GPU.
        folder: The candidate's private folder: the stand-in and caches go there.

    Raises:
        BuildRejected: The DSL is not installed, or is a version that this cannot record.
    """
    if target.is_cpu:
        return  # launches are refused where they happen: there are none without a GPU's target
    library = folder / "cute_stand_in.so"
    library.write_bytes(compile_cpp("kagent_answer", _STAND_IN.read_text("utf-8")))
    os.environ |= {
        "CUTE_DSL_ARCH": target.name,
        "CUTE_DSL_LIBS": str(library),
        "CUTE_DSL_CACHE_DIR": str(folder / "cute_dsl"),
        "CUTE_DSL_DISABLE_FILE_CACHING": "1",
        "QUACK_CACHE_ENABLED": "0",  # kernels of libraries are compiled here, not taken from disk
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0",
    }
    _connect(ctypes.CDLL(str(library)), target)
    try:
        executor: Any = importlib.import_module("cutlass.cutlass_dsl.cuda_jit_executor")
        _prepare(executor)
    except (ImportError, AttributeError) as e:
        raise BuildRejected(
            Stage.BUILD,
            Status.COMPILE_ERROR,
            f"CuTe DSL cannot be used here ({e}): pip install 'kagent[cute]' (nvidia-cutlass-dsl "
            "4.8)",
        ) from None


def _connect(stand_in: ctypes.CDLL, target: Target) -> None:
    callbacks = _ON_LAUNCH(_answered(_launched)), _ON_MAP(_answered(_encoded))
    _held.extend(callbacks)
    stand_in.kagent_record(*callbacks)
    for attribute, value in {  # cudaDeviceAttr
        1: target.threads_per_block,
        8: 48 << 10,
        10: target.warp_size,
        16: target.multiprocessors,
        39: target.threads_per_multiprocessor,
        75: target.major,
        76: target.minor,
        81: target.shared_per_multiprocessor,
        97: target.shared_per_block,
    }.items():
        stand_in.kagent_answer(attribute, value)


def _prepare(executor: Any) -> None:
    """Replace what the DSL would ask the driver from Python, and take symbolic tensors."""
    executor.CudaDialectJitCompiledFunction.num_devices = 1
    executor.CudaDialectJitModule.unload = lambda _self: None
    compiler: Any = importlib.import_module("cutlass.base_dsl.compiler")
    compiler.Compiler.compile_and_jit = _limited(compiler.Compiler.compile_and_jit)
    setattr(SymbolicTensor, "__dlpack__", lambda self, **_: dlpack.capsule(self))  # noqa: B010
    setattr(SymbolicTensor, "__dlpack_device__", lambda _self: dlpack.CUDA_DEVICE)  # noqa: B010
    try:
        ffi: Any = importlib.import_module("tvm_ffi")
        provider: Any = importlib.import_module("cutlass.cutlass_dsl.tvm_ffi_provider")
    except ImportError:
        return  # without that package compiled functions have the DSL's own calls alone
    ffi.from_dlpack = _with_exported_first(ffi.from_dlpack)
    for name in ("TVMFFIJitCompiledFunction", "TVMFFIJitCompiledFunctionWithKwargs"):
        compiled = getattr(provider, name)
        compiled.__call__ = _with_exported(compiled.__call__, ffi.from_dlpack)


def _with_exported_first(from_dlpack: Callable[..., Any]) -> Callable[..., Any]:
    """A `from_dlpack` that takes symbolic tensors, too."""

    @functools.wraps(from_dlpack)
    def taking(value: object, *args: Any, **kwargs: Any) -> Any:
        taken = dlpack.SymbolicExport(value) if isinstance(value, SymbolicTensor) else value
        return from_dlpack(taken, *args, **kwargs)

    return taking


def _with_exported(call: Callable[..., Any], from_dlpack: Callable[..., Any]) -> Callable[..., Any]:
    """A call whose symbolic tensors, also those in tuples, go through DLPack."""

    def exported(value: object) -> object:
        if isinstance(value, SymbolicTensor):
            return from_dlpack(value)
        if isinstance(value, tuple | list) and type(value) in {tuple, list}:
            return type(value)(map(exported, value))
        return value

    @functools.wraps(call)
    def calling(self: Any, *args: object, **kwargs: object) -> Any:
        return call(self, *map(exported, args), **{k: exported(v) for k, v in kwargs.items()})

    return calling


def _limited(compile_: Callable[..., Any]) -> Callable[..., Any]:
    """A compilation with the limit that each kernel has."""

    @functools.wraps(compile_)
    def compiling(*args: Any, **kwargs: Any) -> Any:
        recorder = current_recorder()
        with compile_limit("of CuTe DSL", recorder.compile_limit_s if recorder else None):
            made = compile_(*args, **kwargs)
        module = next((a for a in (*args, *kwargs.values()) if type(a).__name__ == "Module"), "")
        _layouts.extend(launched_layouts(str(module)))
        return made

    return compiling


def _answered(record: Callable[..., None]) -> Callable[..., int]:
    """A function for the stand-in to call: a status. What is raised stands as the recorder's."""

    def answer(*arguments: Any) -> int:
        recorder = current_recorder()
        if recorder is None:
            return _REFUSED  # the file is being imported: nothing may be launched
        try:
            record(recorder, *arguments)
        except PolicyError as e:
            recorder.violation = recorder.violation or e
            return _REFUSED
        except (ValueError, LookupError, InspectError) as e:
            recorder.violation = recorder.violation or PolicyError(
                f"a launch of CuTe DSL cannot be recorded: {e}", "use a simpler launch"
            )
            return _REFUSED
        return 0

    return answer


# -- launches ------------------------------------------------------------------------------------


def _launched(recorder: Recorder, binary: int, name: bytes, config: Any, arguments: Any) -> None:
    """Record one launch."""
    cubin, symbol = cubin_at(binary), name.decode()
    info = kernel_info(cubin, symbol, CUTE.name)
    args = tuple(
        _argument(recorder, _without(padding, ctypes.string_at(arguments[i], nbytes)))
        for i, (nbytes, padding) in enumerate(
            zip(info.param_bytes, _padding(info.param_bytes), strict=True)
        )
    )
    launching = _launching(config.contents)
    if problem := kernels.over_limits(info, launching, recorder.target):
        raise PolicyError(*problem, status=Status.RESOURCE_LIMIT)
    recorder.launch(info, cubin, args, launching)


def _padding(sizes: tuple[int, ...]) -> list[frozenset[int]]:
    """Bytes of each parameter that are padding in every kernel known with parameters of these
    sizes. They hold whatever was on the stack, and would make equal plans differ.
    """
    fitting = [each for each in _layouts if tuple(p.nbytes for p in each) == sizes]
    if not fitting:
        return [frozenset()] * len(sizes)
    return [
        frozenset.intersection(*(p.padding for p in column))
        for column in zip(*fitting, strict=True)
    ]


def _without(padding: frozenset[int], data: bytes) -> bytes:
    return bytes(0 if i in padding else b for i, b in enumerate(data)) if padding else data


def _launching(config: _Config) -> Launching:
    cluster, cooperative, overlap = None, False, False
    for i in range(config.count):
        data = ctypes.string_at(config.attributes + i * _ATTRIBUTE_BYTES, _ATTRIBUTE_BYTES)
        kind, x, y, z = struct.unpack_from("<I4xIII", data)
        if kind == _CLUSTER:
            cluster = (x, y, z) if (x, y, z) != (1, 1, 1) else None
        elif kind == _COOPERATIVE:
            cooperative = bool(x)
        elif kind == _OVERLAP:
            overlap = bool(x)
        elif kind not in _PREFERENCES:
            raise PolicyError(
                f"a launch of CuTe DSL with attribute {kind}",
                "plans know clusters, cooperative launches and dependent launches (use_pdl)",
            )
    (gx, gy, gz), (bx, by, bz) = config.grid, config.block
    return Launching((gx, gy, gz), (bx, by, bz), config.shared, cluster, cooperative, overlap)


def _argument(recorder: Recorder, data: bytes) -> Arg:
    """A kernel's parameter, from the bytes that it was given."""
    if (pointer := _descriptor_address(recorder, data)) is not None:
        return Struct(
            bytes(POINTER_BYTES) + data[POINTER_BYTES:_DESCRIPTOR_BYTES].ljust(120, b"\0"),
            ((0, pointer),),
        )
    placed = tuple(_placed(recorder, data))
    if len(data) in _UNSIGNED:
        if placed and isinstance(placed[0][1], Pointer):
            return placed[0][1]
        return Scalar(_UNSIGNED[len(data)], int.from_bytes(data, "little"))
    if placed and len(data) == TENSOR_MAP_BYTES and isinstance(placed[0][1], TensorMap):
        return placed[0][1]
    cleared = bytearray(data)
    for offset, value in placed:
        nbytes = TENSOR_MAP_BYTES if isinstance(value, TensorMap) else POINTER_BYTES
        cleared[offset : offset + nbytes] = bytes(nbytes)
    return Struct(bytes(cleared), placed)


def _descriptor_address(recorder: Recorder, data: bytes) -> Pointer | None:
    """Target of a TMA descriptor that compiled host code encoded itself: it begins with an address
    of 57 bits. Bytes from 64 on are not written, and not read.
    """
    if len(data) != TENSOR_MAP_BYTES:
        return None
    (word,) = struct.unpack_from("<Q", data)
    tag = ADDRESS_TAG & ~_DESCRIPTOR_ADDRESS
    return None if word & ~_DESCRIPTOR_ADDRESS else recorder.pointer_of_address(word | tag)


def _placed(recorder: Recorder, data: bytes) -> Iterator[tuple[int, Pointer | TensorMap]]:
    """Addresses and tensor maps in a parameter, with their offsets."""
    offset = 0
    while offset + POINTER_BYTES <= len(data):
        if offset % TENSOR_MAP_ALIGN == 0 and data.startswith(_MARK, offset):
            number = int.from_bytes(data[offset + len(_MARK) : offset + len(_MARK) + 4], "little")
            yield offset, _maps[number]
            offset += TENSOR_MAP_BYTES
            continue
        (word,) = struct.unpack_from("<Q", data, offset)
        if (pointer := recorder.pointer_of_address(word)) is not None:
            yield offset, pointer
        offset += POINTER_BYTES


# -- tensor maps ---------------------------------------------------------------------------------


def _encoded(
    recorder: Recorder,
    to: int,
    dtype: int,
    rank: int,
    address: int | None,
    dims: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    steps: Sequence[int],
    *enums: int,
) -> None:
    """Remember a tensor map, and mark the place where its bytes belong."""
    pointer = recorder.pointer_of_address(address or 0)
    interleave, swizzle, promotion, fill = enums
    if pointer is None or dtype >= len(_MAP_DTYPES) or swizzle >= len(_SWIZZLES):
        raise PolicyError(
            f"a tensor map of CuTe DSL of data type {dtype} with swizzle {swizzle}"
            + ("" if pointer else ", of memory that is no tensor's"),
            f"plans know {', '.join(_MAP_DTYPES)}; float8 is passed as uint8",
        )
    _maps.append(
        TensorMap(
            buffer=pointer.buffer,
            offset=pointer.offset,
            dtype=_MAP_DTYPES[dtype],
            dims=tuple(dims[:rank]),
            strides=tuple(strides[: rank - 1]),
            box=tuple(box[:rank]),
            element_strides=tuple(steps[:rank]),
            swizzle=_SWIZZLES[swizzle],  # type: ignore[arg-type]
            interleave=_INTERLEAVES[interleave],  # type: ignore[arg-type]
            l2_promotion=_PROMOTIONS[promotion],  # type: ignore[arg-type]
            oob_nan=bool(fill),
        )
    )
    mark = (_MARK + struct.pack("<I", len(_maps) - 1)).ljust(TENSOR_MAP_BYTES, b"\0")
    ctypes.memmove(to, mark, TENSOR_MAP_BYTES)
