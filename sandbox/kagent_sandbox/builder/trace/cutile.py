"""cuTile's kernels while host code is traced: exported for the target, recorded, never launched.

`cuda.tile.launch` is replaced. Arguments become the signature that the kernel is compiled for, with
what their sizes, strides and addresses are multiples of. A launch passes an array as its address,
its sizes and its strides. Blocks have one thread, as cuTile itself launches them: how many threads
a tile takes is in the binary, for the driver.

In the builder's child only, which imports cuTile for candidates that use it.
"""

from __future__ import annotations

import importlib
import inspect
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kagent_sandbox.builder.binary.inspect import InspectError, kernel_info
from kagent_sandbox.builder.compile import kernels
from kagent_sandbox.builder.compile.time_limit import compile_limit
from kagent_sandbox.builder.policy import BuildRejected, PolicyError
from kagent_sandbox.builder.trace.recorder import current_recorder
from kagent_sandbox.builder.trace.symbolic import SymbolicTensor
from kagent_sandbox.data.language import CUTILE
from kagent_sandbox.data.plan import Arg, Scalar
from kagent_sandbox.data.target import Target
from kagent_sandbox.data.verdict import Stage, Status
from kagent_sandbox.runtime.launches import Launching

_ALIGNED_BYTES = 16  # of an address or a stride: more is worth nothing to a compiler
_INT32 = 1 << 31
_binaries: dict[tuple[object, str], tuple[bytes, str]] = {}  # of a kernel and a signature


def install(target: Target, folder: Path) -> None:
    """Import cuTile, and have its launches compiled for a target and recorded.

    Args:
        target: A GPU.
        folder: The candidate's private folder: the compiler's files go there.

    Raises:
        BuildRejected: cuTile is not installed, or is a version that this cannot record.
    """
    if target.is_cpu:
        return  # launches are refused where they happen: there are none without a GPU's target
    os.environ |= {"CUDA_TILE_TEMP_DIR": str(folder / "cutile"), "CUDA_TILE_CACHE_DIR": "0"}
    try:
        tile: Any = importlib.import_module("cuda.tile")
        importlib.import_module("cuda.tile.compilation")
        tile.launch = _launch
    except (ImportError, AttributeError) as e:
        raise BuildRejected(
            Stage.BUILD,
            Status.COMPILE_ERROR,
            f"cuTile cannot be used here ({e}): pip install 'kagent[cutile]' (cuda-tile 1.7)",
        ) from None


def _launch(
    stream: object,  # noqa: ARG001 - plans have one
    grid: Sequence[int],
    kernel: Any,
    kernel_args: Sequence[object],
    /,
    *,
    programmatic_dependent_launch: bool = False,
) -> None:
    """Record a launch, in the place of `cuda.tile.launch`."""
    recorder = current_recorder()
    if recorder is None:
        raise PolicyError(
            "a kernel of cuTile is launched while the file is imported", "launch it in host code"
        )
    function = kernel._annotated_function  # noqa: SLF001
    nodes = function.parameter_annotations
    if len(nodes) != len(kernel_args):
        raise PolicyError(
            f"{function.pyfunc.__name__} is launched with {len(kernel_args)} arguments",
            f"it has {len(nodes)} parameters",
        )
    names = tuple(inspect.signature(function.pyfunc).parameters)
    shared = [a.buffer for a in kernel_args if isinstance(a, SymbolicTensor)]
    constraints, args = [], []
    for name, node, value in zip(names, nodes, kernel_args, strict=True):
        constraint, passed = _parameter(name, node, value, shared)
        constraints.append(constraint)
        args += passed
    binary, symbol = _compiled(kernel, function.pyfunc.__name__, constraints, recorder.target)
    try:
        info = kernel_info(binary, symbol, CUTILE.name)
    except InspectError as e:
        raise PolicyError(f"a kernel of cuTile cannot be read: {e}", "use a simpler one") from None
    if info.param_bytes != tuple(_bytes(a) for a in args):
        raise PolicyError(
            f"{symbol} takes parameters of {info.param_bytes} bytes, not those of its arguments",
            "kagent knows cuda-tile 1.7's calls with tensors and numbers",
        )
    across, down, deep = (*map(int, grid), 1, 1)[:3]
    launching = Launching(
        (across, down, deep), (1, 1, 1), 0, None, False, programmatic_dependent_launch
    )
    if problem := kernels.over_limits(info, launching, recorder.target):
        raise PolicyError(*problem, status=Status.RESOURCE_LIMIT)
    recorder.launch(info, binary, tuple(args), launching)


def _parameter(
    name: str, node: Any, value: object, shared: Sequence[int]
) -> tuple[object, list[Arg]]:
    """Constraint that a parameter is compiled for, and arguments that a launch passes for it.

    Args:
        name: Of the parameter.
        node: Its annotation.
        value: Its argument.
        shared: Buffers of all tensors of the launch.
    """
    tile: Any = importlib.import_module("cuda.tile")
    compilation: Any = importlib.import_module("cuda.tile.compilation")
    if isinstance(value, SymbolicTensor):
        return _array(tile, compilation, name, value, shared)
    if not isinstance(value, bool | int | float):
        raise PolicyError(
            f"{name} of a kernel of cuTile is given a {type(value).__name__}",
            "plans know tensors and numbers",
        )
    if getattr(node, "constant", False):
        return compilation.ConstantConstraint(value), []
    if isinstance(value, bool):
        raise PolicyError(f"{name} of a kernel of cuTile is a flag", f"{name}: ct.Constant[bool]")
    if isinstance(value, float):
        return compilation.ScalarConstraint(tile.float32), [Scalar("f32", value)]
    if -_INT32 <= value < _INT32:
        return compilation.ScalarConstraint(tile.int32), [Scalar("i32", value)]
    return compilation.ScalarConstraint(tile.int64), [Scalar("i64", value)]


def _array(
    tile: Any, compilation: Any, name: str, tensor: SymbolicTensor, shared: Sequence[int]
) -> tuple[object, list[Arg]]:
    recorder = current_recorder()
    assert recorder is not None
    pointer = recorder.pointer_of_address(tensor.data_ptr())
    dtype = getattr(tile, str(tensor.dtype).removeprefix("torch."), None)
    if tensor.dtype.is_complex or dtype is None or pointer is None:
        raise PolicyError(f"{name} of a kernel of cuTile is of {tensor.dtype}", "another dtype")
    sizes, strides = tuple(tensor.shape), tuple(tensor.stride())
    wide = any(n >= _INT32 for n in (*sizes, *strides))
    whole = max(1, _ALIGNED_BYTES // tensor.element_size())
    constraint = compilation.ArrayConstraint(
        dtype,
        len(sizes),
        index_dtype=tile.int64 if wide else tile.int32,
        stride_lower_bound_incl=0,
        alias_groups=(f"b{tensor.buffer}",) if shared.count(tensor.buffer) > 1 else (),
        may_alias_internally=any(n > 1 and s == 0 for n, s in zip(sizes, strides, strict=True)),
        stride_constant=tuple(1 if s == 1 else None for s in strides),
        stride_divisible_by=tuple(1 if s == 1 else _factor(s, whole) for s in strides),
        shape_divisible_by=tuple(_factor(n, _ALIGNED_BYTES) for n in sizes),
        base_addr_divisible_by=_factor(pointer.offset, _ALIGNED_BYTES),
    )
    numbers = [Scalar("i64" if wide else "i32", n) for n in (*sizes, *strides)]
    return constraint, [pointer, *numbers]


def _factor(number: int, most: int) -> int:
    """The largest power of two up to `most` that divides a number."""
    return min(number & -number or most, most)


def _bytes(arg: Arg) -> int:
    return 4 if isinstance(arg, Scalar) and arg.type in {"f32", "i32"} else 8


def _compiled(
    kernel: Any, name: str, constraints: Sequence[object], target: str
) -> tuple[bytes, str]:
    """The binary of a kernel for arguments like these, and its symbol."""
    compilation: Any = importlib.import_module("cuda.tile.compilation")
    exceptions: Any = importlib.import_module("cuda.tile._exception")
    recorder = current_recorder()
    convention = compilation.CallingConvention.cutile_python_v1()
    try:
        signature = compilation.KernelSignature(constraints, convention).with_mangled_symbol(name)
        symbol: str = signature.symbol
        key = (kernel, symbol)
        if key not in _binaries:
            file = io.BytesIO()
            with compile_limit(name, recorder.compile_limit_s if recorder else None):
                compilation.export_kernel(
                    kernel,
                    [signature],
                    file,
                    gpu_code=target.rstrip("af"),
                    output_format="cubin",
                )
            _binaries[key] = file.getvalue(), symbol
    except exceptions.TileError as e:
        raise BuildRejected(Stage.BUILD, Status.COMPILE_ERROR, f"{name}: {e}") from None
    except (TypeError, ValueError, FileNotFoundError) as e:
        raise BuildRejected(
            Stage.BUILD, Status.COMPILE_ERROR, f"cuTile cannot compile {name}: {e}"
        ) from None
    return _binaries[key]
