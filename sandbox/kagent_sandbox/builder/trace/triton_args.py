"""A Triton kernel's arguments as its binary takes them, expanded as Triton's own launcher does.

Run-time arguments in order, tuples flattened and constants left out; a host tensor descriptor is a
tensor map followed by its shape and strides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from kagent_sandbox.builder.trace.recorder import Recorder
from kagent_sandbox.builder.trace.torch_stubs import refuse
from kagent_sandbox.data.plan import ITEMSIZE, Arg, Null, Scalar, ScalarType, TensorMap

_SCALARS: dict[str, ScalarType] = {
    "i1": "i1", "u1": "i1", "i8": "i8", "u8": "u8", "i16": "i16", "u16": "u16", "i32": "i32",
    "u32": "u32", "i64": "i64", "u64": "u64", "fp16": "f16", "bf16": "bf16", "fp32": "f32",
    "f32": "f32", "fp64": "f64",
}  # fmt: skip

# CUtensorMapDataType by the number in Triton's metadata (8, 9 and 10 are permuted on devices)
_TMA_DTYPES = {
    0: "uint8", 1: "uint16", 2: "uint32", 3: "int32", 4: "uint64", 5: "int64", 6: "float16",
    7: "float32", 9: "float64", 10: "bfloat16",
}  # fmt: skip
_TMA_SWIZZLE_BYTES = (0, 32, 64, 128)


def expand(
    recorder: Recorder, signature: Sequence[Any], args: Sequence[Any], descriptors: Sequence[Any]
) -> Iterable[Arg]:
    """Arguments of one launch.

    Args:
        recorder: Knows where tensors lie.
        signature: Triton's type of each parameter; "constexpr" where none is passed.
        args: One value per parameter.
        descriptors: The compiler's layout of each tensor map; empty where the target has no TMA.
    """
    described = 0
    for kind, value in zip(signature, args, strict=True):
        if isinstance(kind, str) and kind.startswith("tensordesc"):
            meta = descriptors[described] if descriptors else None
            described += 1
            yield from _descriptor(recorder, value, meta)
        else:
            yield from _flatten(recorder, kind, value)


def _flatten(recorder: Recorder, kind: Any, value: Any) -> Iterable[Arg]:
    if isinstance(kind, tuple):
        for part, element in zip(kind, value, strict=True):
            yield from _flatten(recorder, part, element)
    elif kind == "constexpr":
        return
    elif kind.startswith("*"):
        yield _pointer(recorder, value)
    elif kind == "nvTmaDesc":
        refuse(
            "a raw TMA descriptor is passed to a kernel",
            "use triton.tools.tensor_descriptor.TensorDescriptor or tl.make_tensor_descriptor",
        )
    else:
        type_ = _SCALARS[kind]
        if type_[0] in "iu":
            number = int(value)
            if recorder.is_address(number):
                refuse("a tensor's data_ptr() is passed as a number", "pass the tensor itself")
            yield Scalar(type_, number if type_ != "i1" else bool(number))
        else:
            yield Scalar(type_, float(value))


def _pointer(recorder: Recorder, value: Any) -> Arg:
    if value is None:
        return Null()
    if not isinstance(value, torch.Tensor) and hasattr(value, "base"):
        value = value.base  # triton.reinterpret
    if not isinstance(value, torch.Tensor):
        refuse(
            f"a {type(value).__name__} is passed where a kernel takes a pointer", "pass a tensor"
        )
    return recorder.pointer(value)


def _descriptor(recorder: Recorder, value: Any, meta: Any) -> Iterable[Arg]:
    """A host TensorDescriptor: like `make_tensordesc_arg` of Triton's driver."""
    shape = [Scalar("i32", int(n)) for n in value.shape]
    strides = [Scalar("i64", int(n)) for n in value.strides]
    if (
        meta is None
    ):  # targets without TMA: pointer, shape, strides and flags, then shape and strides again
        yield recorder.pointer(value.base)
        yield from (Scalar("i64", int(n)) for n in (*value.shape, *value.strides))
        yield Scalar("i1", value.padding == "nan")
        if hasattr(value, "round_f32_to_tf32"):  # Triton 3.7
            yield Scalar("i1", bool(value.round_f32_to_tf32))
    else:
        yield _tensor_map(recorder, value, meta)
    yield from shape
    yield from strides


def _tensor_map(recorder: Recorder, value: Any, meta: Any) -> TensorMap:
    dtype = _TMA_DTYPES.get(meta["elem_type"])
    if dtype is None or meta["fp4_padded"] or getattr(value, "round_f32_to_tf32", False):
        refuse(
            "this kind of tensor descriptor is not supported (packed fp4, or rounding to tf32)",
            "describe a plain tensor, or load through pointers",
        )
    pointer = recorder.pointer(value.base)
    element = meta["elem_size"]
    assert element == ITEMSIZE[dtype]
    return TensorMap(
        buffer=pointer.buffer,
        offset=pointer.offset,
        dtype=dtype,
        dims=tuple(int(n) for n in reversed(value.shape)),
        strides=tuple(int(n) * element for n in reversed(value.strides[:-1])),
        box=tuple(int(n) for n in reversed(meta["block_size"])),
        element_strides=(1,) * len(value.shape),
        swizzle=_TMA_SWIZZLE_BYTES[meta["swizzle"]],  # type: ignore[arg-type]
        l2_promotion=128,
        oob_nan=value.padding == "nan",
    )
