"""Stand-ins for the parts of torch that need a GPU, compile code or time things.

Installed once in a builder's child before the candidate is imported. Ordinary questions (device
properties, current stream, `with torch.cuda.device(...)`) are answered for the target; what a
candidate may not do raises with the rewrite.
"""

# ruff: noqa: ARG001, ARG002, ARG005 - signatures are those of what is replaced

from __future__ import annotations

import contextlib
import gc
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
import torch.library
import torch.utils
import triton.testing

from kagent_sandbox.builder.policy import PolicyError
from kagent_sandbox.builder.trace.recorder import current_recorder
from kagent_sandbox.data.target import Target

_CUDA_SOURCE = (
    "put the CUDA source in `from kagent_sandbox.lang import cuda_kernel; "
    "k = cuda_kernel(name, source)` and call `k.launch(grid, block, *args)` "
    "(C++ for the CPU: cpp_kernel)"
)
_NO_COMPILE = "write the fused kernel with @triton.jit or cuda_kernel and launch it"
_ONE_STREAM = "launch in order on the current stream; the plan is a straight line"
_NO_CLOCK = "remove it: the harness measures; declare choices with @triton.autotune or TUNE = {...}"


def refuse(what: str, remedy: str) -> NoReturn:
    """Refuse from wherever host code stands; remembered by the recorder during a trace."""
    error = PolicyError(what, remedy)
    recorder = current_recorder()
    if recorder is not None:
        recorder.refuse(error)
    raise error


def refuser(what: str, remedy: str) -> Callable[..., NoReturn]:
    """A function that refuses whatever it is called with."""

    def call(*args: object, **kwargs: object) -> NoReturn:
        refuse(what, remedy)

    return call


class _Refused(type):
    """Metaclass of refused classes: instantiating one says what to do instead."""

    remedy: str

    def __call__(cls, *args: object, **kwargs: object) -> NoReturn:
        refuse(f"torch.cuda.{cls.__name__}", cls.remedy)


def _refused_class(name: str, remedy: str) -> type:
    return _Refused(name, (), {"remedy": remedy})


class _Stream:
    """The current stream."""

    cuda_stream = 0
    stream_id = 0
    device_index = 0
    device_type = 1

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)

    def synchronize(self) -> None:
        """Do nothing: nothing runs while a call is traced."""

    def wait_stream(self, stream: object) -> None:
        """There is one stream."""

    def query(self) -> bool:
        return True


class _DeviceContext(contextlib.AbstractContextManager["_DeviceContext"]):
    """`with torch.cuda.device(...)`, `device_of`, `stream`: there is one device and one stream."""

    def __init__(self, *args: object) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        return None


class _RefusedModule(types.ModuleType):
    """A module whose every name is refused when it is imported from."""

    def __init__(self, name: str, remedy: str) -> None:
        super().__init__(name)
        self._remedy = remedy

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        refuse(f"{self.__name__}.{name}", self._remedy)


def install(target: Target) -> None:
    """Replace what host code must not reach or could not use here."""
    _install_cuda(target)
    _install_refusals()
    _install_library()


def _properties(target: Target) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        name=target.device_name,
        major=target.major,
        minor=target.minor,
        multi_processor_count=target.multiprocessors,
        total_memory=target.memory_bytes,
        warp_size=target.warp_size,
        regs_per_multiprocessor=target.registers_per_multiprocessor,
        max_threads_per_multi_processor=target.threads_per_multiprocessor,
        max_threads_per_block=target.threads_per_block,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=target.shared_per_block,
        shared_memory_per_multiprocessor=target.shared_per_multiprocessor,
        L2_cache_size=target.l2_bytes,
        clock_rate=target.clock_khz,
        memory_clock_rate=target.memory_clock_khz,
        memory_bus_width=target.memory_bus_bits,
        is_integrated=0,
        is_multi_gpu_board=0,
    )


def _install_cuda(target: Target) -> None:
    present = not target.is_cpu
    stream = _Stream()
    answers: dict[str, object] = {
        "is_available": lambda: present,
        "is_initialized": lambda: present,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: int(present),
        "current_device": lambda: 0,
        "set_device": lambda device=None: None,
        "get_device_capability": lambda device=None: (target.major, target.minor),
        "get_device_properties": lambda device=None: _properties(target),
        "get_device_name": lambda device=None: target.device_name,
        "get_arch_list": lambda: [target.name],
        "is_bf16_supported": lambda including_emulation=True: target.capability >= 80,
        "is_current_stream_capturing": lambda: False,
        "mem_get_info": lambda device=None: (target.memory_bytes, target.memory_bytes),
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "device": _DeviceContext,
        "device_of": _DeviceContext,
        "stream": _DeviceContext,
        "Stream": _refused_class("Stream", _ONE_STREAM),
        "ExternalStream": _refused_class("ExternalStream", _ONE_STREAM),
        "Event": _refused_class("Event", _NO_CLOCK),
        "CUDAGraph": _refused_class("CUDAGraph", "launch directly: the harness captures the graph"),
        "graph": _refused_class("graph", "launch directly: the harness captures the graph"),
        "make_graphed_callables": refuser(
            "torch.cuda.make_graphed_callables", "launch directly: the harness captures the graph"
        ),
    }
    for name, value in answers.items():
        setattr(torch.cuda, name, value)
    if present and torch.version.cuda is None:
        torch.version.cuda = "13.0"  # host code that looks expects a CUDA build


def _install_refusals() -> None:
    torch.compile = refuser("torch.compile", _NO_COMPILE)
    torch.jit.script = refuser("torch.jit.script", _NO_COMPILE)
    autocast = refuser("torch.autocast", "convert explicitly with .to(dtype)")
    for module in (torch, torch.amp, torch.cuda.amp):
        setattr(module, "autocast", autocast)  # noqa: B010 - the type checker knows it as a class
    torch.jit.trace = refuser("torch.jit.trace", _NO_COMPILE)
    torch.manual_seed = refuser(
        "torch.manual_seed", "results must follow from the arguments alone: remove random numbers"
    )
    for name, remedy in {
        "torch.utils.cpp_extension": _CUDA_SOURCE,
        "cupy": _CUDA_SOURCE,
        "numba": _CUDA_SOURCE,
        "numba.cuda": _CUDA_SOURCE,
        "pycuda": _CUDA_SOURCE,
        "pycuda.compiler": _CUDA_SOURCE,
        "torch.utils.benchmark": _NO_CLOCK,
    }.items():
        sys.modules[name] = _RefusedModule(name, remedy)
    setattr(torch.utils, "cpp_extension", sys.modules["torch.utils.cpp_extension"])  # noqa: B010
    for name in ("do_bench", "do_bench_cudagraph", "perf_report", "Benchmark"):
        setattr(triton.testing, name, refuser(f"triton.testing.{name}", _NO_CLOCK))


class _PlainOperator:
    """Result of `torch.library.custom_op` here: the function itself."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("register_") or name in {"impl_abstract", "set_kernel_enabled"}:
            return lambda *args, **kwargs: args[0] if args and callable(args[0]) else _identity
        raise AttributeError(name)


def _identity(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _plain_operator(
    name: str, fn: Callable[..., Any] | None = None, /, **options: object
) -> _PlainOperator | Callable[[Callable[..., Any]], _PlainOperator]:
    return _PlainOperator if fn is None else _PlainOperator(fn)


def _install_library() -> None:
    """Registered operators are called directly: registering is for users of what is exported."""
    torch.library.custom_op = _plain_operator  # type: ignore[assignment]
    torch.library.triton_op = _plain_operator
    torch.library.wrap_triton = _identity


@contextlib.contextmanager
def no_garbage_collection(*, thaws: bool = True) -> Iterator[None]:
    """Tensors die with their last reference, or at points that the source alone decides.

    What exists already is frozen, so that the recorder can collect cycles for little. A process
    that ends soon, or freezes its heap anyway, does not thaw it: the next collection would walk all
    of it, and a fork copy what it walks.
    """
    was = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        if thaws:
            gc.unfreeze()
        if was:
            gc.enable()
