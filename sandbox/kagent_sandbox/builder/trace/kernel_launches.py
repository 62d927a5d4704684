"""Kernels with a source that host code launches while it is traced: compiled, and recorded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from kagent_sandbox.builder.binary.linked_libraries import forbidden_import
from kagent_sandbox.builder.compile import kernels
from kagent_sandbox.builder.policy import PolicyError
from kagent_sandbox.builder.trace.recorder import Recorder, current_recorder
from kagent_sandbox.data.kind import kind_of_target
from kagent_sandbox.data.language import how_to_write, language
from kagent_sandbox.data.plan import Arg, Null, Pointer, Scalar, Struct, TensorMap
from kagent_sandbox.data.verdict import Status
from kagent_sandbox.runtime import arguments
from kagent_sandbox.runtime.launches import Launching, launch_instead
from kagent_sandbox.runtime.source import Source
from kagent_sandbox.runtime.structs import StructArgument
from kagent_sandbox.runtime.tensor_maps import TensorMapArgument, described


def install() -> None:
    """Make launches during a trace part of its plan from now on."""
    launch_instead(_record)


def plan_argument(
    value: arguments.Value, pointer_of: Callable[[torch.Tensor], Pointer]
) -> Pointer | Null | Scalar | TensorMap | Struct:
    """A converted argument as a plan has it; `pointer_of` says where a tensor lies."""
    if isinstance(value, arguments.ScalarArgument):
        return Scalar(value.type, value.value)
    if value is None:
        return Null()
    if isinstance(value, StructArgument):
        placed = ((offset, _placed(inside, pointer_of)) for offset, inside in value.placed)
        return Struct(value.data, tuple(placed))
    return _placed(value, pointer_of)


def _placed(
    value: torch.Tensor | TensorMapArgument, pointer_of: Callable[[torch.Tensor], Pointer]
) -> Pointer | TensorMap:
    if isinstance(value, torch.Tensor):
        return pointer_of(value)
    pointer = pointer_of(value.tensor)
    return TensorMap(
        buffer=pointer.buffer, offset=pointer.offset, **dataclasses.asdict(described(value))
    )


def _record(source: Source, values: Sequence[object], launch: Launching) -> bool:
    """Record a launch; not where no trace is in progress (the file is being imported)."""
    recorder = current_recorder()
    if recorder is None:
        return False
    kind = kind_of_target(recorder.target)
    if language(source.language).kind != kind:
        recorder.refuse(
            PolicyError(
                f"a {source.language} kernel in a candidate for {recorder.target}",
                f"use {how_to_write(kind)}",
            )
        )
    kernel = kernels.compiled(source, recorder.target, recorder.compile_limit_s)
    if recorder.target == "cpu" and (what := forbidden_import(kernel.binary)):
        recorder.refuse(
            PolicyError(
                f"kernel {source.name} imports {what}",
                "compute it in the kernel; the C, C++ and OpenMP libraries are there",
            )
        )
    args = _arguments(recorder, source.name, values, kernel.parameters)
    if problem := kernels.over_limits(kernel.info, launch, recorder.target, source.name):
        recorder.refuse(PolicyError(*problem, status=Status.RESOURCE_LIMIT))
    recorder.launch(kernel.info, kernel.binary, args, launch, source.name)
    return True


def _arguments(
    recorder: Recorder,
    kernel: str,
    values: Sequence[object],
    parameters: Sequence[arguments.Parameter],
) -> tuple[Arg, ...]:
    """Arguments of one launch.

    Raises:
        TypeError: One does not fit its parameter.
        PolicyError: A tensor is none of the trace's.
    """

    def check(value: torch.Tensor | TensorMapArgument) -> None:
        tensor = value.tensor if isinstance(value, TensorMapArgument) else value
        pointer = recorder.pointer(tensor)
        if tensor is not value and pointer.offset % 16:
            raise TypeError("the tensor of a tensor map must start at a multiple of 16 bytes")

    converted = arguments.converted(kernel, values, parameters, check)
    return tuple(plan_argument(value, recorder.pointer) for value in converted)
