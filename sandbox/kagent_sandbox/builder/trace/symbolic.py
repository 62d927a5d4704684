"""Symbolic tensors: known shape, strides and dtype, a claimed device, and no values.

Underneath is a `meta` tensor. The storage behind it is its buffer, so views and in-place and `out=`
forms find the right bytes without a list of view operations. A buffer is freed when the last tensor
over it dies.
"""

# ruff: noqa: ARG002, D102, SLF001 - signatures, meanings and private parts are torch.Tensor's
# mypy: disable-error-code="override,assignment,arg-type,return-value"

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, Protocol, Self

import torch

from kagent_sandbox.builder.policy import PolicyError, reads_value

ADDRESS_BITS = 44
ADDRESS_TAG = 0x155 << 54
"""A symbolic address is the tag | (buffer + 1) << 44 | byte offset: aligned, disjoint, and hardly a
number, nor two of 32 bits beside each other.
"""


class CurrentTrace(Protocol):
    """The part of a recorder that symbolic tensors use."""

    device: torch.device

    def refuse(self, error: PolicyError) -> NoReturn:
        """Raise the error, even where host code catches it."""


_current: CurrentTrace | None = None


def current_trace() -> CurrentTrace | None:
    """The trace in progress; None outside of one."""
    return _current


def set_current(trace: CurrentTrace | None) -> None:
    """Begin or end a trace.

    Raises:
        RuntimeError: A trace is already in progress.
    """
    global _current  # one trace at a time in a process
    if trace is not None and _current is not None:
        raise RuntimeError("a trace is already in progress")
    _current = trace


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float16` -> `float16`."""
    return str(dtype).removeprefix("torch.")


class Token:
    """Held by every tensor over a buffer; its death is the buffer's."""

    __slots__ = ("__weakref__",)


Dispatch = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class SymbolicTensor(torch.Tensor):
    """A tensor of known shape, strides and dtype, and no values."""

    meta: torch.Tensor
    buffer: int
    token: Token
    on_operation: ClassVar[Dispatch]  # set by `trace`
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls: type[Self], meta: torch.Tensor, buffer: int, token: Token) -> Self:
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.size(),
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device="meta",
        )
        self.meta, self.buffer, self.token = meta, buffer, token
        return self

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return cls.on_operation(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:
        return _trace().device

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def is_cpu(self) -> bool:
        return self.device.type == "cpu"

    is_meta = False

    def get_device(self) -> int:
        return 0 if self.is_cuda else -1

    def data_ptr(self) -> int:
        return (
            ADDRESS_TAG
            + (self.buffer + 1 << ADDRESS_BITS)
            + self.meta.storage_offset() * self.itemsize
        )

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.meta.untyped_storage()

    def cuda(self, device: object = None, *args: object, **kwargs: object) -> torch.Tensor:
        return self if self.is_cuda else _refuse_move("cuda")

    def cpu(self, *args: object, **kwargs: object) -> torch.Tensor:
        return self if self.is_cpu else _refuse_read(".cpu()")

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], torch.Tensor):
            other, args = args[0], args[1:]
            args = (other.device, other.dtype, *args)
        args = tuple(torch.device(a) if isinstance(a, str) else a for a in args)
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        copy = bool(kwargs.get("copy", args[3] if len(args) > 3 else False))
        if device is not None and device.type != self.device.type:
            if device.type == "cpu":
                _refuse_read(".to('cpu')")
            _refuse_move(device.type)
        kept: dict[str, Any] = {"copy": copy}
        if memory_format is not None:
            kept["memory_format"] = memory_format
        return super().to(dtype or self.dtype, **kept)

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(value, bool | int | float):
            self[index].fill_(value)  # torch would make a tensor of the number first
        else:
            super().__setitem__(index, value)

    def item(self) -> Any:
        _refuse_read(".item()")

    def tolist(self) -> Any:
        _refuse_read(".tolist()")

    def numpy(self, **kwargs: Any) -> Any:
        _refuse_read(".numpy()")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        _refuse_read("conversion to a numpy array")

    def __bool__(self) -> bool:
        _refuse_read("truth of a tensor: if, while, and, or, assert")

    def __float__(self) -> float:
        _refuse_read("float(tensor)")

    def __int__(self) -> int:
        _refuse_read("int(tensor)")

    def __index__(self) -> int:
        _refuse_read("a tensor used as an index or size")

    def __complex__(self) -> complex:
        _refuse_read("complex(tensor)")

    def __contains__(self, element: object) -> bool:
        _refuse_read("`in` on a tensor")

    def __str__(self) -> str:
        _refuse_read("printing or formatting a tensor")

    def __format__(self, spec: str) -> str:
        _refuse_read("printing or formatting a tensor")

    def __repr__(self, **kwargs: Any) -> str:
        return f"tensor(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    def backward(self, *args: Any, **kwargs: Any) -> None:
        _trace().refuse(
            PolicyError(
                ".backward() runs torch's autograd",
                "compute the gradient in a kernel and return it",
            )
        )

    def __reduce_ex__(self, proto: object) -> NoReturn:
        _refuse_read("pickling a tensor")

    def __deepcopy__(self, memo: object) -> torch.Tensor:
        return self.clone()


def outlived() -> PolicyError:
    """The refusal of a tensor that is used after its call."""
    return PolicyError(
        "a tensor outlives the call that made it", "keep tensors local to the entry function"
    )


def _trace() -> CurrentTrace:
    if _current is None:
        raise outlived()
    return _current


def _refuse_read(what: str) -> NoReturn:
    _trace().refuse(reads_value(what))


def _refuse_move(device: str) -> NoReturn:
    _trace().refuse(PolicyError(f"a tensor is moved to {device!r}", "keep everything on x.device"))
