"""CUDA and C++ kernels from source, compiled for the machine at hand and launched on torch tensors.

Self-contained: the standard library, torch, numpy and cuda-bindings, and nothing of the package
around it. Kernel libraries carry a copy. What needs torch is imported when it is first asked for,
so that `store` can compile ahead where there is none.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .cuda_kernels import CudaKernel as CudaKernel
    from .cuda_kernels import cuda_kernel as cuda_kernel
    from .errors import CompileError as CompileError
    from .errors import KernelError as KernelError
    from .errors import KernelUnavailable as KernelUnavailable
    from .errors import LaunchError as LaunchError
    from .launches import Observed as Observed
    from .launches import observing as observing
    from .source import Source as Source
    from .store import compile_ahead as compile_ahead
    from .structs import StructArgument as StructArgument
    from .structs import struct as struct
    from .tensor_maps import TensorMapArgument as TensorMapArgument
    from .tensor_maps import tensor_map as tensor_map

_HOMES = {
    "CudaKernel": "cuda_kernels",
    "CompileError": "errors",
    "KernelError": "errors",
    "KernelUnavailable": "errors",
    "LaunchError": "errors",
    "cuda_kernel": "cuda_kernels",
    "Observed": "launches",
    "observing": "launches",
    "Source": "source",
    "compile_ahead": "store",
    "StructArgument": "structs",
    "struct": "structs",
    "TensorMapArgument": "tensor_maps",
    "tensor_map": "tensor_maps",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value
