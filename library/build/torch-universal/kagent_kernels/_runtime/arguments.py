"""Kernel arguments: Python values, by the types of the kernel's parameters.

Host code passes tensors, numbers, None, tensor maps and structures. A C++ kernel's library says
what its parameters are; of a CUDA kernel's, `cuda_parameters` finds out what can be known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, cast

import torch

from .scalars import NUMPY_TYPES, SCALAR_BYTES, TENSOR_MAP_BYTES, ScalarType, cpp_types
from .structs import StructArgument
from .tensor_maps import TensorMapArgument

if TYPE_CHECKING:
    import numpy as np

try:
    from numpy import generic
except ImportError:  # torch works without numpy, and so does this
    _NUMPY_SCALARS: tuple[type, ...] = ()
else:
    _NUMPY_SCALARS = (generic,)

_INTEGERS: dict[int, ScalarType] = {1: "i8", 2: "i16", 4: "i32", 8: "i64"}
_UNSIGNED: dict[int, ScalarType] = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}
_FLOATS: dict[int, ScalarType] = {2: "f16", 4: "f32", 8: "f64"}


@dataclass(frozen=True, slots=True)
class Parameter:
    """A kernel's parameter: its size, and what is known of its type."""

    nbytes: int
    type: ScalarType | None = None  # None: a pointer, or not known
    pointer: bool | None = None  # None: not known

    def __str__(self) -> str:
        if self.pointer:
            return "a pointer"
        return self.type or f"of {self.nbytes} bytes"


@dataclass(frozen=True, slots=True)
class ScalarArgument:
    """A number passed by value."""

    type: ScalarType
    value: float | int | bool


Value: TypeAlias = torch.Tensor | ScalarArgument | TensorMapArgument | StructArgument | None
"""Argument of a kernel: None is a null pointer."""
Check = Callable[[torch.Tensor | TensorMapArgument], None]


def converted(
    kernel: str, values: Sequence[object], parameters: Sequence[Parameter], check: Check
) -> tuple[Value, ...]:
    """Convert `values` to the kernel's parameters. `check` may refuse tensors and tensor maps.

    Raises:
        TypeError: Too few, too many, or one does not fit; the text names it and what is expected.
    """
    if len(values) != len(parameters):
        raise TypeError(f"kernel {kernel} takes {len(parameters)} arguments, got {len(values)}")
    found: list[Value] = []
    for index, (value, parameter) in enumerate(zip(values, parameters, strict=True), 1):
        try:
            found.append(_argument(value, parameter, check))
        except (TypeError, OverflowError) as e:
            raise TypeError(f"kernel {kernel}, argument {index} ({parameter}): {e}") from None
    return tuple(found)


def _argument(value: object, parameter: Parameter, check: Check) -> Value:
    address = parameter.nbytes == 8 and parameter.type is None and parameter.pointer is not False
    if isinstance(value, torch.Tensor):
        if not address:
            raise TypeError("got a tensor; pass a number (x.shape[0], x.stride(0), float)")
        check(value)
        return value
    if isinstance(value, StructArgument):
        if parameter.type is not None or len(value.data) != parameter.nbytes:
            raise TypeError(f"got a structure of {len(value.data)} bytes")
        for _, inside in value.placed:
            check(inside)
        return value
    if value is None:
        if not address:
            raise TypeError("got None, which stands for a null pointer")
        return None
    if isinstance(value, (bool, int, float, *_NUMPY_SCALARS)):
        if parameter.pointer:
            raise TypeError(f"got the number {value!r}; pass the tensor itself, not data_ptr()")
        return scalar(cast("float", value), parameter)
    if parameter.nbytes == TENSOR_MAP_BYTES:
        if not isinstance(value, TensorMapArgument):
            raise TypeError(f"got {type(value).__name__}; pass tensor_map(tensor, box)")
        check(value)
        return value
    raise TypeError(
        f"got {type(value).__name__}; pass a tensor, a number, None, tensor_map(...) or struct(...)"
    )


def scalar(value: bool | float | np.generic, parameter: Parameter) -> ScalarArgument:
    """A number as the parameter takes it.

    Raises:
        TypeError, OverflowError: It is of another kind or size, or too large.
    """
    if isinstance(value, _NUMPY_SCALARS):
        named = cast("np.generic", value)
        explicit = NUMPY_TYPES.get(named.dtype.name)
        if explicit is None or SCALAR_BYTES[explicit] != parameter.nbytes:
            raise TypeError(f"got numpy.{named.dtype.name}, which has another size")
        return _typed(explicit, named.item())
    assert isinstance(value, bool | int | float)
    if parameter.type is not None:
        return _typed(parameter.type, value)
    sizes = _FLOATS if isinstance(value, float) else _INTEGERS
    if not isinstance(value, float) and value >= 2 ** (8 * parameter.nbytes - 1):
        sizes = _UNSIGNED  # only the size is known: the bits are the same
    type_ = sizes.get(parameter.nbytes)
    if type_ is None:
        raise TypeError(f"got {value!r}, and the parameter is a structure: pass struct(...)")
    return _typed(type_, value)


def integer_range(parameter: Parameter) -> tuple[int, int]:
    """Least and largest integer that a parameter of a known integral type takes."""
    bits = 1 if parameter.type == "i1" else 8 * parameter.nbytes
    if bits == 1 or str(parameter.type).startswith("u"):
        return 0, 2**bits - 1
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


def plain_converter(parameter: Parameter) -> Callable[[object], float | bool]:
    """Return a function that lets plain numbers within a parameter's known type pass and raises
    TypeError for all others. Those go through `scalar`, which is slower and describes the fault.
    """
    if parameter.type is not None and parameter.type[0] in "fb":
        return _plain_float
    low, high = integer_range(parameter)

    def integer(value: object) -> int:
        if isinstance(value, int) and low <= value <= high:
            return value
        raise TypeError

    return integer


def _plain_float(value: object) -> float:
    if type(value) is float:
        return value
    raise TypeError


def _typed(type_: ScalarType, value: float | bool) -> ScalarArgument:
    if type_[0] in "fb":
        return ScalarArgument(type_, float(value))
    if isinstance(value, float):
        raise TypeError(f"got {value!r}, a float; pass int(...)")
    low, high = integer_range(Parameter(SCALAR_BYTES[type_], type_))
    if not low <= value <= high:
        raise OverflowError(f"{value} does not fit {type_}")
    return ScalarArgument(type_, bool(value) if type_ == "i1" else int(value))


def cpp_parameters(signature: str) -> tuple[Parameter, ...]:
    """Parameters of a C++ kernel, from what its library says: `(ppll)`.

    Raises:
        ValueError: One is neither a pointer nor a number, or it says nothing.
    """
    types = cpp_types(signature)
    return tuple(Parameter(SCALAR_BYTES[t] if t else 8, t, t is None) for t in types)
