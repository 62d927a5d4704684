"""Variants among which torch's compiler chooses: how they are timed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from kagent_sandbox.device import device_memory
from kagent_sandbox.device.coordinate_descent import compiling_side_by_side

SLOW_S = 0.25
"""A variant that takes as long is timed in one run, after one that warms it up. Torch runs each
seven times and more; those of a depthwise convolution take seconds each (8 s were seen), and
nobody else has the device meanwhile.
"""
VERY_SLOW_S = 1.0
"""A first run that takes as long is the only one: what it loads is a small part of it."""


@contextlib.contextmanager
def choosing_variants(device: torch.device) -> Iterator[None]:
    """Have torch's compiler choose among all variants, the slow ones too, without long waits.

    Args:
        device: Which the compiler compiles for.

    Raises:
        Exception: One variant lacks memory: see `refusing_lacks`.
    """
    with timing_slow_ones_once(), refusing_lacks(device), compiling_side_by_side():
        yield


def running_slow_ones_once(
    time_ms: Callable[..., Any], clock: Callable[[], float], wait: Callable[[], object]
) -> Callable[..., Any]:
    """Torch's `benchmark_gpu` that runs what is slow twice at most: see `SLOW_S`, `VERY_SLOW_S`.

    Args:
        time_ms: Torch's method.
        clock: Gives seconds.
        wait: Waits until the device is idle.
    """

    def once_s(call: Callable[[], object]) -> float:
        wait()
        begun = clock()
        call()
        wait()
        return clock() - begun

    def timed_ms(self: object, call: Callable[[], object], *rest: object, **named: object) -> Any:
        seconds = once_s(call)
        if SLOW_S <= seconds < VERY_SLOW_S:
            seconds = once_s(call)
        if seconds >= SLOW_S:
            return 1e3 * seconds
        return time_ms(self, call, *rest, **named)

    return timed_ms


@contextlib.contextmanager
def timing_slow_ones_once() -> Iterator[None]:
    """Have torch's compiler run what is slow twice at most: see `SLOW_S`, `VERY_SLOW_S`."""
    from torch._inductor.runtime.benchmarking import benchmarker

    kind = type(benchmarker)
    time_one = running_slow_ones_once(kind.benchmark_gpu, time.perf_counter, torch.cuda.synchronize)
    with mock.patch.object(kind, "benchmark_gpu", time_one):
        yield


@contextlib.contextmanager
def refusing_lacks(device: torch.device) -> Iterator[None]:
    """Have torch's compiler raise an error where one variant lacks memory.

    The compiler takes such a variant for one that does not work and chooses among the others. The
    memory may be held by others meanwhile, and the variant be the fastest. One that the whole
    device has no room for is left to the compiler.
    """
    from torch._inductor.codegen.triton import TritonScheduling
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    lacks: list[Exception] = []

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: object, **named: object) -> object:
            try:
                return function(*arguments, **named)
            except Exception as e:
                if device_memory.shared_lack(e, device, 0) is not None:
                    lacks.append(e)
                raise

        return call

    def refusing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: object, **named: object) -> object:
            lacks.clear()
            found = function(*arguments, **named)
            if lacks:
                raise lacks.pop()
            return found

        return call

    one = staticmethod(noting(AlgorithmSelectorCache.benchmark_choice))
    several = staticmethod(refusing(AlgorithmSelectorCache.benchmark_choices))
    fused = refusing(TritonScheduling.benchmark_codegened_module)

    def time_fused(scheduling: object, module: Any, *rest: Any, **named: Any) -> object:
        module.call = noting(module.call)
        try:
            return fused(scheduling, module, *rest, **named)
        except Exception:  # the compiler has written down that it takes for ever
            Path(module.__file__).with_suffix(".kernel_perf").unlink(missing_ok=True)
            raise

    with (
        mock.patch.object(AlgorithmSelectorCache, "benchmark_choice", one),
        mock.patch.object(AlgorithmSelectorCache, "benchmark_choices", several),
        mock.patch.object(TritonScheduling, "benchmark_codegened_module", time_fused),
    ):
        yield
