"""Baselines on a CPU, timed as candidates are: inputs are written anew before every sample, no
cache holds them, and every call of a sample has memory of its own for its results.
"""

from __future__ import annotations

import ctypes
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from kagent_sandbox.device.baseline_calls import (
    SAMPLES,
    BaselineCall,
    MeasuredBaseline,
    make_call,
)
from kagent_sandbox.device.cpu import priority as priority
from kagent_sandbox.device.cpu.flush import settle
from kagent_sandbox.device.cpu.traits import TRAITS
from kagent_sandbox.device.plan_ops import void

_WARM_UP = 2  # calls before anything is timed: compiling
_SETS_BYTES = 1 << 30  # of all input sets together
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # <malloc.h>
_TRIES = 3  # of how long one call takes: the shortest counts
_SECONDS = 2.0  # per baseline, beyond the least number of samples
_LEAST_SAMPLES = 5


class CpuBaseline:
    """A compiled and warm baseline, over several copies of its inputs."""

    def __init__(
        self,
        function: functools.partial[object],
        draw: Callable[[int], Mapping[str, object]] | None = None,
    ) -> None:
        """Compile, warm up and copy inputs; whatever the function raises is passed on.

        Args:
            function: The baseline, bound to inputs.
            draw: Returns other inputs for each turn of samples; None: they stay the same.
        """
        self._draw = draw
        self._turns = 0
        _keep_freed_memory()
        for _ in range(_WARM_UP):
            void(function())
        first_us = min(_elapsed_us([function]) for _ in range(_TRIES))
        nbytes = sum(t.nbytes for t in _tensors(function.keywords))
        places = TRAITS.placements
        wanted = places.lasting(first_us)
        count = max(places.least, min(wanted, _SETS_BYTES // max(1, nbytes)))
        copies = [functools.partial(function.func, **_copies(function)) for _ in range(count - 1)]
        self._sets: list[Callable[[], object]] = [function, *copies]
        self._inputs = [_tensors(f.keywords) for f in (function, *copies)]
        self._original = _tensors(_copies(function))
        self._priority = priority.of_workers(lambda: _elapsed_us(self._sets))
        self._taken = 0
        self._sample_us()  # memory for results is the process's own from now on

    def samples(self, count: int) -> list[float]:
        """`count` times in µs of one execution: each sample calls it once on every set."""
        if self._draw is not None:  # where its time depends on what is drawn, that is an average
            self._original = _tensors(self._draw(self._turns))
            self._turns += 1
        with self._priority:
            return [self._sample_us() for _ in range(count)]

    def _sample_us(self) -> float:
        for tensors in self._inputs:
            for tensor, original in zip(tensors, self._original, strict=True):
                tensor.copy_(original)
        settle()
        turn = self._taken % len(self._sets)  # none is always the first
        self._taken += 1
        return _elapsed_us([*self._sets[turn:], *self._sets[:turn]]) / len(self._sets)


def measure(call: BaselineCall) -> MeasuredBaseline:
    """The median of some samples of one baseline; of fewer where they take long."""
    baseline = CpuBaseline(make_call(call, torch.device("cpu")))
    times: list[float] = []
    deadline = time.monotonic() + _SECONDS
    while len(times) < SAMPLES and (len(times) < _LEAST_SAMPLES or time.monotonic() < deadline):
        times += baseline.samples(1)
    return MeasuredBaseline(statistics.median(times))


def _elapsed_us(functions: Sequence[Callable[[], object]]) -> float:
    """Time until all have been called. None reuses the memory of another's results, which would
    still be in a cache.
    """
    results = []
    start = time.perf_counter()
    for function in functions:
        results.append(function())  # noqa: PERF401 - nothing else is to be timed
    return 1e6 * (time.perf_counter() - start)


def _keep_freed_memory() -> None:
    """The C library gives no memory back to the kernel: pages would be made anew for every call."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library: calls pay for it
        return
    for parameter, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1)):
        mallopt(parameter, value)


def _tensors(arguments: Mapping[str, object]) -> list[torch.Tensor]:
    return [v for v in arguments.values() if isinstance(v, torch.Tensor)]


def _copies(function: functools.partial[object]) -> dict[str, object]:
    """The function's arguments with tensors of their own, with the same strides."""
    return {
        name: torch.empty_strided(v.shape, v.stride(), dtype=v.dtype).copy_(v)
        if isinstance(v, torch.Tensor)
        else v
        for name, v in function.keywords.items()
    }
