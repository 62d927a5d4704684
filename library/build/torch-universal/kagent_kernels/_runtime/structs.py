"""Structures that a kernel takes by value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch

from .scalars import (
    MAX_STRUCT_BYTES,
    NUMPY_TYPES,
    POINTER_BYTES,
    TENSOR_MAP_ALIGN,
    TENSOR_MAP_BYTES,
    scalar_bytes,
)
from .tensor_maps import TensorMapArgument

Placed: TypeAlias = torch.Tensor | TensorMapArgument


@dataclass(frozen=True, slots=True)
class StructArgument:
    """A structure's bytes, and what is written into them when its kernel is launched: an address of
    8 bytes or a tensor map of 128, at byte offsets that ascend. The bytes are zero there.
    """

    data: bytes
    placed: tuple[tuple[int, Placed], ...]


def struct(*fields: object) -> StructArgument:
    """A structure by value, laid out as C++ lays out its fields.

    Args:
        fields: In order: a tensor (a pointer, 8 bytes), None (a null pointer), a `tensor_map(...)`
            (128 bytes at a multiple of 64), a numpy scalar (its own size: `np.int32(n)`), another
            structure, or bytes (as they are, with no alignment).

    Returns:
        The structure, as an argument of a launch or a field of another one.

    Raises:
        TypeError: A field is none of these; numbers of Python have no size.
        ValueError: There are no fields, or too many bytes.

    Example:
        Give a kernel `struct Rows { const float* x; int n; float scale; }` by value:

            import numpy as np
            import torch

            rows = struct(torch.zeros(8), np.int32(8), np.float32(0.5))
            assert len(rows.data) == 16  # 8, 4 and 4 bytes
    """
    data = bytearray()
    placed: list[tuple[int, Placed]] = []
    widest = 1
    for number, field in enumerate(fields, 1):
        content, align, inside = _laid_out(number, field)
        widest = max(widest, align)
        data += bytes(-len(data) % align)
        placed += [(len(data) + offset, value) for offset, value in inside]
        data += content
    data += bytes(-len(data) % widest)
    if not 0 < len(data) <= MAX_STRUCT_BYTES:
        raise ValueError(
            f"a structure of {len(data)} bytes: expected 1 to {MAX_STRUCT_BYTES}; pass a tensor"
        )
    return StructArgument(bytes(data), tuple(placed))


def _laid_out(number: int, field: object) -> tuple[bytes, int, tuple[tuple[int, Placed], ...]]:
    """A field's bytes, its alignment, and what is placed in it."""
    if isinstance(field, torch.Tensor):
        return bytes(POINTER_BYTES), POINTER_BYTES, ((0, field),)
    if field is None:
        return bytes(POINTER_BYTES), POINTER_BYTES, ()
    if isinstance(field, TensorMapArgument):
        return bytes(TENSOR_MAP_BYTES), TENSOR_MAP_ALIGN, ((0, field),)
    if isinstance(field, StructArgument):
        maps = any(isinstance(value, TensorMapArgument) for _, value in field.placed)
        return field.data, TENSOR_MAP_ALIGN if maps else POINTER_BYTES, field.placed
    if isinstance(field, bytes):
        return field, 1, ()
    type_ = NUMPY_TYPES.get(getattr(getattr(field, "dtype", None), "name", ""))
    if type_ is None or not hasattr(field, "item"):
        raise TypeError(
            f"field {number} of a structure is {type(field).__name__} {field!r:.40}; pass a "
            "tensor, None, tensor_map(...), bytes, a structure, or a number of numpy: np.int32(n)"
        )
    content = scalar_bytes(type_, field.item())
    return content, len(content), ()
