"""Sizes of what kernels take by value, and types of numbers. Needs the standard library only."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Mapping
from typing import Literal, TypeAlias

POINTER_BYTES = 8
TENSOR_MAP_BYTES = 128
TENSOR_MAP_ALIGN = 64
MAX_STRUCT_BYTES = 32_764  # of all parameters of a kernel together, from sm_70 on

ScalarType: TypeAlias = Literal[
    "i1", "i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64", "f16", "bf16", "f32", "f64"
]
FORMAT: Mapping[str, str] = {
    "i1": "?", "i8": "b", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "u32": "I", "i64": "q",
    "u64": "Q", "f16": "e", "bf16": "H", "f32": "f", "f64": "d",
}  # fmt: skip
SCALAR_BYTES: Mapping[str, int] = {t: struct.calcsize(f"<{c}") for t, c in FORMAT.items()}
NUMPY_TYPES: Mapping[str, ScalarType] = {
    "bool": "i1", "int8": "i8", "uint8": "u8", "int16": "i16", "uint16": "u16", "int32": "i32",
    "uint32": "u32", "int64": "i64", "uint64": "u64", "float16": "f16", "float32": "f32",
    "float64": "f64",
}  # fmt: skip
"""Types by the names of numpy's."""
CPP_TYPES: Mapping[str, ScalarType | None] = {
    "p": None, "b": "i1", "c": "i8", "C": "u8", "s": "i16", "S": "u16", "i": "i32", "I": "u32",
    "l": "i64", "L": "u64", "f": "f32", "d": "f64",
}  # fmt: skip
"""Letters that `cpp` writes for parameters; None is a pointer."""


def scalar_bytes(type_: ScalarType, value: float | bool) -> bytes:
    """A number as a kernel reads it. Floats that are too large become infinities.

    bfloat16 is rounded to nearest even from float32.
    """
    if type_ == "bf16":
        if math.isnan(value):
            return b"\xc0\x7f"
        (bits,) = struct.unpack("<I", bytes(ctypes.c_float(value)))
        return struct.pack("<H", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)
    if type_ == "f32":
        return bytes(ctypes.c_float(value))
    if type_[0] == "f":
        try:
            return struct.pack(f"<{FORMAT[type_]}", float(value))
        except OverflowError:
            return struct.pack(f"<{FORMAT[type_]}", math.copysign(math.inf, value))
    return struct.pack(f"<{FORMAT[type_]}", int(value))


def cpp_types(signature: str) -> tuple[ScalarType | None, ...]:
    """Types of a C++ kernel's parameters, from what its library says: `(ppll)`; None is a pointer.

    Raises:
        ValueError: One is neither a pointer nor a number, or it says nothing.
    """
    if not (signature.startswith("(") and signature.endswith(")")):
        raise ValueError("the library does not say what parameters its kernel has")
    letters = signature[1:-1]
    if odd := [i for i, letter in enumerate(letters, 1) if letter not in CPP_TYPES]:
        raise ValueError(f"parameter {odd[0]} is neither a pointer nor a number of C")
    return tuple(CPP_TYPES[letter] for letter in letters)
