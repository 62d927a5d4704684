"""Record of torch's operations in a step, below autograd, with their tensors and modules.

A tensor is known by its storage, by how often that was written before, and by its place in it, so
that what autograd saves and gives back later is the same value.
"""

# ruff: noqa: SLF001 - torch names what a mode needs with underscores

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from kagent_sandbox.data.operation_schema import is_write
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.module_tracker import ModuleTracker

Phase: TypeAlias = Literal["forward", "backward", "optimizer"]
LABEL = "kagent#"
"""Beginning of the profiler's name of an operation; its index follows."""
OUTSIDE = "(no module)"
_SAMPLED = 4096  # elements of a tensor that its statistics are taken from
_QUANTILES = 17


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor at one moment. Two with the same fields hold the same numbers."""

    storage: int  # number of the storage in the recording
    version: int  # writes to the storage before
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    device: str

    @property
    def nbytes(self) -> int:
        """Bytes of its own elements; an expanded dimension counts once."""
        count = getattr(torch, self.dtype).itemsize
        for size, stride in zip(self.shape, self.stride, strict=True):
            count *= size if stride or not size else 1
        return int(count)


@dataclass(frozen=True, slots=True)
class Op:
    """One call of an operation. `args` and `kwargs` have `Value`s where it had tensors."""

    name: str  # "aten.mul.Tensor"
    module: str  # its path, or OUTSIDE
    phase: Phase
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    result: Any  # a `Value`, or a list of them and None
    writes: Sequence[Value]  # arguments that it writes to, as they are afterwards
    is_view: bool
    tags: frozenset[str]
    flops: float
    opaque: bool  # it has tensors that are no plain ones

    @property
    def results(self) -> list[Value]:
        """Tensors among its results."""
        return [v for v in tree_leaves(self.result) if isinstance(v, Value)]

    @property
    def reads(self) -> Iterator[Value]:
        """Tensors among its arguments."""
        return (v for v in tree_leaves((self.args, dict(self.kwargs))) if isinstance(v, Value))


@dataclass
class Recording:
    """One step: its operations in order, and what lives on after it."""

    ops: list[Op] = field(default_factory=list)
    alive: frozenset[int] = frozenset()  # storages that outlive the step
    statistics: dict[Value, dict[str, Any]] = field(default_factory=dict)


class StepRecorder(TorchDispatchMode):
    """Records a step while it is entered.

    Args:
        in_optimizer: Says whether an optimizer is stepping.
        statistics: Whether to sample the values of all arguments, which takes time.
    """

    def __init__(self, in_optimizer: Callable[[], bool], *, statistics: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = Recording()
        self._in_optimizer, self._statistics = in_optimizer, statistics
        self._modules: Any = ModuleTracker()
        self._storages: dict[int, tuple[int, StorageWeakRef]] = {}
        self._versions: dict[int, int] = {}

    def __enter__(self) -> Any:
        self._modules.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._modules.__exit__(*error)
        refs = self._storages.values()
        self.recording.alive = frozenset(
            number
            for number, ref in refs
            if not ref.expired()  # type: ignore[no-untyped-call]
        )
        self._storages = {}

    def resume(self) -> None:
        """See operations again after the end of a context that was open at `__enter__`.

        The end of `torch.inference_mode` brings back the dispatch keys of its beginning, which did
        not have this mode's.
        """
        super().__exit__(None, None, None)  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "profiler":
            return func(*args, **kwargs)  # a mark, such as those of torch's optimizers
        if torch.is_inference_mode_enabled() and func._can_decompose():
            # Autograd is not there to take it apart, as it does in training.
            super().__enter__()  # type: ignore[no-untyped-call]
            try:
                return func.decompose(*args, **kwargs)
            finally:
                super().__exit__(None, None, None)  # type: ignore[no-untyped-call]
        taken, named = _map(self._value, args), _map(self._value, kwargs)
        if self._statistics:
            self._sample((args, kwargs))
        with record_function(f"{LABEL}{len(self.recording.ops)}"):
            result = func(*args, **kwargs)
        written = self._written(func, args, kwargs)
        for tensor in written:
            value = self._value(tensor)
            if isinstance(value, Value):
                self._versions[value.storage] = value.version + 1
        made = _map(self._value, result)
        counter = flop_registry.get(func._overloadpacket)
        self.recording.ops.append(
            Op(
                name=str(func),
                module=self._module(),
                phase=self._phase(),
                args=taken,
                kwargs=named,
                result=made,
                writes=[v for t in written if isinstance(v := self._value(t), Value)],
                is_view=bool(func.is_view) or func._schema.name == "aten::_unsafe_view",
                tags=frozenset(tag.name for tag in func.tags),
                flops=float(counter(*args, **kwargs, out_val=result)) if counter else 0.0,
                opaque=any(isinstance(v, _Opaque) for v in tree_leaves((taken, named, made))),
            )
        )
        return result

    def _value(self, tensor: torch.Tensor) -> Value | _Opaque:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return _OPAQUE  # sparse, or of a subclass that has none
        known = self._storages.get(storage._cdata)
        if known is None:  # the reference keeps the address from being used again
            known = len(self._storages), StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._storages[storage._cdata] = known
        return Value(
            known[0],
            self._versions.get(known[0], 0),
            int(tensor.storage_offset()),
            tuple(map(int, tensor.shape)),
            tuple(map(int, tensor.stride())),
            str(tensor.dtype).removeprefix("torch."),
            tensor.device.type,
        )

    @staticmethod
    def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
        if not func._schema.is_mutable:
            return []
        found: list[Any] = []
        for i, argument in enumerate(func._schema.arguments):
            if is_write(argument):
                given = args[i] if i < len(args) else kwargs.get(argument.name)
                found += tree_leaves(given)
        return [t for t in found if isinstance(t, torch.Tensor)]

    def _module(self) -> str:
        if self._in_optimizer():
            return OUTSIDE
        inside = self._modules.parents - {"Global"}
        return max(inside, key=lambda name: name.count("."), default=OUTSIDE)

    def _phase(self) -> Phase:
        if self._in_optimizer():
            return "optimizer"
        return "backward" if self._modules.is_bw else "forward"

    def _sample(self, given: Any) -> None:
        for tensor in tree_leaves(given):
            if isinstance(tensor, torch.Tensor):
                value = self._value(tensor)
                if isinstance(value, Value) and value not in self.recording.statistics:
                    self.recording.statistics[value] = statistics_of(tensor)


class _Opaque:
    """Stands for a tensor of which nothing is known."""


_OPAQUE = _Opaque()


def _map(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Rebuild tuples, lists and dicts with something else in the place of each tensor."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {k: _map(function, v) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return [_map(function, v) for v in tree]
    return tree


def statistics_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Statistics of a tensor's values, from a regular sample of at most some thousand.

    Returns:
        `quantiles` of its finite values, from the least to the largest, and the shares of values
        that are `nan`, `inf` and `-inf` (none: no such key). Nothing for an empty tensor and for
        dtypes without an order.
    """
    if tensor.numel() == 0 or tensor.is_complex() or tensor.device.type == "meta":
        return {}
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach().flatten()
    sample = flat[:: max(1, flat.numel() // _SAMPLED)].double().cpu()
    finite = sample[sample.isfinite()].sort().values
    found: dict[str, Any] = {}
    if finite.numel():
        places = torch.linspace(0, finite.numel() - 1, _QUANTILES, dtype=torch.float64)
        picked: list[float] = finite[places.round().long()].tolist()
        if not tensor.is_floating_point():
            picked[0], picked[-1] = (float(v) for v in torch.aminmax(tensor.detach().long()))
        found["quantiles"] = picked
    for name, share in (
        ("nan", sample.isnan()),
        ("inf", sample == float("inf")),
        ("-inf", sample == -float("inf")),
    ):
        if share.any():
            found[name] = float(share.double().mean())
    return found


def plain_path(module: str) -> str:
    """A module's path with `*` for the numbers of layers: GPT.blocks.*.norm."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", module)
