"""Calls of kernels, repeated without their host function.

A host function decides by its arguments' shapes, strides and dtypes what it allocates and launches:
it was checked as a plan, which knows nothing else of them. In Python, and with all that Triton asks
before a launch, this can take longer than a kernel. So a call of each kind is recorded once, its
allocations, views, fills and launches, by Triton or by the library's runtime. Later ones do the
same with their own tensors. What else a host function does, or how long it takes, is then gone.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import importlib.util
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

_Slots = list[Any]  # tensors; None where one is not needed any more
_Do = Callable[[_Slots, int], object]
_Repeat = Callable[[Sequence[torch.Tensor]], Any]

_JIT, _COMPILER = "triton.runtime.jit", "triton.compiler.compiler"
_IMPORTED = {"torch", "triton", "numpy", *sys.stdlib_module_names}
# Bytes, of torch's allocators: a host function may look at an address.
_ALIGNMENT = 512
_ALIGNMENT_ON_CPU = 64
_aten = torch.ops.aten
_ALLOCATES = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_permuted.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
_DONE_AGAIN = {
    _aten.zeros.default,
    _aten.zeros_like.default,
    _aten.new_zeros.default,
    _aten.ones.default,
    _aten.ones_like.default,
    _aten.new_ones.default,
    _aten.full.default,
    _aten.full_like.default,
    _aten.new_full.default,
    _aten.zero_.default,
    _aten.fill_.Scalar,
    _aten.copy_.default,
    _aten.clone.default,
    _aten._to_copy.default,  # noqa: SLF001
    *(
        getattr(of, way)
        for of in (_aten.mm, _aten.addmm, _aten.bmm, _aten.matmul)
        for way in of.overloads()  # type: ignore[no-untyped-call]
    ),
}
"""Fills, copies and products: what torch computes in a plan."""


class Repeated:
    """A host function for calls that agree in shapes, dtypes, device and numbers.

    The first call that comes to its end has compiled kernels, and the one after it is recorded. It
    is repeated for tensors of the same strides, which contiguous ones may lack at sizes of 1.
    What cannot be repeated is called as it is: a host function that launches nothing, has torch
    compute more than products, keeps tensors between calls, or whose file imports more than torch,
    numpy, Triton, the library's runtime and the standard library.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.called = False
        """Whether a call has come to its end."""
        self._repeat: _Repeat | None = None
        self._run: object = None  # Triton's, as it was then: tools that change it see all launches
        self._numbers = ""
        self._threads = 0  # of OpenMP, on a CPU: there may be memory for each
        self._strides: list[tuple[int, tuple[int, ...]]] = []  # of tensors with sizes of 1
        self._launchers = _launchers_of(function)

    def __call__(self, *args: Any) -> Any:
        """Call it, or do again what it did."""
        launchers = self._launchers
        if launchers is None:
            return self._function(*args)
        given = [a for a in args if isinstance(a, torch.Tensor)]
        on_cpu = bool(given) and given[0].is_cpu  # as all are, or none
        alignment = _ALIGNMENT_ON_CPU if on_cpu else _ALIGNMENT
        for tensor in given:
            if not tensor.is_contiguous() or tensor.data_ptr() % alignment:
                return self._function(*args)
        # 0.0 and -0.0 are one key of a dictionary, and so are 1 and True.
        others = [a for a in args if not isinstance(a, torch.Tensor)]
        numbers = repr(others) if others else ""
        threads = torch.get_num_threads() if on_cpu else 0
        if self._repeat is not None:
            alike = numbers == self._numbers and threads == self._threads
            if alike and launchers.run is self._run:
                for i, strides in self._strides:
                    if given[i].stride() != strides:
                        return self._function(*args)
                return self._repeat(given)
            return self._function(*args)
        watching = _watching()
        if not self.called or _overlap(given) or not watching.acquire(blocking=False):
            result = self._function(*args)
            self.called = True
            return result
        try:
            if self._repeat is not None or self._launchers is None:  # by another thread, meanwhile
                return self._function(*args)
            run = launchers.run
            result, repeat = _record(self._function, args, given, launchers)
            self._strides = [(i, t.stride()) for i, t in enumerate(given) if 1 in t.shape]
            self._run, self._numbers, self._threads = run, numbers, threads
            if repeat is None:
                self._launchers = None
            self._repeat = repeat
            return result
        finally:
            watching.release()


def _watching() -> threading.Lock:
    """Held while launches are watched, by any copy of any library of this process."""
    lock: threading.Lock = vars(torch).setdefault("_kagent_watching", threading.Lock())
    return lock


def _overlap(given: Sequence[torch.Tensor]) -> bool:
    """Whether contiguous tensors share memory: nothing tells then which one a view is of."""
    ranges = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in given)
    return any(end > start for (_, end), (start, _) in itertools.pairwise(ranges))


@dataclasses.dataclass(frozen=True)
class _Launchers:
    """Ways to a launch in a host function's file.

    Attributes:
        triton: Whether Triton can.
        runtime: Name of the library's runtime, or None if that cannot.
    """

    triton: bool
    runtime: str | None

    @property
    def run(self) -> object:
        """Triton's way to a launch, as it is now."""
        return sys.modules[_JIT].JITFunction.run if self.triton else None


@functools.cache
def _launchers_of(function: Callable[..., Any]) -> _Launchers | None:
    """Ways to a launch by the imports of the function's file; None if more than are watched here."""
    module = sys.modules[function.__module__]
    file = getattr(module, "__file__", None)
    if file is None:
        return None
    package = function.__module__.rpartition(".")[0]
    ours = f"{package.rpartition('.')[0]}._runtime"
    names = _imported_names(ast.parse(Path(file).read_text(encoding="utf-8")), package)
    tops = {name.partition(".")[0] for name in names if name != ours}
    triton = _JIT.partition(".")[0] in tops
    if not tops <= _IMPORTED or (triton and not {_JIT, _COMPILER} <= set(sys.modules)):
        return None
    if triton and os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return _Launchers(triton, ours if ours in names else None)


def _imported_names(tree: ast.AST, package: str) -> set[str]:
    """Modules that a file of a package imports anywhere, by their full names."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            name = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            of_package = node.level and node.module is None  # from .. import name
            found |= {f"{name}.{a.name}" for a in node.names} if of_package else {name}
    return found


_Watches = Sequence[tuple[Any, str, object, object]]  # owner, attribute, before, meanwhile


def _record(
    function: Callable[..., Any],
    args: Sequence[Any],
    given: Sequence[torch.Tensor],
    launchers: _Launchers,
) -> tuple[Any, _Repeat | None]:
    """The result of a call, and what repeats it; None if it cannot be repeated."""
    if not given:
        return function(*args), None
    tape = _Tape(given)
    watches = [
        *(_triton_watches(tape) if launchers.triton else ()),
        *(_runtime_watches(tape, launchers.runtime) if launchers.runtime else ()),
    ]
    for owner, name, _, watch in watches:
        setattr(owner, name, watch)
    try:
        with tape:
            given[0].view(given[0].shape)  # which the tape sees, or nothing else
            result = function(*args)
    finally:
        tape.open = False
        # Others may have taken their places meanwhile: they have seen what the tape has not.
        alone = all(vars(owner)[name] is watch for owner, name, _, watch in watches)
        for owner, name, before, watch in watches:
            if vars(owner)[name] is watch:
                setattr(owner, name, before)
    return result, tape.repeating(result) if alone else None


def _triton_watches(tape: _Tape) -> _Watches:
    jit, compiled = sys.modules[_JIT].JITFunction, sys.modules[_COMPILER].CompiledKernel
    run, launcher = jit.run, compiled.run
    launcher_of = getattr(launcher, "fget", None)  # a property makes it when it is needed
    if launcher_of is None:
        tape.cannot_be_repeated()
        return ()

    def watched_run(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        if not tape.watches():
            return run(self, *args, grid=grid, warmup=warmup, **named)
        sizes: list[Any] = []

        def asked(meta: Any) -> Any:
            sizes.append(grid(meta))
            return sizes[-1]

        kernel = run(self, *args, grid=asked if callable(grid) else grid, warmup=warmup, **named)
        if not warmup:
            tape.launched_by_triton(self, kernel, sizes[-1] if sizes else grid, args, named)
        return kernel

    def watched_launcher(self: Any) -> Any:
        if tape.watches():
            tape.begun += 1  # by whatever way: a compiled kernel can be launched, too
        return launcher_of(self)

    return (
        (jit, "run", run, watched_run),
        (compiled, "run", launcher, property(watched_launcher)),
    )


def _runtime_watches(tape: _Tape, runtime: str) -> _Watches:
    watch = importlib.import_module(f"{runtime}.launches").watch
    instead = watch.instead

    def watched_instead(*seen: Any) -> bool:
        if tape.watches():
            tape.begun += 1  # by whatever way: a file may keep a kernel's `launch`, too
        return instead is not None and instead(*seen)

    watches: list[tuple[Any, str, object, object]] = [
        (watch, "instead", instead, watched_instead),
        (watch, "any", watch.any, watched_instead),  # as good as True, and nobody else's
    ]
    # The first call has imported them. What is imported in this one is begun, and not noted.
    for module, name, method, note in (
        ("cuda_kernels", "CudaKernel", "launch", tape.launched_as_cuda),
        ("cpp_kernels", "CppKernel", "__call__", tape.called_as_cpp),
    ):
        if loaded := sys.modules.get(f"{runtime}.{module}"):
            kind = getattr(loaded, name)
            before = getattr(kind, method)
            watches.append((kind, method, before, _noting(tape, before, note)))
    return watches


def _noting(tape: _Tape, launch: Callable[..., None], note: Callable[..., None]) -> object:
    """A kernel's method, and a note of what it did."""

    def noted(*args: Any, **options: Any) -> None:
        launch(*args, **options)
        if tape.watches():
            note(*args, **options)

    return noted


@dataclasses.dataclass(frozen=True)
class _Place:
    """The tensor in a slot."""

    slot: int


@dataclasses.dataclass(frozen=True)
class _Made:
    """An argument that has tensors of slots in it."""

    slots: tuple[int, ...]
    make: Callable[[_Slots], Any]


@dataclasses.dataclass(frozen=True)
class _Step:
    """A part of a call: does it with the slots, and on a stream."""

    do: _Do
    reads: set[int]
    makes: range


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """One call: a step for each allocation, view, fill and launch.

    A step appends the tensors that it makes to the slots, which begin with the call's arguments.
    The tape keeps no tensor: what a host function frees can be used again while it is recorded.
    """

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.open, self.begun, self._thread = True, 0, threading.get_ident()
        self._steps: list[_Step] = []
        self._given = self._count = len(given)
        self._launches = self._seen = 0
        self._slot: dict[StorageWeakRef, dict[object, int]] = {}  # by place, for each storage
        self._device, self._dtype = given[0].device, given[0].dtype
        self._exact = True
        self._stream_of = _stream_of(self._device)
        self._index = self._device.index or 0
        self._stream = self._stream_of(self._index)
        for i, tensor in enumerate(given):
            self._slot.setdefault(_storage(tensor), {})[_place(tensor)] = i

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler (1 s), to keep it out of the first operation

    def watches(self) -> bool:
        """Whether what happens now, in this thread, is the call's doing."""
        return self.open and threading.get_ident() == self._thread

    def cannot_be_repeated(self) -> None:
        """Say that something happens which is not noted."""
        self._exact = False

    def __torch_dispatch__(
        self, func: Any, _types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Have torch do it, and note it."""
        self._seen += 1
        named: Mapping[str, Any] = kwargs or {}
        result = func(*args, **named)
        made = result if isinstance(result, list | tuple) else [result]
        if not all(isinstance(t, torch.Tensor) and t.device == self._device for t in made):
            self._exact = False
        elif func in _ALLOCATES and made[0].layout is torch.strided and not made[0].is_pinned():
            self._add(self._allocation(made[0]), set(), made)
        elif func in _DONE_AGAIN:
            self._add(*self._operation(func, args, named), made)
        elif func.is_view or func is _aten._unsafe_view.default:  # noqa: SLF001
            self._viewed(func, args, named, made)
        else:
            self._exact = False
        return result

    def launched_by_triton(
        self, function: Any, kernel: Any, grid: Any, args: Sequence[Any], named: Mapping[str, Any]
    ) -> None:
        """Note a launch: of this compiled kernel, with arguments in the order of its parameters."""
        if type(kernel) is not sys.modules[_COMPILER].CompiledKernel:
            self._exact = False
            return
        parameters = function.signature.parameters
        own = {name: value for name, value in named.items() if name in parameters}
        bound = function.signature.bind(*args, **own)
        bound.apply_defaults()
        # What is not launched with these arguments alone: other streams, memory that Triton asks
        # the caller's allocator for, hooks.
        scratch = getattr(kernel.metadata, "global_scratch_size", 0)
        if function.pre_run_hooks or scratch or self._stream_of(self._index) != self._stream:
            self._exact = False
            return
        runner = kernel[(*grid, 1, 1)[:3]]
        self._launched(
            lambda values, stream: runner(*values, stream=stream), bound.arguments.values()
        )

    def launched_as_cuda(
        self, kernel: Any, grid: Any, block: Any, *args: Any, **options: Any
    ) -> None:
        """Note a launch by the runtime, which takes the current stream."""
        if self._stream_of(self._index) != self._stream:
            self._exact = False
            return
        sizes = [_fixed(grid), _fixed(block)]
        named = {name: _fixed(value) for name, value in options.items()}
        self._launched(lambda values, _stream: kernel.launch(*sizes, *values, **named), args)

    def called_as_cpp(self, kernel: Any, *args: Any) -> None:
        """Note a call of a C++ kernel."""
        self._launched(lambda values, _stream: kernel(*values), args)

    def _launched(self, launch: Callable[[list[Any], int], object], args: Iterable[Any]) -> None:
        values = [self._placed(value) for value in args]
        self._launches += 1
        arguments = _arguments(values)

        def step(slots: _Slots, stream: int) -> None:
            launch(arguments(slots), stream)

        self._add(step, _read(values), [])

    def repeating(self, result: Any) -> _Repeat | None:
        """A function that does it all again; None if something was seen that cannot be."""
        several = isinstance(result, tuple)
        leaves = result if several else (result,)
        results = [None if leaf is None else self._slot_of(leaf) for leaf in leaves]
        if not self._exact or not self._seen or not 0 < self._launches == self.begun:
            return None
        steps, index, stream_of = self._freeing(results), self._index, self._stream_of

        def repeat(given: Sequence[torch.Tensor]) -> Any:
            slots: _Slots = list(given)
            stream = stream_of(index)
            for step, done in steps:
                step(slots, stream)
                for i in done:  # a host function would have freed it by then
                    slots[i] = None
            found = tuple(None if at is None else slots[at] for at in results)
            return found if several else found[0]

        return repeat

    def _freeing(self, results: Sequence[int | None]) -> list[tuple[_Do, tuple[int, ...]]]:
        """The steps, each with the slots that nothing needs after it."""
        kept, last = {*range(self._given), *results}, {}
        for at, step in enumerate(self._steps):
            last.update(dict.fromkeys({*step.reads, *step.makes} - kept, at))
        freed: list[list[int]] = [[] for _ in self._steps]
        for slot, at in last.items():
            freed[at].append(slot)
        return [(s.do, tuple(f)) for s, f in zip(self._steps, freed, strict=True)]

    # -- steps -------------------------------------------------------------------------------------

    def _add(self, do: _Do, reads: set[int], made: Sequence[torch.Tensor]) -> None:
        """Add a step, which makes tensors that may be known already."""
        first = self._count
        for tensor in made:
            self._slot.setdefault(_storage(tensor), {}).setdefault(_place(tensor), self._count)
            self._count += 1
        self._steps.append(_Step(do, reads, range(first, self._count)))

    def _allocation(self, like: torch.Tensor) -> _Do:
        """An empty tensor of the same kind. The way with the fewest words for torch to read is the
        fastest.
        """
        size, stride, dtype = tuple(like.shape), like.stride(), like.dtype
        if dtype == self._dtype:
            return lambda slots, _: slots.append(slots[0].new_empty_strided(size, stride))
        return lambda slots, _: slots.append(slots[0].new_empty_strided(size, stride, dtype=dtype))

    def _viewed(
        self, func: Any, args: Sequence[Any], named: Mapping[str, Any], made: Sequence[torch.Tensor]
    ) -> None:
        of = args[0]
        plain = all(  # else a copy, which some operations make where a view is none
            _storage(t) == _storage(of)
            and (t.dtype, t.is_conj(), t.is_neg()) == (of.dtype, of.is_conj(), of.is_neg())
            for t in made
        )
        base = self._slot_of(of) or 0
        for tensor in made if plain else ():
            if _place(tensor) not in self._slot.get(_storage(tensor), {}):
                self._add(_view(base, of, tensor), {base}, [tensor])
        if not plain:
            self._add(*self._operation(func, args, named), made)

    def _operation(
        self, func: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]
    ) -> tuple[_Do, set[int]]:
        values = [self._placed(value) for value in (*args, *named.values())]
        arguments, count, names = _arguments(values), len(args), tuple(named)

        def step(slots: _Slots, _stream: int) -> None:
            given = arguments(slots)
            made = func(*given[:count], **dict(zip(names, given[count:], strict=True)))
            slots.extend(made if isinstance(made, list | tuple) else (made,))

        return step, _read(values)

    # -- places ------------------------------------------------------------------------------------

    def _slot_of(self, value: Any) -> int | None:
        found = None
        if isinstance(value, torch.Tensor):
            found = self._slot.get(_storage(value), {}).get(_place(value))
        if found is None:
            self._exact = False
        return found

    def _placed(self, value: Any) -> Any:
        """The value, or a `_Place` or `_Made` for what has tensors in it."""
        if isinstance(value, torch.Tensor):
            return _Place(self._slot_of(value) or 0)
        own = getattr(value, "__dict__", {})
        if isinstance(value, tuple | list):
            kind = tuple if isinstance(value, tuple) else list
            made = self._made(value, kind)
        elif dataclasses.is_dataclass(value):  # a tensor descriptor, or a structure
            of, names = type(value), [*own] or [f.name for f in dataclasses.fields(value)]
            values = [getattr(value, name) for name in names]
            made = self._made(values, lambda values: _filled(of, names, values))
        else:
            made = None
            if _has_memory(value) or any(_has_memory(v) for v in own.values()):
                self._exact = False
        return _plain(value) if made is None else made

    def _made(self, values: Iterable[Any], make: Callable[[list[Any]], Any]) -> _Made | None:
        """A `_Made` of values; None if there are no tensors among them."""
        items = [self._placed(value) for value in values]
        if not any(isinstance(item, _Place | _Made) for item in items):
            return None
        arguments = _arguments(items)
        return _Made(tuple(_read(items)), lambda slots: make(arguments(slots)))


def _has_memory(value: object) -> bool:
    return hasattr(value, "data_ptr")


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    """Name of the tensor's memory, which may be freed; no other memory has it while it is kept."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _place(tensor: torch.Tensor) -> object:
    """Properties that Python objects of one tensor share: autograd makes several of a view."""
    flags = tensor.dtype, tensor.is_conj(), tensor.is_neg()
    return tensor.storage_offset(), tensor.shape, tensor.stride(), flags


def _plain(value: Any) -> Any:
    """The value; a list, which may be changed after the launch, as it is now."""
    return list(value) if isinstance(value, list) else value


def _fixed(value: Any) -> Any:
    """The value; a list of sizes as a tuple, which the runtime knows again."""
    return tuple(value) if isinstance(value, list) else value


def _filled(kind: type, names: Sequence[str], values: Sequence[Any]) -> Any:
    """A dataclass as it was, of other tensors; its checks are known to pass."""
    made: Any = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)  # some are frozen
    return made


def _stream_of(device: torch.device) -> Callable[[int], int]:
    """Function that takes a device's index, and returns its current stream."""
    if device.type == "cuda":  # as Triton has it, whose driver needs a C compiler
        found: Callable[[int], int] = torch._C._cuda_getCurrentRawStream  # noqa: SLF001
        return found
    if device.type == "cpu":
        return lambda _: 0
    of_triton: Callable[[int], int] = sys.modules["triton"].runtime.driver.active.get_current_stream
    return of_triton


def _view(base: int, of: torch.Tensor, made: torch.Tensor) -> _Do:
    size, stride = tuple(made.shape), made.stride()
    further = made.storage_offset() - of.storage_offset()

    def step(slots: _Slots, _stream: int) -> None:
        tensor = slots[base]
        slots.append(tensor.as_strided(size, stride, tensor.storage_offset() + further))

    return step


def _read(values: Sequence[Any]) -> set[int]:
    """The slots among values."""
    places = {v.slot for v in values if isinstance(v, _Place)}
    return places.union(*(v.slots for v in values if isinstance(v, _Made)))


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
