"""Values of a simulated kernel: tensors in registers, whole numbers, pointers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import triton.language as tl

from kagent_sandbox.judge.gluon.schedule import NotSimulated, SimulatedFault

_TORCH = {
    "int1": torch.bool,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "uint16": torch.uint16,
    "uint32": torch.uint32,
    "uint64": torch.uint64,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}
_TRITON = {
    torch_type: next(
        t
        for t in vars(tl).values()
        if isinstance(t, tl.dtype) and not isinstance(t, tl.pointer_type) and t.name == name
    )
    for name, torch_type in _TORCH.items()
}


def torch_type(dtype: Any) -> torch.dtype:
    """Type of torch for one of Triton's."""
    return _TORCH[dtype.name]


def triton_type(dtype: torch.dtype) -> Any:
    """Type of Triton for one of torch's."""
    return _TRITON[dtype]


class Whole(int):
    """A whole number in registers. Division truncates, as in C."""

    dtype = tl.int32

    def to(self, dtype: Any, **_: object) -> Any:
        """Convert to another type."""
        if dtype.is_int():
            return Whole(int(self))
        return RegisterValue(torch.tensor(int(self), dtype=torch_type(dtype)))

    def __floordiv__(self, other: Any) -> Any:
        return _whole(_truncated, self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return _whole(_truncated, other, self)

    def __mod__(self, other: Any) -> Any:
        return _whole(_remainder, self, other)

    def __rmod__(self, other: Any) -> Any:
        return _whole(_remainder, other, self)


def _truncated(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _remainder(a: int, b: int) -> int:
    return a - b * _truncated(a, b)


def _whole(function: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        if b == 0:
            raise SimulatedFault("a whole number is divided by 0")
        return Whole(function(a, b))
    return NotImplemented


def _keeps_whole(name: str) -> None:
    original = getattr(int, name)

    def method(self: Any, other: Any) -> Any:
        found = original(self, other)
        return Whole(found) if type(found) is int else found

    setattr(Whole, name, method)


for _name in ("add", "sub", "mul", "and", "or", "xor", "lshift", "rshift"):
    _keeps_whole(f"__{_name}__")
    _keeps_whole(f"__r{_name}__")


class RegisterValue:
    """A tensor in registers, or a scalar: `data` is a torch tensor."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    @property
    def dtype(self) -> Any:
        """Type, as one of Triton's."""
        return triton_type(self.data.dtype)

    @property
    def shape(self) -> list[int]:
        """Sizes of the dimensions."""
        return list(self.data.shape)

    @property
    def type(self) -> Any:
        """Type of the tensor, as kernels ask for it; the layout is unknown."""
        return SimpleNamespace(
            shape=self.shape, element_ty=self.dtype, scalar=self.dtype, layout=None
        )

    @property
    def T(self) -> RegisterValue:  # noqa: N802
        """Transpose."""
        return RegisterValue(self.data.mT)

    def to(
        self, dtype: Any, fp_downcast_rounding: Any = None, bitcast: Any = False
    ) -> RegisterValue:
        """Convert to another type; from floating point to whole numbers by truncation. `bitcast`
        takes the same bits for another type of the same width.

        Raises:
            NotSimulated: Floating-point numbers are to be rounded otherwise than to the nearest.
        """
        if bitcast:
            return RegisterValue(self.data.contiguous().view(torch_type(dtype)))
        if fp_downcast_rounding not in (None, "rtne"):
            raise NotSimulated(f"rounding {fp_downcast_rounding!r}")
        return RegisterValue(self.data.to(torch_type(dtype)))

    def __getattr__(self, name: str) -> Any:
        if name not in METHODS:
            raise AttributeError(f"a tensor's {name}")
        return lambda *args, **kwargs: METHODS[name](self, *args, **kwargs)

    def __getitem__(self, index: Any) -> RegisterValue:
        return RegisterValue(self.data[index])

    def __bool__(self) -> bool:
        return bool(self.data)

    def __index__(self) -> int:
        return int(self.data)

    def __int__(self) -> int:
        return int(self.data)

    def __neg__(self) -> RegisterValue:
        return RegisterValue(-self.data)

    def __invert__(self) -> RegisterValue:
        return RegisterValue(~self.data)


def raw(value: Any) -> Any:
    """A torch tensor or a number; what is no value yet says so."""
    return value if value is None or isinstance(value, torch.Tensor | int | float) else value.data


def both(a: Any, b: Any) -> tuple[Any, Any]:
    """Two operands, in the type that Triton computes in; a plain number has no type of its own."""
    a, b = raw(a), raw(b)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        common = torch.promote_types(a.dtype, b.dtype)
        return a.to(common), b.to(common)
    return a, b


def _divided(a: Any, b: Any) -> Any:
    """`//`: truncating for whole numbers."""
    return torch.div(torch.as_tensor(a), b, rounding_mode="trunc")


def _binary(name: str, function: Callable[[Any, Any], Any]) -> None:
    def method(self: RegisterValue, other: Any) -> Any:
        return RegisterValue(function(*both(self, other)))

    def reflected(self: RegisterValue, other: Any) -> Any:
        return RegisterValue(function(*both(other, self)))

    setattr(RegisterValue, f"__{name}__", method)
    if name not in ("eq", "ne", "lt", "le", "gt", "ge"):
        setattr(RegisterValue, f"__r{name}__", reflected)


for _name in ("add", "sub", "mul", "truediv", "eq", "ne", "lt", "le", "gt", "ge", "lshift"):
    _binary(_name, getattr(operator, _name))
for _name, _function in (
    ("floordiv", _divided),
    ("mod", lambda a, b: torch.fmod(torch.as_tensor(a), b)),
    ("and", lambda a, b: torch.as_tensor(a) & b),
    ("or", lambda a, b: torch.as_tensor(a) | b),
    ("xor", lambda a, b: torch.as_tensor(a) ^ b),
    ("rshift", lambda a, b: torch.as_tensor(a) >> b),
):
    _binary(_name, _function)


class TensorPointer:
    """Addresses in a tensor's memory: its elements, and places in them."""

    def __init__(self, elements: torch.Tensor, at: Any, name: str) -> None:
        self.elements = elements  # flat: all of the storage
        self.at = at  # a number or an int64 tensor
        self.name = name

    @property
    def dtype(self) -> Any:
        """The type, which has `element_ty`."""
        return tl.pointer_type(triton_type(self.elements.dtype))

    def __add__(self, offset: Any) -> TensorPointer:
        offset = raw(offset)
        offset = offset.to(torch.int64) if isinstance(offset, torch.Tensor) else int(offset)
        return TensorPointer(self.elements, self.at + offset, self.name)

    __radd__ = __add__

    def __sub__(self, offset: Any) -> TensorPointer:
        return self.__add__(-raw(offset))

    def __getitem__(self, index: Any) -> TensorPointer:
        return TensorPointer(self.elements, self.at[index], self.name)

    def places(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Places and the mask, of one shape.

        Raises:
            SimulatedFault: A place that the mask does not leave out is outside of the memory.
        """
        wanted = torch.as_tensor(True if mask is None else raw(mask), dtype=torch.bool)
        at = torch.as_tensor(self.at)
        shape = (at + wanted).shape
        at, wanted = at.expand(shape), wanted.expand(shape)
        outside = wanted & ((at < 0) | (at >= self.elements.numel()))
        if bool(outside.any()):
            place = int(at[outside].reshape(-1)[0])
            raise SimulatedFault(
                f"element {place} of {self.name} is asked for, whose memory has "
                f"{self.elements.numel()}: is a mask missing?"
            )
        return torch.where(wanted, at, 0), wanted


def poison(data: torch.Tensor) -> None:
    """Fill with what shows in any result: NaN, or the largest number."""
    if data.dtype.is_floating_point and data.element_size() > 1:
        data.fill_(float("nan"))
    elif data.dtype.is_floating_point:
        data.view(torch.uint8).fill_(0x7F)
    elif data.dtype is torch.bool:
        data.fill_(True)
    else:
        data.fill_(torch.iinfo(data.dtype).max)


def sizes(shape: Sequence[Any]) -> list[int]:
    """A shape as plain numbers."""
    return [int(n) for n in shape]


def tensor_of(value: Any) -> torch.Tensor:
    """A value or number as a tensor."""
    value = raw(value)
    if isinstance(value, torch.Tensor):
        return value
    kind = torch.float32 if isinstance(value, float) else None
    return torch.tensor(int(value) if isinstance(value, Whole) else value, dtype=kind)


def unary(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], RegisterValue]:
    """A function of tensors as one of values, element by element."""
    return lambda x: RegisterValue(function(tensor_of(x)))


def _reduction(function: Callable[..., torch.Tensor]) -> Callable[..., RegisterValue]:
    def reduce(
        x: RegisterValue, axis: Any = None, keep_dims: Any = False, **_: object
    ) -> RegisterValue:
        data = x.data.reshape(-1) if axis is None else x.data
        dim = 0 if axis is None else int(axis)
        found = function(data, dim)
        return RegisterValue(found.unsqueeze(dim) if keep_dims else found)

    return reduce


def _sum(data: torch.Tensor, dim: int) -> torch.Tensor:
    """Sum in the type that Triton adds in."""
    kinds = {torch.bfloat16: torch.float32, torch.bool: torch.int32, torch.int8: torch.int32}
    return data.sum(dim, dtype=kinds.get(data.dtype, data.dtype))


def _flat(items: Sequence[Any]) -> Sequence[Any]:
    return items[0] if len(items) == 1 and isinstance(items[0], list | tuple) else items


METHODS: Mapping[str, Callable[..., Any]] = {
    "reshape": lambda x, *shape: RegisterValue(x.data.reshape(sizes(_flat(shape)))),
    "permute": lambda x, *order: RegisterValue(x.data.permute(sizes(_flat(order)))),
    "trans": lambda x: RegisterValue(x.data.mT),
    "expand_dims": lambda x, axis: RegisterValue(x.data.unsqueeze(int(axis))),
    "sum": _reduction(_sum),
    "max": _reduction(torch.amax),
    "min": _reduction(torch.amin),
    "exp": unary(torch.exp),
    "abs": unary(torch.abs),
    "cast": lambda x, *args, **kwargs: x.to(*args, **kwargs),
    "split": lambda x: tuple(map(RegisterValue, x.data.unbind(-1))),
}
"""Methods of tensors."""
