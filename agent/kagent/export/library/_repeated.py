"""Calls of Triton kernels, repeated without their host function.

A host function decides by its arguments' shapes, strides and dtypes what it allocates and launches:
it was checked as a plan, which knows nothing else of them. In Python, and with all that Triton asks
before a launch, this can take longer than a kernel. So the second call of a kind is recorded, its
allocations, views and launches. Later ones do the same with their own tensors.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

LANGUAGES = ("triton", "gluon")
"""Languages of kernels that Triton launches."""

_Slots = list[torch.Tensor]
_Step = Callable[[_Slots, int], object]

_TRITON = "triton.runtime.jit"
_ALIGNMENT = 512  # bytes: of torch's allocator; a host function may look at an address
_aten = torch.ops.aten
_ALLOCATES = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
_FILLS = {
    _aten.zeros.default,
    _aten.zeros_like.default,
    _aten.new_zeros.default,
    _aten.full.default,
    _aten.full_like.default,
    _aten.new_full.default,
    _aten.zero_.default,
    _aten.fill_.Scalar,
}


class Repeated:
    """A host function for calls that agree in shapes, dtypes, device and numbers.

    The first call compiles kernels, and the second is recorded. What cannot be repeated is called
    as it is: a host function that launches nothing through Triton, computes with torch, keeps
    tensors between calls, or whose module has kernels of other kinds.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._calls = 0
        self._repeat: Callable[[Sequence[torch.Tensor]], Any] | None = None
        self._possible = _launches_by_triton_alone(function)

    def __call__(self, *args: Any) -> Any:
        """Call it, or do again what it did."""
        if not self._possible:
            return self._function(*args)
        given = [a for a in args if isinstance(a, torch.Tensor)]
        for tensor in given:
            if not tensor.is_contiguous() or tensor.data_ptr() % _ALIGNMENT:
                return self._function(*args)
        if self._repeat is not None:
            return self._repeat(given)
        self._calls += 1
        # With one tensor twice nothing would tell which of the two a kernel is given.
        twice = len({_place(t) for t in given}) < len(given)
        watching = _watching()
        if self._calls < 2 or twice or not watching.acquire(blocking=False):
            return self._function(*args)
        try:
            result, self._repeat = _record(self._function, args, given)
        finally:
            watching.release()
        self._possible = self._repeat is not None
        return result


def _watching() -> threading.Lock:
    """Held while Triton's launch is watched, by any copy of any library of this process."""
    lock: threading.Lock = vars(sys.modules[_TRITON]).setdefault(
        "_kagent_watching", threading.Lock()
    )
    return lock


@functools.cache
def _launches_by_triton_alone(function: Callable[..., Any]) -> bool:
    """Whether what launches is Triton's, as far as the function's module tells."""
    if os.environ.get("TRITON_INTERPRET") == "1" or _TRITON not in sys.modules:
        return False
    package = __name__.rpartition(".")[0]
    return not any(
        str(getattr(value, "__module__", "")).startswith((f"{package}._runtime", "cutlass"))
        for value in vars(sys.modules[function.__module__]).values()
    )


def _record(
    function: Callable[..., Any], args: Sequence[Any], given: Sequence[torch.Tensor]
) -> tuple[Any, Callable[[Sequence[torch.Tensor]], Any] | None]:
    """The result of a call, and what repeats it; None if it cannot be repeated."""
    jit_function = sys.modules[_TRITON].JITFunction
    run, here, tape = jit_function.run, threading.get_ident(), _Tape(given)

    def watched(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=warmup, **named)
        if threading.get_ident() == here and not warmup:
            tape.launched(self, kernel, grid, args, named)
        return kernel

    jit_function.run = watched
    try:
        with tape:
            result = function(*args)
        seen = jit_function.run is watched  # nobody else has taken its place meanwhile
    finally:
        jit_function.run = run
    return result, tape.repeating(result) if seen else None


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """One call: a step for each allocation, view and launch.

    A step appends the tensors that it makes to the slots, which begin with the call's arguments.
    """

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps: list[_Step] = []
        self._launches = 0
        self._alive: list[torch.Tensor] = []  # while it is recorded: no place is used twice
        self._slot: dict[object, int] = {}
        self._device = given[0].device if given else None
        self._exact = self._device is not None
        self._stream_of = sys.modules["triton"].runtime.driver.active.get_current_stream
        self._index = (self._device.index or 0) if self._device is not None else 0
        self._stream = self._stream_of(self._index)
        for tensor in given:
            self._take(tensor)

    def __torch_dispatch__(
        self, func: Any, _types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Have torch do it, and note it."""
        named: Mapping[str, Any] = kwargs or {}
        result = func(*args, **named)
        made = result if isinstance(result, list | tuple) else [result]
        if not all(isinstance(t, torch.Tensor) and t.device == self._device for t in made):
            self._exact = False
        elif func in _ALLOCATES and made[0].layout is torch.strided and not made[0].is_pinned():
            self._add(self._allocation(made[0]), made)
        elif func.is_view and all(t.dtype == args[0].dtype for t in made):
            base = self._slot_of(args[0]) or 0
            for tensor in made:
                if _place(tensor) not in self._slot:
                    self._add(_view(base, args[0], tensor), [tensor])
        elif func in _FILLS or func.is_view:
            values = [self._placed(value) for value in args]
            self._add(_operation(func, values, named), made)
        else:
            self._exact = False
        return result

    def launched(
        self, function: Any, kernel: Any, grid: Any, args: Sequence[Any], named: Mapping[str, Any]
    ) -> None:
        """Note a launch: of this compiled kernel, with arguments in the order of its parameters."""
        parameters = function.signature.parameters
        own = {name: value for name, value in named.items() if name in parameters}
        bound = function.signature.bind(*args, **own)
        bound.apply_defaults()
        size = grid(dict(bound.arguments)) if callable(grid) else grid
        # What is not launched with these arguments alone: other streams, memory that Triton asks
        # the caller's allocator for, hooks.
        scratch = getattr(kernel.metadata, "global_scratch_size", 0)
        if function.pre_run_hooks or scratch or self._stream_of(self._index) != self._stream:
            self._exact = False
            return
        size = (*size, 1, 1)[:3]
        values = [self._placed(value) for value in bound.arguments.values()]
        self._launches += 1
        self._add(_launch(kernel[size], values), [])

    def repeating(self, result: Any) -> Callable[[Sequence[torch.Tensor]], Any] | None:
        """A function that does it all again; None if something was seen that cannot be."""
        several = isinstance(result, tuple)
        leaves = result if several else (result,)
        results = [None if leaf is None else self._slot_of(leaf) for leaf in leaves]
        self._alive.clear()
        self._slot.clear()
        if not self._exact or not self._launches:
            return None
        steps, index, stream_of = tuple(self._steps), self._index, self._stream_of

        def repeat(given: Sequence[torch.Tensor]) -> Any:
            slots, stream = list(given), stream_of(index)
            for step in steps:
                step(slots, stream)
            found = tuple(None if at is None else slots[at] for at in results)
            return found if several else found[0]

        return repeat

    def _allocation(self, like: torch.Tensor) -> _Step:
        """An empty tensor of the same kind. The way with the fewest words for torch to read is the
        fastest.
        """
        size, stride, dtype = tuple(like.shape), like.stride(), like.dtype
        if dtype == self._alive[0].dtype:
            return lambda slots, _: slots.append(slots[0].new_empty_strided(size, stride))
        return lambda slots, _: slots.append(slots[0].new_empty_strided(size, stride, dtype=dtype))

    def _take(self, tensor: torch.Tensor) -> None:
        self._slot.setdefault(_place(tensor), len(self._alive))
        self._alive.append(tensor)

    def _add(self, step: _Step, made: Sequence[torch.Tensor]) -> None:
        self._steps.append(step)
        for tensor in made:
            self._take(tensor)

    def _slot_of(self, value: Any) -> int | None:
        found = self._slot.get(_place(value)) if isinstance(value, torch.Tensor) else None
        if found is None:
            self._exact = False
        return found

    def _placed(self, value: Any) -> Any:
        """The value, or a `_Place` or `_Made` for what has tensors in it."""
        if isinstance(value, torch.Tensor):
            return _Place(self._slot_of(value) or 0)
        base = getattr(value, "base", None)
        if isinstance(base, torch.Tensor):  # a tensor descriptor
            slot, template = self._slot_of(base) or 0, _on_base(value, None)
            return _Made(lambda slots: _on_base(template, slots[slot]))
        if isinstance(value, tuple | list):
            items = [self._placed(item) for item in value]
            if any(isinstance(item, _Place | _Made) for item in items):
                kind = tuple if isinstance(value, tuple) else list
                return _Made(lambda slots: kind(_filled(item, slots) for item in items))
        elif hasattr(value, "data_ptr"):
            self._exact = False
        return value


class _Place:
    """Stands for the tensor in a slot."""

    def __init__(self, slot: int) -> None:
        self.slot = slot


class _Made:
    """Stands for an argument that has tensors of slots in it."""

    def __init__(self, make: Callable[[_Slots], Any]) -> None:
        self.make = make


def _filled(value: Any, slots: _Slots) -> Any:
    if isinstance(value, _Place):
        return slots[value.slot]
    return value.make(slots) if isinstance(value, _Made) else value


def _place(tensor: torch.Tensor) -> object:
    """Properties that Python objects of one tensor share: autograd makes several of a view."""
    where = tensor.untyped_storage()._cdata, tensor.storage_offset()  # noqa: SLF001
    return *where, tensor.shape, tensor.stride(), tensor.dtype


def _on_base(template: Any, base: torch.Tensor | None) -> Any:
    """A tensor descriptor as it was, of another tensor; its checks are known to pass."""
    made = object.__new__(type(template))
    vars(made).update(vars(template), base=base)
    return made


def _view(base: int, of: torch.Tensor, made: torch.Tensor) -> _Step:
    size, stride = tuple(made.shape), made.stride()
    further = made.storage_offset() - of.storage_offset()

    def step(slots: _Slots, _stream: int) -> None:
        tensor = slots[base]
        slots.append(tensor.as_strided(size, stride, tensor.storage_offset() + further))

    return step


def _operation(func: Callable[..., Any], values: Sequence[Any], named: Mapping[str, Any]) -> _Step:
    arguments = _arguments(values)

    def step(slots: _Slots, _stream: int) -> None:
        made = func(*arguments(slots), **named)
        slots.extend(made if isinstance(made, list | tuple) else (made,))

    return step


def _launch(runner: Callable[..., object], values: Sequence[Any]) -> _Step:
    arguments = _arguments(values)

    def step(slots: _Slots, stream: int) -> None:
        runner(*arguments(slots), stream=stream)

    return step


def _arguments(values: Sequence[Any]) -> Callable[[_Slots], list[Any]]:
    """A function that puts tensors of slots in their places among values that stay."""
    template = [None if isinstance(v, _Place | _Made) else v for v in values]
    places = [(i, v.slot) for i, v in enumerate(values) if isinstance(v, _Place)]
    made = [(i, v.make) for i, v in enumerate(values) if isinstance(v, _Made)]

    def arguments(slots: _Slots) -> list[Any]:
        found = template.copy()
        for i, slot in places:
            found[i] = slots[slot]
        for i, make in made:
            found[i] = make(slots)
        return found

    return arguments
