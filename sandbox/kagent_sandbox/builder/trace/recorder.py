"""The recorder: collects what host code does to symbolic tensors, in order, as a plan."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Sequence
from dataclasses import asdict
from typing import NoReturn, Self

import torch

from kagent_sandbox.builder.binary.static_memory import excess_static
from kagent_sandbox.builder.policy import PolicyError
from kagent_sandbox.builder.trace.symbolic import (
    ADDRESS_BITS,
    ADDRESS_TAG,
    SymbolicTensor,
    Token,
    current_trace,
    dtype_name,
    outlived,
    set_current,
)
from kagent_sandbox.data.plan import (
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
from kagent_sandbox.data.verdict import Status
from kagent_sandbox.runtime.launches import Launching


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
        self._tokens: weakref.WeakValueDictionary[int, Token] = weakref.WeakValueDictionary()
        self._thread = threading.get_ident()
        self._closed = False

    # -- while recording ---------------------------------------------------------------------

    def __enter__(self) -> Self:
        set_current(self)
        return self

    def __exit__(self, *exc: object) -> None:
        set_current(None)
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
        buffer = self._buffer_of.get(storage._cdata)  # noqa: SLF001
        if buffer is None:
            buffer = self._new_buffer(storage, meta, name)
        self._refuse_outside(meta, self.buffers[buffer].nbytes)
        token = self._tokens.get(buffer)
        if token is None:
            token = self._tokens[buffer] = Token()
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
        self._buffer_of[storage._cdata] = buffer  # noqa: SLF001
        self.buffers.append(Buffer(buffer, "input" if name else "scratch", nbytes, name))
        if name is None:
            gc.collect()  # cycles die at points that depend on the source alone
            self.add(Alloc(buffer))
        return buffer

    def _refuse_outside(self, meta: torch.Tensor, nbytes: int) -> None:
        """Views of `meta` tensors may leave their storage: torch looks only where there are values.

        Every plan is checked for it again, where it would be a forgery.
        """
        last = sum((n - 1) * s for n, s in zip(meta.shape, meta.stride(), strict=True))
        needed = (int(meta.storage_offset()) + last + 1) * meta.itemsize
        if meta.numel() and needed > nbytes:
            self.refuse(
                PolicyError(
                    f"a view of shape {list(meta.shape)} and strides {list(meta.stride())} from "
                    f"element {meta.storage_offset()} needs {needed} bytes, and what it views has "
                    f"{nbytes}",
                    "stay inside of the tensor",
                    status=Status.RUNTIME_ERROR,
                )
            )

    def _release(self, buffer: int) -> None:
        if not self._closed and self.buffers[buffer].kind == "scratch":
            self.ops.append(Free(buffer))

    def refuse_older(self, tensor: SymbolicTensor) -> None:
        """Refuse a tensor that an earlier call in this process has left behind."""
        if self._tokens.get(tensor.buffer) is not tensor.token:
            self.refuse(outlived())

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
        self.refuse_older(tensor)
        meta = tensor.meta
        if meta.dim() > MAX_DIMS:
            self.refuse(
                PolicyError(f"a view of {meta.dim()} dimensions", f"at most {MAX_DIMS} dimensions")
            )
        return TensorRef(
            tensor.buffer,
            int(meta.storage_offset()),
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
        return self.pointer_of_address(value) is not None

    def pointer_of_address(self, value: int) -> Pointer | None:
        """Return the target of an address that `data_ptr()` gave out; None if it is another."""
        buffer, offset = divmod(value - ADDRESS_TAG, 1 << ADDRESS_BITS)
        return Pointer(buffer - 1, offset) if 0 < buffer <= len(self.buffers) else None

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
        args: Sequence[Arg],
        how: Launching,
        name: str | None = None,
    ) -> None:
        """Record one launch. `name` is the candidate's own of the kernel, for messages."""
        known = kernel.hash in self.binaries
        if not known and (excess := excess_static(binary, name or kernel.name)):
            self.refuse(PolicyError(*excess))
        self.kernels[kernel.hash] = kernel
        self.binaries[kernel.hash] = binary
        self.add(Launch(kernel=kernel.hash, args=tuple(args), **asdict(how)))

    def plan(self, outputs: Sequence[TensorRef]) -> Plan:
        """The recorded plan."""
        return Plan(
            target=self.target,
            buffers=tuple(self.buffers),
            ops=tuple(self.ops),
            outputs=tuple(outputs),
            kernels=tuple(self.kernels.values()),
        )


def current_recorder() -> Recorder | None:
    """The recorder of the trace in progress; None outside of a trace."""
    trace = current_trace()
    return trace if isinstance(trace, Recorder) else None
