"""Baselines on a GPU: replayed as a graph, or called from Python where that is surely faster."""

from __future__ import annotations

import contextlib
import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kagent_sandbox.data.race import COMPILE_MODES
from kagent_sandbox.device import compiler_cache
from kagent_sandbox.device.baseline_calls import (
    SAMPLES,
    BaselineCall,
    ContextLostError,
    MeasuredBaseline,
    make_call,
)
from kagent_sandbox.device.cuda.driver import GpuError
from kagent_sandbox.device.cuda.timing import Clock, Graph, Work
from kagent_sandbox.device.plan_ops import void
from kagent_sandbox.device.variants import choosing_variants

_WARM_UP = 3  # calls before a capture: compiling, autotuning, lazy loading
_TRIAL_SAMPLES = 12
_MOST_HOST_SHARE = 0.5  # of the device's time that the host may need to enqueue a call


class TrialClock(Protocol):
    """The part of `Clock` that compares a call with its graph."""

    def flush(self) -> None:
        """Enqueue what precedes each sample."""

    def samples(self, work: Sequence[Work], count: int) -> list[float]:
        """Device times in µs."""

    def enqueue_us(self, work: Work, count: int) -> list[float]:
        """Host times in µs."""


@dataclass(frozen=True)
class Ready:
    """A baseline that can be timed."""

    work: Work
    peak_bytes: int  # allocated by one call, results included
    graph: Graph | None = None

    @property
    def captured(self) -> bool:
        """Whether it is replayed as a graph rather than called from Python."""
        return self.graph is not None

    def close(self) -> None:
        """Free the graph. The clock's stream must be idle."""
        if self.graph is not None:
            self.graph.close()


def ready(function: Callable[[], object], clock: Clock) -> Ready:
    """Warm a function up, capture it if it can be, and keep the graph, unless `call_is_faster`.

    Raises:
        GpuError, RuntimeError: The function fails.
    """
    with torch.cuda.stream(clock.stream):
        for _ in range(_WARM_UP):
            void(function())
    clock.sync("warming up a baseline")
    peak_bytes = _peak_bytes(function, clock)
    called = Ready(lambda: void(function()), peak_bytes)
    try:
        graph = Graph(clock, called.work, clock.pool)
    except (GpuError, RuntimeError):  # it waits for the device, or allocates in odd ways
        clock.sync("capturing a baseline")
        return called
    captured = Ready(graph.replay, peak_bytes, graph)
    if not call_is_faster(called.work, captured.work, clock):
        return captured
    captured.close()
    return called


def call_is_faster(called: Work, captured: Work, clock: TrialClock) -> bool:
    """Whether a call is faster than its graph, and stays so while the host is slower than now.

    A captured copy can be slower than the call: `copy_` of 16384² took 0.446 ms against 0.363 on an
    H100, because it becomes a memcpy node. But a call that takes the host about as long as the
    flush and itself take the device is as fast as a graph in some samples, and in others the device
    waits for the host: 139 to 192 µs instead of 101. So the call's slow samples must be faster than
    the graph's median, and the host must need at most half of the device's time.

    The graph is timed before and after the call, so that a drift of the device's clock is in both
    alike. The first sample after a pause has the host's time in it and is left out. One outlier
    decides nothing: the call's second slowest sample is compared with the graph's median.

    Raises:
        GpuError: A kernel faulted.
    """

    def times(work: Work, count: int) -> list[float]:
        return clock.samples([work], 1 + count)[1:]

    clock.samples([captured, called], 2)  # warm both
    before = times(captured, _TRIAL_SAMPLES // 2)
    slow_us = sorted(times(called, _TRIAL_SAMPLES))[-2]
    graph_us = statistics.median(before + times(captured, _TRIAL_SAMPLES // 2))
    if slow_us >= graph_us:
        return False
    device_us = slow_us + statistics.median(clock.samples([clock.flush], _TRIAL_SAMPLES))
    host_us = statistics.median(clock.enqueue_us(called, _TRIAL_SAMPLES))
    return host_us <= _MOST_HOST_SHARE * device_us


def _peak_bytes(function: Callable[[], object], clock: Clock) -> int:
    before = torch.cuda.memory_allocated(clock.device)
    torch.cuda.reset_peak_memory_stats(clock.device)
    with torch.cuda.stream(clock.stream):
        void(function())
    clock.sync("measuring a baseline's memory")
    return int(torch.cuda.max_memory_allocated(clock.device)) - before


def measurer(index: int) -> Callable[[BaselineCall], MeasuredBaseline]:
    """Return what measures baselines on the device of that index, in a process of its own. The
    process has the device's context from now on.
    """
    compiler_cache.use(compiler_cache.shared_folder())
    clock = Clock(index)

    def measure(call: BaselineCall) -> MeasuredBaseline:
        try:
            return measured(call)
        except Exception:
            if (fault := clock.fault()) is not None:
                raise ContextLostError(str(fault)) from None
            raise

    def measured(call: BaselineCall) -> MeasuredBaseline:
        compiles = call.name in COMPILE_MODES  # importing the compiler takes seconds
        with contextlib.ExitStack() as stack:
            if compiles:
                stack.enter_context(choosing_variants(clock.device))
            with torch.cuda.stream(clock.stream):
                function = make_call(call, clock.device)
            baseline = ready(function, clock)
        us = statistics.median(clock.samples([baseline.work], SAMPLES))
        result = MeasuredBaseline(us, baseline.captured, baseline.peak_bytes)
        baseline.close()
        del baseline, function
        gc.collect()
        torch.cuda.empty_cache()
        return result

    return measure
