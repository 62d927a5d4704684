"""Baselines on a CPU, timed as candidates are: slopes over input sets that caches do not hold."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence

import torch

from kagent_sandbox.launch.plan_ops import void

_WARM_UP = 2  # calls before anything is timed: compiling
_SPAN_US = 300.0  # what is timed outlasts the noise of a wake-up
_MOST_SETS = 48
_SETS_BYTES = 1 << 30  # of all input sets together


class CpuBaseline:
    """A compiled and warm baseline, over several copies of its inputs."""

    def __init__(self, function: functools.partial[object]) -> None:
        """Compile, warm up and copy inputs; whatever the function raises is passed on."""
        for _ in range(_WARM_UP):
            void(function())
        first_us = min(_elapsed_us([function]) for _ in range(3))
        nbytes = sum(t.nbytes for t in function.keywords.values() if isinstance(t, torch.Tensor))
        wanted = max(3, min(_MOST_SETS, 3 * math.ceil(_SPAN_US / max(first_us, 1.0))))
        count = max(3, min(wanted, _SETS_BYTES // max(1, nbytes)))
        copies = [functools.partial(function.func, **_copies(function)) for _ in range(count - 1)]
        self._sets: list[Callable[[], object]] = [function, *copies]
        self._taken = 0

    def samples(self, count: int) -> list[float]:
        """`count` times in µs of one execution: slope of K calls against 2K, K a third of the sets.

        A slope of nothing but noise may be negative.
        """
        return [self._slope_us() for _ in range(count)]

    def _slope_us(self) -> float:
        k = len(self._sets) // 3
        turn = self._taken * k % len(self._sets)
        order = self._sets[turn:] + self._sets[:turn]
        once, twice = order[:k], order[k : 3 * k]
        self._taken += 1
        if self._taken % 2:  # neither always runs first
            long_us = _elapsed_us(twice)
            return (long_us - _elapsed_us(once)) / k
        short_us = _elapsed_us(once)
        return (_elapsed_us(twice) - short_us) / k


def _elapsed_us(functions: Sequence[Callable[[], object]]) -> float:
    start = time.perf_counter()
    for function in functions:
        function()
    return 1e6 * (time.perf_counter() - start)


def _copies(function: functools.partial[object]) -> dict[str, object]:
    """The function's arguments with tensors of their own, with the same strides."""
    return {
        name: torch.empty_strided(v.shape, v.stride(), dtype=v.dtype).copy_(v)
        if isinstance(v, torch.Tensor)
        else v
        for name, v in function.keywords.items()
    }
