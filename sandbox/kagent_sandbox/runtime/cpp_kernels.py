"""C++ kernels on tensors in host memory."""

from __future__ import annotations

import ctypes
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from . import store
from .arguments import ScalarArgument, converted, cpp_parameters, plain_converter
from .cpp import SIGNATURE, compile_cpp
from .errors import CompileError
from .launches import Launching, Observed, watch
from .made_once import made_once
from .source import Source
from .tensor_maps import TensorMapArgument

_CTYPES: dict[str, type] = {
    "i1": ctypes.c_bool, "i8": ctypes.c_int8, "u8": ctypes.c_uint8, "i16": ctypes.c_int16,
    "u16": ctypes.c_uint16, "i32": ctypes.c_int32, "u32": ctypes.c_uint32, "i64": ctypes.c_int64,
    "u64": ctypes.c_uint64, "f32": ctypes.c_float, "f64": ctypes.c_double,
}  # fmt: skip
_ONCE = Launching()
_loading = threading.RLock()


def cpp_kernel(
    name: str,
    source: str,
    *,
    options: Sequence[str] = (),
    defines: Mapping[str, object] | None = None,
) -> CppKernel:
    """An `extern "C"` function of a C++ source, compiled by g++ with -O3 -march=native -fopenmp.

    Its parameters are pointers and numbers (int, int64_t, float, double, bool, ...); it returns
    nothing.

    Args:
        name: The function's name.
        source: C++20, with any header of the compiler's and of OpenMP's.
        options: Options of g++ that change the kernel's code, for example `-fno-math-errno`.
        defines: Macros: names to numbers or text.

    Returns:
        The kernel. Call it with the function's arguments; nothing is compiled before.

    Example:
        Double every element of a tensor, whatever its shape:

            import torch

            double_all = cpp_kernel("double_all", '''
                #include <cstdint>
                extern "C" void double_all(const float* x, float* y, int64_t n) {
                    #pragma omp parallel for
                    for (int64_t i = 0; i < n; ++i) y[i] = 2 * x[i];
                }
            ''')

            x = torch.randn(4, 1000)  # float32, contiguous
            y = torch.empty_like(x)
            double_all(x, y, x.numel())
            assert torch.equal(y, 2 * x)
    """
    kernel: CppKernel = made_once(CppKernel, "cpp", name, source, options, defines)
    return kernel


class CppKernel:
    """A C++ kernel for the CPU, compiled when first called."""

    __slots__ = ("_function", "_library", "source")

    def __init__(self, source: Source) -> None:
        self.source = source
        self._library: _Library | None = None
        self._function: Callable[..., None] = self._first

    def __call__(self, *args: object) -> None:
        """Run the kernel to its end.

        Args:
            args: Tensors on the CPU (their first element's address), numbers by the type of the
                parameter, numpy scalars (explicit types), None (a null pointer).

        Raises:
            TypeError: An argument does not fit its parameter, or a tensor is not on the CPU.
            CompileError: The source was refused.
            KernelUnavailable: There is no g++ here, and no library came with the package.
        """
        if watch.any:
            self._watched(args)
        else:
            self._function(*args)

    def _first(self, *args: object) -> None:
        self._function = self._loaded().call
        self._function(*args)

    def _loaded(self) -> _Library:
        if self._library is None:
            with _loading:
                if self._library is None:
                    self._library = _Library(self.source)
        return self._library

    def _watched(self, args: Sequence[object]) -> None:
        if watch.took(self.source, args, _ONCE):
            return
        library = self._loaded()
        if watch.observer is not None:
            values = converted(self.source.name, args, library.parameters, _on_cpu)
            name = self.source.name
            watch.observer(Observed(self.source, "cpu", library.binary, name, values, _ONCE))
        library.call(*args)


def _on_cpu(value: torch.Tensor | TensorMapArgument) -> None:
    if isinstance(value, TensorMapArgument):
        raise TypeError("got a tensor map, which only CUDA kernels take")
    if not value.is_cpu:
        raise TypeError(f"got a tensor on {value.device}; move it to cpu")


class _Library:
    """A compiled kernel in this process."""

    def __init__(self, source: Source) -> None:
        self._name = source.name
        self.binary, library = _open(source)
        said = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(library, SIGNATURE)))
        try:
            self.parameters = cpp_parameters(said.decode("ascii", "replace"))
        except ValueError as e:
            raise CompileError(source.name, str(e)) from None
        self._function = getattr(library, source.name)
        self._function.restype = None
        self._function.argtypes = [
            _CTYPES[p.type] if p.type else ctypes.c_void_p for p in self.parameters
        ]
        self._converters = [_address if p.pointer else plain_converter(p) for p in self.parameters]

    def call(self, *args: object) -> None:
        """Call with Python's values, as they are given."""
        if len(args) == len(self._converters):
            try:
                values = [c(a) for c, a in zip(self._converters, args, strict=True)]
            except TypeError:
                pass  # said properly below
            else:
                self._function(*values)
                return
        found = converted(self._name, args, self.parameters, _on_cpu)
        self._function(*[_plain(value) for value in found])


def _address(value: object) -> int | None:
    if isinstance(value, torch.Tensor):
        if value.is_cpu:
            return value.data_ptr()
    elif value is None:
        return None
    raise TypeError


def _plain(value: object) -> float | bool | None:
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return value.value if isinstance(value, ScalarArgument) else None


def _open(source: Source) -> tuple[bytes, ctypes.CDLL]:
    """A source's library: the package's, the user's, or compiled now."""
    found = _load(store.shipped_library(source)) or _load(kept := store.kept_library(source))
    if found is not None:
        return found
    binary = compile_cpp(source.name, source.text, source.options, dict(source.defines))
    found = _load(kept) if store.write(kept, binary) else None
    if found is not None:
        return found
    with tempfile.TemporaryDirectory(prefix="kernel_") as folder:  # nothing can be kept
        path = Path(folder, "kernel.so")
        path.write_bytes(binary)
        return binary, ctypes.CDLL(str(path))


def _load(path: Path | None) -> tuple[bytes, ctypes.CDLL] | None:
    binary = store.read(path)
    if binary is None:
        return None
    try:
        return binary, ctypes.CDLL(str(path))
    except OSError:  # damaged, or for a system that lacks one of its libraries
        return None
