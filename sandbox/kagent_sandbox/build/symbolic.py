"""Symbolic tensors, and the recorder that turns what host code does to them into a plan.

A symbolic tensor is a `meta` tensor that claims the target's device: shapes, strides and dtypes are real, values
do not exist. The storage behind it is its buffer, so views and in-place and `out=` forms find the right bytes
without a list of view operations. A buffer is freed when the last tensor over it dies.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn

import torch

from kagent_sandbox.build.policy import PolicyError, reads_value
from kagent_sandbox.plan import (
    ITEMSIZE,
    MAX_BUFFERS,
    MAX_DIMS,
    MAX_OPS,
    MAX_SIZE,
    Alloc,
    Arg,
    Buffer,
    Free,
    KernelInfo,
    Launch,
    Op,
    Plan,
    Pointer,
    TensorRef,
)
from kagent_sandbox.verdict import Status

_ADDRESS_BITS = 44
"""A symbolic address is (buffer + 1) << 44 | byte offset: aligned, disjoint, and easy to recognise."""

_current: Recorder | None = None


def current_recorder() -> Recorder | None:
    """The recorder of the trace in progress; None outside of a trace."""
    return _current


class Recorder:
    """Collects the operations of one case in order.

    Args:
        device: What tensors claim to be on.
        target: "cpu", "sm_90a", ...
        allow: Torch operations that the task allows beyond the ones always allowed.
        mutates: Names of the arguments that host code may write.
    """

    def __init__(
        self,
        device: torch.device,
        target: str,
        allow: Sequence[str] = (),
        mutates: Sequence[str] = (),
        compile_limit_s: float = 20.0,
    ) -> None:
        self.device = device
        self.target = target
        self.allow = tuple(allow)
        self.mutates = frozenset(mutates)
        self.compile_limit_s = compile_limit_s
        self.buffers: list[Buffer] = []
        self.ops: list[Op] = []
        self.kernels: dict[str, KernelInfo] = {}
        self.binaries: dict[str, bytes] = {}
        self.violation: PolicyError | None = None  # the first; host code cannot swallow it
        self._storages: list[torch.UntypedStorage] = []  # kept, so that their addresses stay unique
        self._buffer_of: dict[int, int] = {}
        self._tokens: weakref.WeakValueDictionary[int, _Token] = weakref.WeakValueDictionary()
        self._thread = threading.get_ident()
        self._closed = False

    # -- while recording ---------------------------------------------------------------------

    def __enter__(self) -> Recorder:
        global _current  # noqa: PLW0603 - one trace at a time in a process
        assert _current is None, "a trace is already in progress"
        _current = self
        return self

    def __exit__(self, *exc: object) -> None:
        global _current  # noqa: PLW0603
        _current = None
        self._closed = True

    def refuse(self, error: PolicyError) -> NoReturn:
        """Raise, and remember: a refusal stands even when host code catches it."""
        if self.violation is None:
            self.violation = error
        raise error

    def add(self, op: Op) -> None:
        """Append one operation."""
        if threading.get_ident() != self._thread:
            self.refuse(
                PolicyError(
                    "a second thread uses tensors",
                    "launch everything from the entry function's own thread",
                )
            )
        if len(self.ops) >= MAX_OPS:
            self.refuse(
                PolicyError(
                    f"more than {MAX_OPS} operations in one call",
                    "use larger chunks, or loop inside of a kernel",
                    status=Status.RESOURCE_LIMIT,
                )
            )
        self.ops.append(op)

    def input(self, name: str, meta: torch.Tensor) -> SymbolicTensor:
        """A tensor that host code receives."""
        return self._wrap(meta, name)

    def wrap(self, meta: torch.Tensor) -> SymbolicTensor:
        """A tensor over a `meta` storage: a view where the storage is known, else an allocation."""
        return self._wrap(meta, None)

    def _wrap(self, meta: torch.Tensor, name: str | None) -> SymbolicTensor:
        storage = meta.untyped_storage()
        buffer = self._buffer_of.get(storage._cdata)
        if buffer is None:
            buffer = self._new_buffer(storage, meta, name)
        token = self._tokens.get(buffer)
        if token is None:
            token = self._tokens[buffer] = _Token()
            weakref.finalize(token, self._release, buffer).atexit = False
        return SymbolicTensor(meta, buffer, token)

    def _new_buffer(
        self, storage: torch.UntypedStorage, meta: torch.Tensor, name: str | None
    ) -> int:
        buffer, nbytes = len(self.buffers), storage.nbytes()
        if nbytes > MAX_SIZE or buffer >= MAX_BUFFERS:
            self.refuse(
                PolicyError(
                    f"allocation number {buffer} of {nbytes} bytes",
                    f"at most {MAX_BUFFERS} buffers of {MAX_SIZE} bytes",
                    status=Status.RESOURCE_LIMIT,
                )
            )
        if dtype_name(meta.dtype) not in ITEMSIZE:
            self.refuse(
                PolicyError(
                    f"tensors of {meta.dtype} are not supported",
                    f"use one of {', '.join(sorted(ITEMSIZE))}",
                )
            )
        self._storages.append(storage)
        self._buffer_of[storage._cdata] = buffer
        self.buffers.append(Buffer(buffer, "input" if name else "scratch", nbytes, name))
        if name is None:
            self.add(Alloc(buffer))
        return buffer

    def _release(self, buffer: int) -> None:
        if not self._closed and self.buffers[buffer].kind == "scratch":
            self.ops.append(Free(buffer))

    # -- what languages call -----------------------------------------------------------------

    def tensor(self, tensor: torch.Tensor) -> TensorRef:
        """The (buffer, offset, shape, strides, dtype) of a symbolic tensor."""
        if not isinstance(tensor, SymbolicTensor):
            self.refuse(
                PolicyError(
                    f"a {type(tensor).__name__} on {tensor.device} is used where a tensor on "
                    f"{self.device} is needed",
                    "allocate it with device=x.device",
                )
            )
        meta = tensor._meta
        if meta.dim() > MAX_DIMS:
            self.refuse(
                PolicyError(f"a view of {meta.dim()} dimensions", f"at most {MAX_DIMS} dimensions")
            )
        return TensorRef(
            tensor._buffer,
            meta.storage_offset(),
            tuple(meta.shape),
            tuple(meta.stride()),
            dtype_name(meta.dtype),
        )

    def pointer(self, tensor: torch.Tensor) -> Pointer:
        """Address of a symbolic tensor's first element."""
        ref = self.tensor(tensor)
        return Pointer(ref.buffer, ref.offset * ITEMSIZE[ref.dtype])

    def is_address(self, value: int) -> bool:
        """Whether a number is an address that `data_ptr()` gave out."""
        return 0 < value >> _ADDRESS_BITS <= len(self.buffers)

    def check_write(self, ref: TensorRef) -> TensorRef:
        """Refuse a write by host code to an argument that the task does not let it change."""
        buffer = self.buffers[ref.buffer]
        if buffer.kind == "input" and buffer.name not in self.mutates:
            self.refuse(
                PolicyError(
                    f"host code writes the input {buffer.name!r}",
                    "write to a new tensor (torch.empty_like); inputs must stay as they are",
                )
            )
        return ref

    def launch(
        self,
        kernel: KernelInfo,
        binary: bytes,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Arg],
        *,
        shared: int = 0,
        cluster: Sequence[int] | None = None,
        cooperative: bool = False,
        pdl: bool = False,
    ) -> None:
        """Record one launch. `grid` counts blocks (not clusters), `shared` is dynamic, in bytes."""
        self.kernels[kernel.hash] = kernel
        self.binaries[kernel.hash] = binary
        self.add(
            Launch(
                kernel=kernel.hash,
                grid=three(grid),
                block=three(block),
                args=tuple(args),
                shared=shared,
                cluster=None if cluster is None else three(cluster),
                cooperative=cooperative,
                pdl=pdl,
            )
        )

    def plan(self, outputs: Sequence[TensorRef]) -> Plan:
        """What was recorded."""
        return Plan(
            target=self.target,
            buffers=tuple(self.buffers),
            ops=tuple(self.ops),
            outputs=tuple(outputs),
            kernels=tuple(self.kernels.values()),
        )


def three(sizes: Sequence[int]) -> tuple[int, int, int]:
    """Up to three sizes, padded with ones."""
    x, y, z = (*(int(s) for s in sizes), 1, 1)[:3]
    return x, y, z


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float16` -> `float16`."""
    return str(dtype).removeprefix("torch.")


class _Token:
    """Held by every tensor over a buffer; its death is the buffer's."""

    __slots__ = ("__weakref__",)


Dispatch = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class SymbolicTensor(torch.Tensor):
    """A tensor of known shape, strides and dtype, and no values."""

    _meta: torch.Tensor
    _buffer: int
    _token: _Token
    dispatch: ClassVar[Dispatch]  # set by `trace`
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, meta: torch.Tensor, buffer: int, token: _Token) -> SymbolicTensor:  # noqa: PYI034
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.size(),
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device="meta",
        )
        self._meta, self._buffer, self._token = meta, buffer, token
        return self

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return cls.dispatch(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return _recorder().device

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return self.device.type == "cuda"

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return self.device.type == "cpu"

    is_meta = False  # type: ignore[assignment]

    def get_device(self) -> int:  # type: ignore[override]
        return 0 if self.is_cuda else -1

    def data_ptr(self) -> int:
        return (self._buffer + 1 << _ADDRESS_BITS) + self._meta.storage_offset() * self.itemsize

    def untyped_storage(self) -> torch.UntypedStorage:
        return self._meta.untyped_storage()

    def cuda(self, device: object = None, *args: object, **kwargs: object) -> torch.Tensor:  # type: ignore[override]
        if self.is_cuda:
            return self
        _refuse_move("cuda")

    def cpu(self, *args: object, **kwargs: object) -> torch.Tensor:  # type: ignore[override]
        if self.is_cpu:
            return self
        return _refuse_read(".cpu()")

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        if args and isinstance(args[0], torch.Tensor):
            other, args = args[0], args[1:]
            args = (other.device, other.dtype, *args)
        args = tuple(torch.device(a) if isinstance(a, str) else a for a in args)
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        copy = bool(kwargs.get("copy", args[3] if len(args) > 3 else False))
        if device is not None and device.type != self.device.type:
            if device.type == "cpu":
                _refuse_read(".to('cpu')")
            _refuse_move(device.type)
        kept: dict[str, Any] = {"copy": copy}
        if memory_format is not None:
            kept["memory_format"] = memory_format
        return super().to(dtype or self.dtype, **kept)

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

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"tensor(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    def backward(self, *args: Any, **kwargs: Any) -> None:
        _recorder().refuse(
            PolicyError(
                ".backward() runs torch's autograd",
                "compute the gradient in a kernel and return it",
            )
        )

    def __reduce_ex__(self, proto: object) -> NoReturn:
        _refuse_read("pickling a tensor")

    def __deepcopy__(self, memo: object) -> torch.Tensor:
        return self.clone()


def _recorder() -> Recorder:
    recorder = current_recorder()
    if recorder is None:
        raise PolicyError(
            "a tensor outlives the call that made it", "keep tensors local to the entry function"
        )
    return recorder


def _refuse_read(what: str) -> NoReturn:
    _recorder().refuse(reads_value(what))


def _refuse_move(device: str) -> NoReturn:
    _recorder().refuse(
        PolicyError(f"a tensor is moved to {device!r}", "keep everything on x.device")
    )
