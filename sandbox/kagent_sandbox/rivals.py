"""Baselines in a race: trusted code, interleaved with candidates, on inputs of seeds of its own.

On a GPU they are compiled and captured inside of the race's launcher before it locks itself. On a
CPU they run in the judge's own process, which no candidate shares, timed by the same slopes.
"""

from __future__ import annotations

import functools
import gc
import math
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, Self

import torch

from kagent_sandbox.baselines import baseline_call, baseline_names
from kagent_sandbox.launch.base import LaunchFailed
from kagent_sandbox.launch.baseline_calls import forget_compiled, make_call
from kagent_sandbox.race_result import COMPILE_MODES
from kagent_sandbox.session import LEAST_US, SAMPLE_LIMIT_S, Disqualified
from kagent_sandbox.verdict import Rejected, Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kagent_sandbox.launch.base import Arena, Launcher
    from kagent_sandbox.launch.gpu_backend import GpuBackend
    from kagent_sandbox.launch.gpu_launcher import GpuLauncher
    from kagent_sandbox.task import Case, Task

CALL_SHARE = 4
"""Device memory of one call over the task's bytes: inputs while they are drawn, temporaries."""
_CPU_SPAN_US = 300.0  # as candidates' (see `blocks.placements`)
_MOST_CPU_SETS = 48


class Opened(Protocol):
    """The baselines of one case, ready to be timed. A context manager."""

    names: Sequence[str]
    missing: Mapping[str, str]  # baselines that do not run here, and why
    launcher: Launcher | None  # to be used for the candidates too, where baselines live in it

    def samples(self, name: str, count: int) -> list[float]:
        """`count` times in µs of one execution."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


class Rivals(Protocol):
    """Where baselines come from."""

    def expect(self) -> None:
        """Begin, without waiting, what `open` will need: a race is going to come."""

    def compile_ahead(self, cases: Sequence[Case]) -> None:
        """Begin and end what `open` would do for one case after the other, where all of them can
        be done at once. Nothing is being timed meanwhile.
        """

    def open(self, case: Case, arena: Arena) -> Opened:
        """Compile and warm up all baselines of a case; those that fail are left out."""


@dataclass(frozen=True)
class GpuRivals:
    """Baselines inside of the race's launcher."""

    task: Task
    backend: GpuBackend
    _compiled: dict[str, list[bytes]] = field(default_factory=dict)  # by case

    def expect(self) -> None:
        """See `Rivals`."""
        self.backend.expect_race()

    def compile_ahead(self, cases: Sequence[Case]) -> None:
        """See `Rivals`. What is kept is code; which of several kernels is the fastest is decided
        when the race's launcher is alone with the device.

        Left out are matrix products: there the compiler times variants while it compiles, and
        keeps the one that was faster beside the others.
        """
        self._compiled.clear()
        if self.task.matrix:
            return
        pairs = [(case, mode) for case in cases for mode in COMPILE_MODES]
        calls = [baseline_call(self.task, c, mode, secrets.randbits(31)) for c, mode in pairs]
        most_bytes = max((self.task.min_bytes(c) for c in cases), default=0)
        made = self.backend.compile_ahead(calls, int(CALL_SHARE * most_bytes))
        for (case, _), archive in zip(pairs, made, strict=True):
            if archive:
                self._compiled.setdefault(case.name, []).append(archive)

    def open(self, case: Case, arena: Arena) -> Opened:
        """See `Rivals`."""
        calls = {
            f"baseline/{name}/0": baseline_call(self.task, case, name, secrets.randbits(31))
            for name in baseline_names(self.task, "gpu")
        }
        compiled = self._compiled.get(case.name, ())
        return _GpuOpened(self.backend.launcher(arena, calls, compiled))


class _GpuOpened:
    def __init__(self, launcher: GpuLauncher) -> None:
        self.launcher: Launcher | None = launcher
        self._launcher = launcher
        outcome = {key.split("/")[1]: how for key, how in launcher.baselines.items()}
        self.names: Sequence[str] = [n for n, how in outcome.items() if isinstance(how, bool)]
        self.missing: Mapping[str, str] = {n: h for n, h in outcome.items() if isinstance(h, str)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._launcher.close()

    def samples(self, name: str, count: int) -> list[float]:
        try:
            return self._launcher.samples([f"baseline/{name}/0"], count, limit_s=SAMPLE_LIMIT_S)
        except LaunchFailed as e:  # a baseline worked when it was made ready: a candidate broke it
            raise Disqualified(Rejected(Stage.MEASURE, e.status, str(e))) from e


@dataclass(frozen=True)
class CpuRivals:
    """Baselines in the judge's own process."""

    task: Task

    def expect(self) -> None:
        """See `Rivals`: nothing is needed."""

    def compile_ahead(self, cases: Sequence[Case]) -> None:
        """See `Rivals`: they are compiled where they run, which is in this process."""

    def open(self, case: Case, arena: Arena) -> Opened:
        """See `Rivals`."""
        del arena
        ready: dict[str, list[Callable[[], object]]] = {}
        missing: dict[str, str] = {}
        for name in baseline_names(self.task, "cpu"):
            try:
                ready[name] = self._sets(case, name)
            except Exception as e:  # noqa: BLE001 - an expert or a compiler may raise anything
                missing[name] = f"{type(e).__name__}: {e}".partition("\n")[0]
        return _CpuOpened(ready, missing)

    def _sets(self, case: Case, name: str) -> list[Callable[[], object]]:
        """The baseline bound to several sets of inputs, warmed up."""
        call = baseline_call(self.task, case, name, secrets.randbits(31))
        function = make_call(call, torch.device("cpu"))
        us = math.inf
        for _ in range(3):
            us = min(us, _elapsed_us([function]))
        count = max(3, min(_MOST_CPU_SETS, 3 * math.ceil(_CPU_SPAN_US / us)))
        return [function, *(_elsewhere(function) for _ in range(count - 1))]


def _elsewhere(function: functools.partial[object]) -> Callable[[], object]:
    """The same call with tensors of its own memory and the same strides."""
    arguments = {
        name: torch.empty_strided(v.shape, v.stride(), dtype=v.dtype).copy_(v)
        if isinstance(v, torch.Tensor)
        else v
        for name, v in function.keywords.items()
    }
    return functools.partial(function.func, **arguments)


class _CpuOpened:
    launcher: Launcher | None = None

    def __init__(
        self, ready: dict[str, list[Callable[[], object]]], missing: Mapping[str, str]
    ) -> None:
        self._ready = ready
        self.missing = missing
        self.names: Sequence[str] = list(ready)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._ready.clear()
        forget_compiled()
        gc.collect()

    def samples(self, name: str, count: int) -> list[float]:
        """Slopes of K calls against 2K, each on other memory, like `CpuLauncher.samples`."""
        sets = self._ready[name]
        k = len(sets) // 3
        slopes: list[float] = []
        for i in range(count):
            turn = i * k % len(sets)
            order = [*sets[turn:], *sets[:turn]]
            once, twice = order[:k], order[k : 3 * k]
            if i % 2:
                long_us = _elapsed_us(twice)
                slopes.append((long_us - _elapsed_us(once)) / k)
            else:
                short_us = _elapsed_us(once)
                slopes.append((_elapsed_us(twice) - short_us) / k)
        return [max(us, LEAST_US) for us in slopes]


def _elapsed_us(functions: Sequence[Callable[[], object]]) -> float:
    began = time.perf_counter()
    for function in functions:
        function()
    return (time.perf_counter() - began) * 1e6
