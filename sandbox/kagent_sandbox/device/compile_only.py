"""Compiling a baseline without running it, beside others that use the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch

from kagent_sandbox.device.baseline_calls import BaselineCall, forget_compiled, make_call
from kagent_sandbox.device.cpu.facts import usable_cores


class _Compiled(BaseException):
    """Everything is compiled, and would run now."""


class _Chooses(BaseException):
    """The compiler is about to time variants."""


def compile_only(call: BaselineCall, device: torch.device) -> bool:
    """Have torch's compiler leave behind what a first call of a torch.compile baseline would.

    Inputs are memory that nobody has written, and no kernel runs.

    Args:
        call: The baseline.
        device: Of its inputs.

    Returns:
        Whether all that is left behind can be used. Where the compiler times variants while it
        compiles, as of products and convolutions, its choice is no choice, and only the variants'
        binaries are to be kept.

    Raises:
        RuntimeError: The compiler compiled nothing.
        Exception: It cannot be compiled.
    """
    try:
        _compile(call, device, chooses=False)
    except _Chooses:
        forget_compiled()
        _compile(call, device, chooses=True)
        return False
    return True


def _compile(call: BaselineCall, device: torch.device, *, chooses: bool) -> None:
    function = make_call(call, device, drawn=False)
    with contextlib.ExitStack() as stack:
        for patch in _patches(chooses=chooses):
            stack.enter_context(patch)
        try:
            function()
        except _Compiled:
            return
        raise RuntimeError("the compiler compiled nothing")


def _patches(*, chooses: bool) -> Iterator[contextlib.AbstractContextManager[object]]:
    from torch._inductor import config, select_algorithm
    from torch._inductor.output_code import CompiledFxGraph
    from torch._inductor.runtime.benchmarking import benchmarker
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    def stop(*_: object, **__: object) -> None:
        raise _Compiled

    def equal(
        _: object,
        choices: Sequence[Any],
        _operation: str,
        _inputs: str,
        benchmark: object,
        *__: object,
        **___: object,
    ) -> Mapping[Any, float]:
        # First it is asked without `benchmark`, for times that are known: none of such variants
        # would be compiled.
        return {} if benchmark is None else dict.fromkeys(choices, 1.0)

    def refuse(*_: object, **__: object) -> None:
        raise _Chooses

    yield mock.patch.object(CompiledFxGraph, "__call__", stop)
    yield mock.patch.object(AlgorithmSelectorCache, "lookup", equal if chooses else refuse)
    for name in ("benchmark", "benchmark_gpu"):
        found = {"return_value": 1.0} if chooses else {"side_effect": _Chooses}
        yield mock.patch.object(type(benchmarker), name, **found)
    if chooses:  # configurations are part of the compiled code's key, but not of the binaries'
        yield config.patch(shape_padding=False, benchmark_epilogue_fusion=False)
        # Twenty variants of a product in float32 take a core minutes. Threads need no processes.
        yield mock.patch.object(select_algorithm, "get_num_workers", usable_cores)
