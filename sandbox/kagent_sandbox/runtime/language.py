"""Kernels by name and source, as host code asks for them, on every call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .cpp_kernels import CppKernel
from .cuda_kernels import CudaKernel
from .source import Source

_made: dict[Any, Any] = {}


def cuda_kernel(
    name: str,
    source: str,
    *,
    options: Sequence[str] = (),
    defines: Mapping[str, object] | None = None,
) -> CudaKernel:
    """A `__global__` function of a CUDA C++ source.

    Args:
        name: Its name, plain or `namespace::name`, or an instance of a template: `rows<128,
            float>`.
        source: CUDA C++. Headers of the toolkit (cuda_bf16.h, mma.h, cooperative_groups.h,
            cuda/barrier,
            cuda.h for CUtensorMap) can be included; host code cannot.
        options: Options of NVRTC that change code, for example `--use_fast_math`.
        defines: Macros: names to numbers or text.
    """
    kernel: CudaKernel = _kernel(CudaKernel, "cuda", name, source, options, defines)
    return kernel


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
    """
    kernel: CppKernel = _kernel(CppKernel, "cpp", name, source, options, defines)
    return kernel


def _kernel(
    kind: Any,
    language: Any,
    name: str,
    source: str,
    options: Sequence[str],
    defines: Mapping[str, object] | None,
) -> Any:
    """The kernel of these, made once.

    Kept by the texts themselves, whose hashes Python keeps. Types are part of the key: 1, 1.0 and
    True are equal, and different macros.
    """
    macros = defines or {}
    values = macros.values()
    key = (kind, name, source, *options, *macros, *values, *map(type, values))
    try:
        return _made[key]
    except (KeyError, TypeError) as e:
        made = kind(Source(language, name, source, tuple(options), tuple(macros.items())))
        if isinstance(e, KeyError):  # else a define cannot be hashed: compiling it says so
            made = _made.setdefault(key, made)
        return made
