"""CUDA and C++ kernels for candidates: compiled from source, launched on torch tensors.

    _softmax = cuda_kernel("softmax_rows", SOURCE)

    def softmax(x):
        y = torch.empty_like(x)
        _softmax.launch(x.shape[0], 256, x, y, x.shape[1], shared=4 * x.shape[1])
        return y

While kagent builds a candidate, launches are recorded and nothing runs. Imported anywhere else, the
same file compiles for the machine at hand and runs, so that it can be tried, tested and shipped.

A kernel is compiled when it is first launched. Kernels with one name, source, options and defines
are one kernel: make them inside of the host function where defines depend on shapes or on tunables.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kagent_sandbox.build import kernels
from kagent_sandbox.build.arguments import PointerOf, kernel_arguments
from kagent_sandbox.build.imports import forbidden_import
from kagent_sandbox.build.policy import PolicyError
from kagent_sandbox.build.symbolic import current_recorder
from kagent_sandbox.plan import TensorMap
from kagent_sandbox.verdict import Status

__all__ = [
    "CppKernel",
    "CudaKernel",
    "TensorMapArgument",
    "cpp_kernel",
    "cuda_kernel",
    "tensor_map",
]

Size = int | Sequence[int]


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
    return CudaKernel(kernels.Source("cuda", name, source, tuple(options), _macros(defines)))


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
        options: Options of g++ that change code, for example `-ffast-math`.
        defines: Macros: names to numbers or text.
    """
    return CppKernel(kernels.Source("cpp", name, source, tuple(options), _macros(defines)))


@dataclass(frozen=True)
class CudaKernel:
    """A CUDA kernel, compiled when first launched."""

    source: kernels.Source

    def launch(
        self,
        grid: Size,
        block: Size,
        *args: object,
        shared: int = 0,
        cluster: Size | None = None,
        cooperative: bool = False,
        pdl: bool = False,
    ) -> None:
        """Launch on the current stream.

        Args:
            grid: Blocks per axis, up to three (all blocks, clusters or not).
            block: Threads per axis, up to three.
            args: Tensors (their first element's address), numbers by the type of the parameter,
                numpy
                scalars (explicit types), None (a null pointer), `tensor_map(...)`.
            shared: Dynamic shared memory of a block in bytes.
            cluster: Blocks of a cluster per axis (sm_90 and later).
            cooperative: All blocks run at once and may wait for each other.
            pdl: Start before the kernel ahead has ended (programmatic dependent launch, sm_90 and
                later).

        Raises:
            TypeError: An argument does not fit its parameter.
            ValueError: A size is not positive.
            CompileError: The source was refused.
        """
        sizes = _sizes(grid, "grid"), _sizes(block, "block")
        per_cluster = None if cluster is None else _sizes(cluster, "cluster")
        launch = kernels.Launching(*sizes, operator.index(shared), per_cluster, cooperative, pdl)
        _run(self.source, args, launch)


@dataclass(frozen=True)
class CppKernel:
    """A C++ kernel for the CPU, compiled when first called."""

    source: kernels.Source

    def __call__(self, *args: object) -> None:
        """Call it; arguments as for `CudaKernel.launch`.

        Raises:
            TypeError: An argument does not fit its parameter.
            CompileError: The source was refused.
        """
        _run(self.source, args, kernels.Launching((1, 1, 1), (1, 1, 1)))


@dataclass(frozen=True)
class TensorMapArgument:
    """What `tensor_map` returns: a tensor and how blocks of it are copied."""

    tensor: torch.Tensor
    box: tuple[int, ...]
    swizzle: int
    interleave: int
    l2_promotion: int
    element_strides: tuple[int, ...]
    oob_nan: bool


def tensor_map(
    tensor: torch.Tensor,
    box: Sequence[int],
    *,
    swizzle: int = 0,
    interleave: int = 0,
    l2_promotion: int = 128,
    element_strides: Sequence[int] | None = None,
    oob_nan: bool = False,
) -> TensorMapArgument:
    """A TMA descriptor for a `const __grid_constant__ CUtensorMap` parameter (sm_90 and later).

    Args:
        tensor: 1 to 5 dimensions, the last contiguous.
        box: Elements per copy along each dimension of `tensor`, in its order; at most 256 each.
        swizzle: 0, 32, 64 or 128 bytes; the box's last dimension must not be wider.
        interleave: 0, 16 or 32 bytes.
        l2_promotion: 0, 64, 128 or 256 bytes.
        element_strides: Take every n-th element, per dimension.
        oob_nan: Fill with NaN outside of the tensor; zeros otherwise.

    Raises:
        ValueError: A value that the hardware does not take; the text says which and why.
    """
    sizes, rank = tuple(operator.index(b) for b in box), tensor.dim()
    steps = tuple(element_strides or (1,) * rank)
    width = tensor.element_size()
    if not 1 <= rank <= 5 or len(sizes) != rank or len(steps) != rank:
        raise ValueError(
            f"tensor_map of {rank} dimensions needs a box of as many sizes, 1 to 5; got {box}"
        )
    if tensor.stride(-1) != 1:
        raise ValueError(
            f"tensor_map needs a contiguous last dimension, its stride is {tensor.stride(-1)}"
        )
    if odd := [s * width for s in tensor.stride()[:-1] if s * width % 16]:
        raise ValueError(f"tensor_map needs strides of a multiple of 16 bytes, got {odd[0]}")
    if not all(1 <= b <= 256 for b in sizes):
        raise ValueError(
            f"tensor_map boxes have 1 to 256 elements along each dimension, got {sizes}"
        )
    if sizes[-1] * width % 16:
        raise ValueError(
            f"the box's last dimension has {sizes[-1] * width} bytes: use a multiple of 16"
        )
    if swizzle not in {0, 32, 64, 128} or (swizzle and sizes[-1] * width > swizzle):
        raise ValueError(
            f"swizzle {swizzle} with a box of {sizes[-1] * width} bytes: use 0, 32, 64 or 128, "
            "at least as wide as the box"
        )
    if interleave not in {0, 16, 32} or l2_promotion not in {0, 64, 128, 256}:
        raise ValueError("interleave is 0, 16 or 32 bytes; l2_promotion 0, 64, 128 or 256")
    return TensorMapArgument(tensor, sizes, swizzle, interleave, l2_promotion, steps, oob_nan)


def _macros(defines: Mapping[str, object] | None) -> tuple[tuple[str, object], ...]:
    return tuple((defines or {}).items())


def _sizes(value: Size, what: str) -> tuple[int, int, int]:
    values = tuple(value) if isinstance(value, Sequence) else (value,)
    sizes = [operator.index(v) for v in values]
    if not 1 <= len(sizes) <= 3 or min(sizes) < 1:
        raise ValueError(f"{what}={value!r}: expected one to three positive sizes")
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def _map_of(value: object, pointer_of: PointerOf) -> TensorMap:
    if not isinstance(value, TensorMapArgument):
        raise TypeError(f"got {type(value).__name__}; pass tensor_map(tensor, box)")
    tensor, width = value.tensor, value.tensor.element_size()
    pointer = pointer_of(tensor)
    if pointer.offset % 16:
        raise TypeError("the tensor of a tensor map must start at a multiple of 16 bytes")
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorMap(
        buffer=pointer.buffer,
        offset=pointer.offset,
        dtype=dtype,
        dims=tuple(reversed(tensor.shape)),
        strides=tuple(s * width for s in reversed(tensor.stride()[:-1])),
        box=tuple(reversed(value.box)),
        element_strides=tuple(reversed(value.element_strides)),
        swizzle=value.swizzle,  # type: ignore[arg-type]  # checked by tensor_map
        interleave=value.interleave,  # type: ignore[arg-type]
        l2_promotion=value.l2_promotion,  # type: ignore[arg-type]
        oob_nan=value.oob_nan,
    )


def _run(source: kernels.Source, values: Sequence[object], launch: kernels.Launching) -> None:
    recorder = current_recorder()
    if recorder is None:
        from kagent_sandbox.launch import direct  # imports the driver: not while building

        direct.run(source, values, launch, _map_of)
        return
    if (source.language == "cpp") != (recorder.target == "cpu"):
        wanted = "cpp_kernel" if recorder.target == "cpu" else "cuda_kernel or Triton"
        recorder.refuse(
            PolicyError(
                f"a {source.language} kernel in a candidate for {recorder.target}", f"use {wanted}"
            )
        )
    kernel = kernels.compiled(source, recorder.target, recorder.compile_limit_s)

    def map_of(value: object) -> TensorMap:
        return _map_of(value, recorder.pointer)

    if recorder.target == "cpu" and (what := forbidden_import(kernel.binary)):
        recorder.refuse(
            PolicyError(
                f"kernel {source.name} imports {what}",
                "compute it in the kernel; the C, C++ and OpenMP libraries are there",
            )
        )
    args = kernel_arguments(source.name, values, kernel.parameters, recorder.pointer, map_of)
    if problem := kernels.over_limits(kernel.info, launch, recorder.target, source.name):
        recorder.refuse(PolicyError(*problem, status=Status.RESOURCE_LIMIT))
    recorder.launch(
        kernel.info,
        kernel.binary,
        launch.grid,
        launch.block,
        args,
        shared=launch.shared,
        cluster=launch.cluster,
        cooperative=launch.cooperative,
        pdl=launch.pdl,
    )
