"""Gluon's names on the CPU. `install` puts them into Gluon's own modules, in a process of its own.

Layouts are Gluon's own objects, and are not used: the compiler checks them. What is not here says
so when a kernel calls it (`NotSimulated`), as does any error that is not the kernel's: the kernel
has been compiled before, so that a name or a type that is unknown here is a gap of this module.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier as gluon_mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kagent_sandbox.judge.gluon import memory
from kagent_sandbox.judge.gluon.memory import Barrier, Barriers, Descriptor, Shared
from kagent_sandbox.judge.gluon.schedule import NotSimulated, ProgramRun, SimulatedFault
from kagent_sandbox.judge.gluon.values import (
    METHODS,
    RegisterValue,
    TensorPointer,
    Whole,
    both,
    poison,
    raw,
    sizes,
    tensor_of,
    torch_type,
    unary,
)

_program = SimpleNamespace(schedule=ProgramRun(0), index=(0, 0, 0), grid=(1, 1, 1))
"""The program that runs; one at a time."""


class Constant:
    """Takes the place of `constexpr`: a value is itself."""

    def __new__(cls, value: Any) -> Any:
        """The value."""
        return value


class SimulatedKernel(triton.runtime.jit.KernelInterface[Any]):
    """Takes the place of a compiled function: kernels are launched, device functions called."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.fn = function
        self.signature = inspect.signature(function)
        self.arg_names = list(self.signature.parameters)
        self.__name__ = function.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it from a kernel."""
        return self.fn(*args, **kwargs)

    def __get__(self, instance: object, _: object = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def run(self, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        """Run every program, one after the other.

        Raises:
            SimulatedFault: It hangs, or does what hardware leaves undefined.
            NotSimulated: It uses what is not known here.
        """
        if warmup:
            return
        given = {n: v for n, v in kwargs.items() if n in self.arg_names}  # the rest are options
        bound = self.signature.bind(*args, **given)
        bound.apply_defaults()
        sizes_ = grid(dict(bound.arguments)) if callable(grid) else grid
        sizes_ = (*map(int, sizes_), 1, 1)[:3]
        names = self.signature.parameters
        values = {n: _argument(n, v, names[n]) for n, v in bound.arguments.items()}
        for i, place in enumerate(itertools.product(*map(range, sizes_))):
            _program.schedule, _program.index, _program.grid = ProgramRun(i), place, sizes_
            try:
                with torch._C.DisableTorchFunction():  # noqa: SLF001 - of `OnCpu`
                    self.fn(**values)
                    _program.schedule.finish()
            except (SimulatedFault, NotSimulated):
                raise
            except Exception as e:
                raise NotSimulated(f"{type(e).__name__}: {e}") from e


def _argument(name: str, value: Any, parameter: inspect.Parameter) -> Any:
    """A host's value as a kernel sees it."""
    if "constexpr" in str(parameter.annotation) or parameter.annotation is Constant:
        return value
    if isinstance(value, torch.Tensor):
        elements = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
        return TensorPointer(elements, value.storage_offset(), name)
    if isinstance(value, TensorDescriptor):
        return Descriptor(value)
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return Whole(value)
    if isinstance(value, float):
        return float(torch.tensor(value, dtype=torch.float32))
    if isinstance(value, tuple):
        return tuple(_argument(name, v, parameter) for v in value)
    return value


def _jit(function: Any = None, **_: object) -> Any:
    return SimulatedKernel(function) if function is not None else SimulatedKernel


# -- shared memory and roles -----------------------------------------------------------------------


def _allocate(dtype: Any, shape: Any, layout: Any, value: Any = None) -> Any:
    shape = sizes(shape)
    if isinstance(layout, gluon_mbarrier.MBarrierLayout):
        return _barriers(shape[0])
    data = torch.empty(shape, dtype=torch_type(dtype))
    if value is None:
        poison(data)
    else:
        data.copy_(value.data)
    return Shared(data, layout)


def _barriers(count: int) -> Barriers:
    line = sys._getframe(2)  # noqa: SLF001 - where the kernel asks, for messages
    while line.f_code.co_filename == __file__ and line.f_back is not None:
        line = line.f_back
    where = f"allocated in line {line.f_lineno}"
    return Barriers([Barrier(f"barrier {i} of {count} ({where})") for i in range(count)])


def _allocate_barriers(batch: Any = None, two_ctas: Any = False) -> Barriers:
    if two_ctas:
        raise NotSimulated("barriers of two blocks")
    return _barriers(1 if batch is None else int(batch))


def _specialize(
    roles: Sequence[tuple[Any, Sequence[Any]]], warps: Any = None, registers: Any = None
) -> None:
    del warps, registers
    work = [
        (f"{f.__name__} (partition {i})", functools.partial(f, *args))
        for i, (f, args) in enumerate(roles)
    ]
    _program.schedule.run(work)


def _now(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of `memory`, for the program that runs."""
    return lambda *args, **kwargs: function(_program.schedule, *args, **kwargs)


def _expect(barrier: Barriers, nbytes: Any = 0, pred: Any = True) -> None:
    memory.arrive(_program.schedule, barrier, 1, pred, nbytes)


def _arrive(barrier: Barriers, *, count: Any = 1, pred: Any = True) -> None:
    memory.arrive(_program.schedule, barrier, count, pred)


# cp.async: it lands when it is waited for


def _copy_by_threads(to: Shared, pointer: TensorPointer, mask: Any = None, **_: object) -> None:
    at, wanted = pointer.places(mask)
    found = torch.where(wanted, pointer.elements[at], torch.zeros((), dtype=to.data.dtype))
    poison(to.data)
    _program.schedule.running.copies[-1].append(lambda: to.data.copy_(found))


def _commit_group() -> None:
    _program.schedule.running.copies.append([])


def _wait_group(outstanding: Any = 0) -> None:
    schedule = _program.schedule
    schedule.pause(last=True)
    groups = schedule.running.copies
    while len(groups) - 1 > int(outstanding):
        for land in groups.pop(0):
            land()


# -- values ----------------------------------------------------------------------------------------


def _pair(function: Callable[..., torch.Tensor], whole: Any = None) -> Callable[..., Any]:
    def apply(a: Any, b: Any, **_: object) -> Any:
        if whole is not None and isinstance(a, int) and isinstance(b, int):
            return Whole(whole(a, b))
        x, y = both(a, b)
        kind = next((v.dtype for v in (x, y) if isinstance(v, torch.Tensor)), torch.float32)
        return RegisterValue(
            function(torch.as_tensor(x, dtype=kind), torch.as_tensor(y, dtype=kind))
        )

    return apply


def _where(condition: Any, a: Any, b: Any) -> Any:
    if isinstance(condition, bool | int):
        return a if condition else b
    x, y = both(a, b)
    kind = next((v.dtype for v in (x, y) if isinstance(v, torch.Tensor)), None)
    if kind is None:
        kind = torch.float32 if float in (type(x), type(y)) else torch.int32
    x, y = torch.as_tensor(x, dtype=kind), torch.as_tensor(y, dtype=kind)
    found = torch.where(condition.data, x, y)
    scalar = found.dim() == 0 and not kind.is_floating_point
    return Whole(int(found)) if scalar else RegisterValue(found)


def _full(shape: Any, value: Any, dtype: Any, layout: Any = None) -> RegisterValue:
    del layout
    return RegisterValue(torch.full(sizes(shape), raw(value), dtype=torch_type(dtype)))


def _like(
    x: RegisterValue, value: Any, shape: Any = None, dtype: Any = None, layout: Any = None
) -> RegisterValue:
    return _full(shape or x.shape, value, dtype or x.dtype, layout)


def _load(
    pointer: TensorPointer, mask: Any = None, other: Any = None, **_: object
) -> RegisterValue:
    at, wanted = pointer.places(mask)
    found = pointer.elements[at]
    if mask is None:
        return RegisterValue(found)
    rest = torch.empty((), dtype=found.dtype)
    if other is None:
        poison(rest)
        return RegisterValue(torch.where(wanted, found, rest))
    rest = torch.as_tensor(raw(other), dtype=found.dtype)
    return RegisterValue(torch.where(wanted, found, rest))


def _store(pointer: TensorPointer, value: Any, mask: Any = None, **_: object) -> None:
    at, wanted = pointer.places(mask)
    values = torch.as_tensor(raw(value), dtype=pointer.elements.dtype).expand(at.shape)
    pointer.elements[at[wanted]] = values[wanted]


def _atomic(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> Callable[..., RegisterValue]:
    def apply(pointer: TensorPointer, value: Any, mask: Any = None, **_: object) -> RegisterValue:
        at, wanted = pointer.places(mask)
        values = torch.as_tensor(raw(value), dtype=pointer.elements.dtype).expand(at.shape)
        places = at[wanted]
        if bool((places.sort().values.diff() != 0).all()):
            before = torch.where(wanted, pointer.elements[at], 0)
            pointer.elements[places] = function(before, values)[wanted]
        else:  # one after the other
            before = torch.zeros(at.shape, dtype=values.dtype)
            for place in itertools.product(*map(range, at.shape)):
                if wanted[place]:
                    element = int(at[place])
                    before[place] = pointer.elements[element]
                    pointer.elements[element] = function(pointer.elements[element], values[place])
        _program.schedule.pause()
        return RegisterValue(before)

    return apply


def _same(x: Any, *_: object, **__: object) -> Any:
    return x


def _nothing(*_: object, **__: object) -> None:
    pass


def _arange(start: Any, end: Any, layout: Any = None) -> RegisterValue:
    del layout
    return RegisterValue(torch.arange(int(start), int(end), dtype=torch.int32))


def _pairs(halves: torch.dtype) -> Callable[..., torch.Tensor]:
    """Words of two floating-point numbers each, rounded to the nearest; the first are the lower
    halves.
    """

    def packed(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        both_ = torch.stack([low.to(halves), high.to(halves)], -1)
        return both_.view(torch.int32).squeeze(-1)

    return packed


_ASSEMBLY: Mapping[str, tuple[str, Callable[..., Any]]] = {
    "cvt.rn.bf16x2.f32 $0, $2, $1;": ("=r,r,r", _pairs(torch.bfloat16)),
    "cvt.rn.f16x2.f32 $0, $2, $1;": ("=r,r,r", _pairs(torch.float16)),
    "mov.b32 {$0, $1}, $2;": (
        "=h,=h,r",
        lambda words: words.contiguous().view(torch.int16).unflatten(-1, (-1, 2)).unbind(-1),
    ),
}
"""Instructions with their constraints; more are not known."""


def _assembly(
    asm: str, constraints: str, args: Sequence[Any], dtype: Any, is_pure: Any, pack: Any
) -> Any:
    del is_pure
    known = _ASSEMBLY.get(" ".join(asm.split()))
    if known is None or known[0] != constraints.replace(" ", "") or int(pack) != 1:
        raise NotSimulated(f"inline assembly {asm!r}")
    found = known[1](*map(tensor_of, args))
    if isinstance(found, torch.Tensor):
        return RegisterValue(found.view(torch_type(dtype)))
    kinds = map(torch_type, dtype)
    return tuple(RegisterValue(f.view(kind)) for f, kind in zip(found, kinds, strict=True))


_FUNCTIONS: Mapping[str, Any] = {
    **METHODS,
    "abs": lambda x: (
        Whole(abs(x)) if isinstance(x, int) else RegisterValue(torch.abs(tensor_of(x)))
    ),
    "constexpr": Constant,
    "static_range": range,
    "program_id": lambda axis=0: Whole(_program.index[int(axis)]),
    "num_programs": lambda axis=0: Whole(_program.grid[int(axis)]),
    "allocate_shared_memory": _allocate,
    "warp_specialize": _specialize,
    "barrier": _now(ProgramRun.pause),
    "thread_barrier": _now(ProgramRun.pause),
    "arange": _arange,
    "full": _full,
    "zeros": lambda shape, dtype, layout=None: _full(shape, 0, dtype, layout),
    "full_like": _like,
    "zeros_like": lambda x, shape=None, dtype=None, layout=None: _like(x, 0, shape, dtype, layout),
    "convert_layout": _same,
    "set_auto_layout": _same,
    "multiple_of": _same,
    "max_contiguous": _same,
    "max_constancy": _same,
    "to_tensor": _same,
    "assume": _nothing,
    "static_assert": _nothing,
    "static_print": _nothing,
    "device_print": _nothing,
    "join": lambda a, b: RegisterValue(torch.stack([*both(a, b)], -1)),
    "inline_asm_elementwise": _assembly,
    "broadcast": lambda x, other: RegisterValue(x.data.expand((x.data + other.data).shape)),
    "where": _where,
    "cdiv": lambda a, b: (a + b - 1) // b,
    "minimum": _pair(torch.fmin, min),
    "maximum": _pair(torch.fmax, max),
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "fma": lambda a, b, c: a * b + c,
    "fdiv": lambda a, b: a / b,
    "div_rn": lambda a, b: a / b,
    "exp2": unary(torch.exp2),
    "log": unary(torch.log),
    "log2": unary(torch.log2),
    "sqrt": unary(torch.sqrt),
    "sqrt_rn": unary(torch.sqrt),
    "rsqrt": unary(torch.rsqrt),
    "sin": unary(torch.sin),
    "cos": unary(torch.cos),
    "erf": unary(torch.erf),
    "floor": unary(torch.floor),
    "ceil": unary(torch.ceil),
    "load": _load,
    "store": _store,
    "atomic_add": _atomic(torch.add),
    "atomic_max": _atomic(torch.maximum),
    "atomic_min": _atomic(torch.minimum),
    "dot_fma": lambda a, b, acc: RegisterValue(acc.data + a.data.float() @ b.data.float()),
}
_AMPERE: Mapping[str, Any] = {
    "mma_v2": lambda a, b, acc, **_: RegisterValue(acc.data + a.data.float() @ b.data.float()),
}
_CP_ASYNC: Mapping[str, Any] = {
    "async_copy_global_to_shared": _copy_by_threads,
    "commit_group": _commit_group,
    "wait_group": _wait_group,
}
_BARRIERS: Mapping[str, Any] = {
    "allocate_mbarrier": _allocate_barriers,
    "init": lambda barrier, count: barrier.one.init(count),
    "invalidate": _nothing,
    "wait": _now(memory.wait_for_barrier),
    "expect": _expect,
    "arrive": _arrive,
}
_TMA: Mapping[str, Any] = {
    "async_copy_global_to_shared": _now(memory.copy_in),
    "async_copy_shared_to_global": _now(memory.copy_out),
    "store_wait": _now(memory.wait_for_stores),
}
_HOPPER: Mapping[str, Any] = {
    **_AMPERE,
    "fence_async_shared": _nothing,
    "warpgroup_mma": _now(memory.multiply),
    "warpgroup_mma_wait": _now(memory.wait_for_products),
    "warpgroup_mma_init": _same,
}


def install() -> None:
    """Have every Gluon kernel that is imported from now on run here."""
    language: Any = gluon.language
    nvidia = language.nvidia
    module: Any = gluon
    module.jit, module.constexpr_function = _jit, _same
    core: Any = tl.core
    core._aggregate = _same  # noqa: SLF001 - as kernels import it
    _replace(language, _FUNCTIONS)
    _replace(nvidia.ampere, _AMPERE)
    _replace(nvidia.ampere.async_copy, _CP_ASYNC)
    _replace(nvidia.ampere.mbarrier, _BARRIERS)
    _replace(nvidia.hopper.mbarrier, _BARRIERS)
    _replace(nvidia.hopper.tma, _TMA)
    _replace(nvidia.hopper, _HOPPER)


def _replace(module: ModuleType, known: Mapping[str, Any]) -> None:
    """Put functions in the place of a module's own; those that are not known say so."""
    for name, value in list(vars(module).items()):
        if name in known:
            setattr(module, name, known[name])
        elif _is_of_kernels(value):
            setattr(module, name, _unknown(f"{module.__name__.rpartition('.')[2]}.{name}"))


def _is_of_kernels(value: object) -> bool:
    made = getattr(value, "__triton_builtin__", False) or hasattr(value, "is_gluon")
    return made and not isinstance(value, type)


def _unknown(name: str) -> Callable[..., Any]:
    def call(*_: object, **__: object) -> Any:
        raise NotSimulated(f"{name} is not simulated")

    return call
