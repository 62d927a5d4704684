"""Compiling a baseline without running it, beside others that use the device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch

from kagent_sandbox.device.baseline_calls import BaselineCall, make_call
from kagent_sandbox.device.variants import refusing_lacks, timing_slow_ones_once
from kagent_sandbox.process.cores import usable_cores

Alone = Callable[[], contextlib.AbstractContextManager[None]]
"""Makes a context in which nobody else uses the device. Entering it may take minutes."""
WAITS = "waits"
"""Answer of a process that compiles, where it needs the device alone."""
TIME, GO_ON = "time variants", "go on"
"""Requests to a process that waits: the device is its own; it is so no more."""


class _Compiled(BaseException):
    """Everything is compiled, and would run now."""


def compile_only(call: BaselineCall, device: torch.device, alone: Alone) -> None:
    """Have torch's compiler leave behind what a first call of a torch.compile baseline would.

    Inputs are memory that nobody has written. No kernel runs but variants of products and
    convolutions, of which the compiler takes the fastest: it times them, `alone`.

    Args:
        call: The baseline.
        device: Of its inputs.
        alone: Is entered whenever variants are timed, and left when they are.

    Raises:
        RuntimeError: The compiler compiled nothing.
        Exception: It cannot be compiled, or lacks memory for a variant.
    """
    function = make_call(call, device, drawn=False)
    turn = _Turn(alone, _tensors(function.keywords.values()))
    # in this order: they patch the same functions
    with timing_slow_ones_once(), _compiling(turn), refusing_lacks(device):
        try:
            function()
        except _Compiled:
            return
        raise RuntimeError("the compiler compiled nothing")


def _tensors(values: Iterable[object]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list):
            yield from _tensors(value)


class _Turn:
    """Has functions called with the device alone; those that they call have it already.

    Args:
        alone: See `compile_only`.
        inputs: Are not needed any more when variants are timed: the compiler knows their shapes.
            Their memory is given back, since others may have the device first.
    """

    def __init__(self, alone: Alone, inputs: Iterable[torch.Tensor]) -> None:
        self._alone = alone
        self._inputs = list(inputs)
        self._inside = False
        self._kept: contextlib.ExitStack | None = None  # where a turn is kept; None: nowhere

    def having(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, called in a turn."""

        def call(*arguments: object, **named: object) -> object:
            with contextlib.ExitStack() as own:
                if not self._inside:
                    (self._kept or own).enter_context(self._begun())
                return function(*arguments, **named)

        return call

    def keeping(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which keeps the first turn that it needs, if it needs one."""

        def call(*arguments: object, **named: object) -> object:
            if self._inside or self._kept is not None:
                return function(*arguments, **named)
            with contextlib.ExitStack() as own:
                self._kept = own
                try:
                    return function(*arguments, **named)
                finally:
                    self._kept = None

        return call

    @contextlib.contextmanager
    def _begun(self) -> Iterator[None]:
        while self._inputs:
            self._inputs.pop().untyped_storage().resize_(0)
        with self._alone():
            self._inside = True
            try:
                yield
            finally:
                self._inside = False


@contextlib.contextmanager
def _compiling(turn: _Turn) -> Iterator[None]:
    """Have torch's compiler stop before anything runs, and time variants in turns."""
    from torch._inductor import select_algorithm
    from torch._inductor.codegen.triton import TritonScheduling
    from torch._inductor.fx_passes import pad_mm
    from torch._inductor.output_code import CompiledFxGraph
    from torch._inductor.runtime.benchmarking import benchmarker
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    def stop(*_: object, **__: object) -> None:
        raise _Compiled

    time_fused = turn.having(TritonScheduling.benchmark_codegened_module)

    def compile_and_time(scheduling: object, module: Any, *rest: Any, **named: Any) -> object:
        with contextlib.suppress(Exception):  # met again, and handled, where it is timed
            module.triton_.precompile()
        return time_fused(scheduling, module, *rest, **named)

    choose = staticmethod(turn.having(AlgorithmSelectorCache.benchmark_in_current_process))
    kind = type(benchmarker)
    with (
        mock.patch.object(CompiledFxGraph, "__call__", stop),
        # All variants of one product in one turn.
        mock.patch.object(AlgorithmSelectorCache, "benchmark_in_current_process", choose),
        # A product with what follows it in one kernel: its first run, its configurations, itself.
        mock.patch.object(TritonScheduling, "benchmark_codegened_module", compile_and_time),
        # A product as it is and padded: nothing is compiled between the two.
        mock.patch.object(pad_mm, "should_pad", turn.keeping(pad_mm.should_pad)),
        # Whoever else times.
        mock.patch.object(kind, "benchmark", turn.having(kind.benchmark)),
        mock.patch.object(kind, "benchmark_gpu", turn.having(kind.benchmark_gpu)),
        # Twenty variants of a product in float32 take a core minutes. Threads need no processes.
        mock.patch.object(select_algorithm, "get_num_workers", usable_cores),
    ):
        yield
