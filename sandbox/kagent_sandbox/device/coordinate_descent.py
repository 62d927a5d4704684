"""Configurations that torch's coordinate descent is going to time, compiled side by side."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

from kagent_sandbox.process.cores import usable_cores


@contextlib.contextmanager
def compiling_side_by_side() -> Iterator[None]:
    """Have torch's compiler use all cores where it tunes kernels by coordinate descent.

    With `max-autotune` it compiles a configuration, times it, and goes on to the next, of ten and
    more for each kernel. Meanwhile the device is held. Here the neighbours of a configuration are
    compiled together before the first of them is timed; Triton finds them on disk then. Which ones
    are timed, and in what order, stays as it is, and nothing is compiled while one is timed.
    """
    from torch._inductor.runtime.coordinate_descent_tuner import CoordescTuner
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    around: dict[int, _Neighbours] = {}  # of tuners that are at work
    tune: Callable[..., Any] = CachingAutotuner._coordinate_descent_tuning  # noqa: SLF001 - torch has no hook
    compare: Callable[..., Any] = CoordescTuner.compare_config

    def tuned(self: Any, *arguments: object, **named: object) -> object:
        tuner = self.coordesc_tuner
        around[id(tuner)] = _Neighbours(tuner, self._precompile_config)
        try:
            return tune(self, *arguments, **named)
        finally:
            del around[id(tuner)]

    def compared(self: Any, func: object, candidate: Any, best: Any, timing: float) -> object:
        if id(self) in around:
            around[id(self)].compile(best)
        return compare(self, func, candidate, best, timing)

    with (
        mock.patch.object(CachingAutotuner, "_coordinate_descent_tuning", tuned),
        mock.patch.object(CoordescTuner, "compare_config", compared),
    ):
        yield


class _Neighbours:
    """Neighbours of configurations of one kernel.

    Args:
        tuner: Torch's, which knows what a neighbour is.
        compile_one: Leaves a configuration's binary in Triton's cache.
    """

    def __init__(self, tuner: Any, compile_one: Callable[[Any], object]) -> None:
        self._tuner = tuner
        self._compile_one = compile_one
        self._known: set[object] = set()  # compiled, or timed

    def compile(self, config: Any) -> None:
        """Compile a configuration's neighbours, but for those that are known."""
        from torch._inductor.runtime.runtime_utils import triton_config_to_hashable

        self._known.add(triton_config_to_hashable(config))
        new = {
            key: neighbour
            for neighbour in self._around(config)
            if (key := triton_config_to_hashable(neighbour)) not in self._known
        }
        self._known.update(new)
        if len(new) < 2:  # the tuner compiles one as well
            return
        with ThreadPoolExecutor(min(len(new), usable_cores())) as threads:
            for each in [threads.submit(self._compile_one, c) for c in new.values()]:
                each.exception()  # met again, and handled, where it would be timed

    def _around(self, config: Any) -> Iterator[Any]:
        from torch._inductor.runtime import coordinate_descent_tuner

        torchs: Any = coordinate_descent_tuner
        for field in self._tuner.tunable_fields:
            value = torchs.get_field(config, field)
            if value is None:
                continue
            for other in self._tuner.get_neighbour_values(field, value):
                neighbour = copy.deepcopy(config)
                torchs.set_field(neighbour, field, other)
                if self._tuner.is_valid_config(neighbour):
                    yield neighbour
