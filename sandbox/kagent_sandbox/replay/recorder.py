"""A recorder of what host code does to real tensors, as the same plan that tracing makes.

Each real tensor has a symbolic one beside it. What torch's dispatcher and the launchers see is done
for real, and then recorded with the symbolic tensors by the very code that traces.
"""

# ruff: noqa: SLF001 - a storage has no other identity

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from kagent_sandbox.builder import policy
from kagent_sandbox.builder.binary.inspect import kernel_info
from kagent_sandbox.builder.policy import PolicyError
from kagent_sandbox.builder.trace import dispatch
from kagent_sandbox.builder.trace import fills_and_copies as contents
from kagent_sandbox.builder.trace.kernel_launches import plan_argument
from kagent_sandbox.builder.trace.meta import schema_of
from kagent_sandbox.builder.trace.recorder import Recorder
from kagent_sandbox.builder.trace.symbolic import SymbolicTensor
from kagent_sandbox.data.operation_schema import is_write
from kagent_sandbox.data.plan import Op, TensorRef
from kagent_sandbox.runtime.launches import Observed

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


_READS = frozenset(
    {
        *(torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__),
        *(torch.Tensor.tolist, torch.Tensor.item),
    }
)
"""Ways to values, and to memory that others then write, that the dispatcher does not see."""


class RealRecorder(Recorder):
    """Records operations on real tensors of `device`; see `Recorder` for the arguments.

    To be made and used in the thread that runs host code.
    """

    def __init__(
        self, device: torch.device, target: str, allow: Sequence[str], mutates: Sequence[str]
    ) -> None:
        super().__init__(device, target, allow, mutates)
        self.observed: list[Observed] = []
        self._beside: dict[int, torch.UntypedStorage] = {}  # by identity of the real storage
        self._held: list[torch.Tensor] = []  # else an identity comes twice
        self.quiet = False
        self._stream = self._current_stream()

    def argument(self, name: str, real: torch.Tensor) -> None:
        """A tensor that host code is given."""
        with self.silence():
            elements = real.untyped_storage().nbytes() // real.itemsize
            whole = torch.empty(elements, dtype=real.dtype, device=torch.device("meta"))
            meta = whole.as_strided(real.shape, real.stride(), real.storage_offset())
            self._link(real, self.input(name, meta))

    def add(self, op: Op) -> None:
        """Append one operation; all are on one stream."""
        if self._current_stream() != self._stream:
            self.refuse(
                PolicyError(
                    "host code uses another stream", "launch in order on the current stream"
                )
            )
        super().add(op)

    def tensor(self, tensor: torch.Tensor) -> TensorRef:
        """Return the place of a real tensor, or of a symbolic one."""
        return super().tensor(self._symbolic(tensor))

    def saw_launch(self, launch: Observed) -> None:
        """Record a CUDA or C++ kernel's launch."""
        with self.silence():
            info = kernel_info(launch.binary, launch.symbol, launch.source.language)
            args = [plan_argument(v, self.pointer) for v in launch.arguments]
            self.launch(info, launch.binary, args, launch.launching)
        self.observed.append(launch)

    def saw_operation(self, func: Any, args: Args, kwargs: Kwargs, result: Any) -> None:
        """Record an operation of torch, unless it only makes a view or memory.

        Raises:
            PolicyError: It is none that a plan may hold.
        """
        given = [t for t in tree_flatten((args, kwargs))[0] if self.here(t)]
        made = [t for t in tree_flatten(result)[0] if isinstance(t, torch.Tensor)]
        if self.quiet or not (given or any(map(self.here, made))):
            return
        name = policy.base_name(func.name())
        if name in policy.READS or (given and made and not any(map(self.here, made))):
            self.refuse(policy.reads_value(f"torch.{name}"))
        if name in policy.ALLOCATE or _is_view(func):
            return
        with self.silence():
            if name in {"copy_", "fill_"} and self._is_number(args[1]):
                # assigned to a part: torch makes a tensor of it first
                func, name = torch.ops.aten.fill_.Scalar, "fill_"
                args, kwargs = (args[0], args[1].item()), {}
            own_args, own_kwargs = tree_map(self._own, (args, kwargs))
            own = dispatch.record(self, func, name, own_args, own_kwargs)
            for real, symbolic in zip(tree_flatten(result)[0], tree_flatten(own)[0], strict=True):
                if isinstance(real, torch.Tensor) and isinstance(symbolic, SymbolicTensor):
                    self._link(real, symbolic)

    def saw_values(self, real: torch.Tensor) -> None:
        """Record a tensor that host code made from Python's values."""
        with self.silence():
            self._link(real, contents.constant(self, real.cpu()))

    @contextlib.contextmanager
    def silence(self) -> Iterator[None]:
        """Do not record what the recorder itself does with tensors."""
        before, self.quiet = self.quiet, True
        try:
            yield
        finally:
            self.quiet = before

    def here(self, value: object) -> bool:
        """Whether it is a tensor on the device that is recorded."""
        return isinstance(value, torch.Tensor) and value.device.type == self.device.type

    def _current_stream(self) -> int:
        gpu = self.device.type == "cuda"
        return int(torch.cuda.current_stream(self.device).cuda_stream) if gpu else 0

    def _is_number(self, value: object) -> bool:
        """Whether it is a tensor of one value that host code has not made itself."""
        if not isinstance(value, torch.Tensor) or value.dim():
            return False
        return value.untyped_storage()._cdata not in self._beside

    def _own(self, value: Any) -> Any:
        return self._symbolic(value) if self.here(value) else value

    def _symbolic(self, real: torch.Tensor) -> torch.Tensor:
        if isinstance(real, SymbolicTensor) or not self.here(real):
            return real
        with self.silence():
            storage = real.untyped_storage()
            beside = self._beside.get(storage._cdata)
            if beside is None:
                nbytes = storage.nbytes()
                whole = torch.empty(nbytes, dtype=torch.uint8, device=torch.device("meta"))
                beside = self._beside[storage._cdata] = whole.untyped_storage()
                self._held.append(real)
            meta = torch.empty(0, dtype=real.dtype, device=torch.device("meta"))
            meta.set_(beside, real.storage_offset(), real.shape, real.stride())
            symbolic = self.wrap(meta)
            self._held.append(symbolic)
            return symbolic

    def _link(self, real: torch.Tensor, symbolic: SymbolicTensor) -> None:
        self._beside.setdefault(real.untyped_storage()._cdata, symbolic.meta.untyped_storage())
        self._held += [real, symbolic]


def _is_view(func: Any) -> bool:
    """Whether an operation neither writes nor makes memory: see `dispatch.record`."""
    schema = schema_of(func)
    writes = any(map(is_write, schema.arguments))
    views = any(r.alias_info is not None for r in schema.returns)
    return not writes and (views or policy.base_name(func.name()) in dispatch.VIEWS)


class Operations(dispatch.BelowAutograd):  # type: ignore[no-untyped-call]
    """Shows a recorder every operation below autograd, once it is done."""

    def __init__(self, recorder: RealRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._recorder.saw_operation(func, args, kwargs or {}, result)
        return result


class Values(TorchFunctionMode):
    """Shows a recorder what `torch.tensor` and its kin make, which work below the dispatcher; and
    refuses what gives values away there.
    """

    def __init__(self, recorder: RealRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        recorder = self._recorder
        if func in _READS and recorder.here(args[0]) and not recorder.quiet:
            recorder.refuse(policy.reads_value(f".{func.__name__}()"))
        if func not in dispatch.FROM_VALUES or (args and recorder.here(args[0])):
            return func(*args, **kwargs)
        with recorder.silence():
            result = func(*args, **kwargs)
        if recorder.here(result):
            recorder.saw_values(result)
        return result
