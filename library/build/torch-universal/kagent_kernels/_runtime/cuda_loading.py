"""CUDA kernels into the current context: which binary, what it takes, and its function."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from . import store
from .driver import call, driver, failure
from .errors import LaunchError
from .nvrtc import compile_cuda, compiler_version
from .source import Source

_INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE: there is no such parameter


@dataclass(frozen=True, slots=True)
class Loaded:
    """A kernel in a context."""

    binary: bytes
    symbol: str
    function: Any
    parameter_bytes: tuple[int, ...]


def load(source: Source, target: str) -> Loaded:
    """Load a kernel into the current context, from the first of its binaries that the driver takes:
    one that was made elsewhere may be too new for it.

    Raises:
        CompileError: The source was refused.
        KernelUnavailable: There is no compiler, and no cubin for the target.
        LaunchError: The driver refuses all binaries.
    """
    doing = f"loading {source.name}"
    none: list[object] = []
    refused: LaunchError | None = None
    with outside_of_capture():
        for binary, symbol in _binaries(source, target):
            try:
                library = call(
                    "cuLibraryLoadData", binary, none, none, 0, none, none, 0, doing=doing
                )
                kernel = call("cuLibraryGetKernel", library, symbol.encode(), doing=doing)
                function = call("cuKernelGetFunction", kernel, doing=doing)
            except LaunchError as e:
                refused = e
            else:
                return Loaded(binary, symbol, function, _parameter_bytes(kernel, source.name))
    assert refused is not None, "the last binary is compiled here"
    raise refused


@contextlib.contextmanager
def outside_of_capture() -> Iterator[None]:
    """Loading allocates memory, which is forbidden while this thread captures a stream."""
    modes = driver().CUstreamCaptureMode
    doing = "suspending a capture"
    relaxed = modes.CU_STREAM_CAPTURE_MODE_RELAXED
    before = call("cuThreadExchangeStreamCaptureMode", relaxed, doing=doing)
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", before, doing=doing)


def _parameter_bytes(kernel: object, name: str) -> tuple[int, ...]:
    """Sizes of a kernel's parameters; the driver does not say how many there are."""
    sizes: list[int] = []
    ask = driver().cuKernelGetParamInfo
    while True:
        status, _, *size = ask(kernel, len(sizes))
        if status == _INVALID_VALUE:
            return tuple(sizes)
        if status:
            raise failure(status, f"reading the parameters of {name}")
        sizes.append(int(size[0]))


def _binaries(source: Source, target: str) -> Iterator[tuple[bytes, str]]:
    """A source's cubins, each with the kernel's symbol: the package's, the user's, and one that is
    compiled now.
    """
    data = store.read(store.shipped_cubin(source, target))
    if data is not None:
        yield store.unpacked_cubin(data)
    kept = store.kept_cubin(source, target, compiler_version(source.text))
    data = store.read(kept)
    if data is not None:
        yield store.unpacked_cubin(data)
    defines = dict(source.defines)
    made = compile_cuda(source.name, source.text, target, source.options, defines)
    store.write(kept, store.packed_cubin(made.cubin, made.symbol))
    yield made.cubin, made.symbol
