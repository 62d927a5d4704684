"""Compiling a baseline without running it, beside others that use the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch

from kagent_sandbox.device.baseline_calls import BaselineCall, make_call


class _Compiled(BaseException):
    """Everything is compiled, and would run now."""


def compile_only(call: BaselineCall, device: torch.device, *, chooses: bool) -> None:
    """Have torch's compiler leave behind what a first call of a torch.compile baseline would.

    Inputs are memory that nobody has written, and no kernel runs.

    Args:
        call: The baseline.
        device: Of its inputs.
        chooses: Whether the compiler times variants while it compiles, as of matrix products. Then
            its choice is no choice, and only the variants' binaries are to be kept.

    Raises:
        Exception: It cannot be compiled, or not in this way.
    """
    function = make_call(call, device, drawn=False)
    with contextlib.ExitStack() as stack:
        for patch in _patches(chooses=chooses):
            stack.enter_context(patch)
        with contextlib.suppress(_Compiled):
            function()
            raise RuntimeError("the compiler compiled nothing")


def _patches(*, chooses: bool) -> Iterator[contextlib.AbstractContextManager[object]]:
    from torch._inductor import config
    from torch._inductor.output_code import CompiledFxGraph
    from torch._inductor.runtime.benchmarking import benchmarker
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    def stop(*_: object, **__: object) -> None:
        raise _Compiled

    def equal(_: object, choices: Sequence[Any], *__: object, **___: object) -> Mapping[Any, float]:
        return dict.fromkeys(choices, 1.0)

    yield mock.patch.object(CompiledFxGraph, "__call__", stop)
    yield mock.patch.object(AlgorithmSelectorCache, "lookup", equal)
    for name in ("benchmark", "benchmark_gpu"):
        yield mock.patch.object(type(benchmarker), name, return_value=1.0)
    if chooses:  # configurations are part of the compiled code's key, but not of the binaries'
        yield config.patch(shape_padding=False, benchmark_epilogue_fusion=False)
