"""Baselines in a race: trusted code, interleaved with candidates, on inputs of seeds of its own.

On a GPU they are compiled and captured inside of the race's launcher before it locks itself. On a
CPU they run in the judge's own process, which no candidate shares, timed in the same way.
"""

from __future__ import annotations

import gc
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, Self

import torch

from kagent_sandbox.data.race import COMPILE_MODES
from kagent_sandbox.device.baseline_calls import forget_compiled, make_call
from kagent_sandbox.device.cpu.baselines import CpuBaseline
from kagent_sandbox.device.interface import LaunchFailed
from kagent_sandbox.judge.arena.session import LEAST_US, SAMPLE_LIMIT_S
from kagent_sandbox.judge.timing.baselines import baseline_call, baseline_names

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kagent_sandbox.data.task import Case, Task
    from kagent_sandbox.device.cuda.backend import GpuBackend
    from kagent_sandbox.device.cuda.launcher import GpuLauncher
    from kagent_sandbox.device.interface import Arena, Launcher

CALL_SHARE = 4
"""Device memory of one call over the task's bytes: inputs while they are drawn, temporaries."""


MOST_LOSSES = 2
"""Times that a baseline which was made ready may fail in a case before the race does without it."""


class BaselineFailed(Exception):  # noqa: N818
    """A baseline that was made ready failed while it was timed: the case is to be run again."""


class OpenBaselines(Protocol):
    """The baselines of one case, ready to be timed. A context manager."""

    names: Sequence[str]
    missing: Mapping[str, str]  # baselines that do not run here, and why
    launcher: Launcher | None  # to be used for the candidates too, where baselines live in it

    def samples(self, name: str, count: int) -> list[float]:
        """`count` times in µs of one execution.

        Raises:
            BaselineFailed: It faulted or hung. No candidate is blamed for that.
        """

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


class RaceBaselines(Protocol):
    """Source of baselines in a race."""

    def prefetch(self) -> None:
        """Begin, without waiting, what `open` will need: a race is going to come."""

    def compile_ahead(self, cases: Sequence[Case]) -> None:
        """Begin and end what `open` would do for one case after the other, where all of them can
        be done at once. Nothing is being timed meanwhile.
        """

    def open(self, case: Case, arena: Arena) -> OpenBaselines:
        """Compile and warm up all baselines of a case; those that fail are left out."""


@dataclass(frozen=True)
class GpuRaceBaselines:
    """Baselines inside of the race's launcher."""

    task: Task
    backend: GpuBackend
    _compiled: dict[str, list[bytes]] = field(default_factory=dict)  # by case
    _lost: dict[tuple[str, str], list[str]] = field(default_factory=dict)  # by case and baseline

    def prefetch(self) -> None:
        """See `RaceBaselines`."""
        self.backend.prefetch_race()

    def compile_ahead(self, cases: Sequence[Case]) -> None:
        """See `RaceBaselines`. What is kept is code; which of several kernels is the fastest is
        decided when the race's launcher is alone with the device.

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

    def open(self, case: Case, arena: Arena) -> OpenBaselines:
        """See `RaceBaselines`. Leaves out what failed here beside candidates time and again."""
        lost = {n: why for (c, n), why in self._lost.items() if c == case.name}
        out = {
            n: f"failed twice beside candidates: {why[-1]}"
            for n, why in lost.items()
            if len(why) >= MOST_LOSSES
        }
        calls = {
            f"baseline/{name}/0": baseline_call(self.task, case, name, secrets.randbits(31))
            for name in baseline_names(self.task, "gpu")
            if name not in out
        }
        launcher = self.backend.launcher(arena, calls, self._compiled.get(case.name, ()))

        def lose(name: str, why: str) -> None:
            self._lost.setdefault((case.name, name), []).append(why)

        return _GpuOpened(launcher, out, lose)


class _GpuOpened:
    def __init__(
        self, launcher: GpuLauncher, out: Mapping[str, str], lose: Callable[[str, str], None]
    ) -> None:
        self._lose = lose
        self.launcher: Launcher | None = launcher
        self._launcher = launcher
        outcome = {key.split("/")[1]: how for key, how in launcher.baselines.items()}
        self.names: Sequence[str] = [n for n, how in outcome.items() if isinstance(how, bool)]
        failed = {n: h for n, h in outcome.items() if isinstance(h, str)}
        self.missing: Mapping[str, str] = {**failed, **out}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._launcher.close()

    def samples(self, name: str, count: int) -> list[float]:
        try:
            return self._launcher.samples([f"baseline/{name}/0"], count, limit_s=SAMPLE_LIMIT_S)
        except LaunchFailed as e:
            # It worked when it was made ready. What broke it, its own fault, a candidate's stray
            # write or the driver, cannot be told from here: so nobody is blamed.
            self._lose(name, str(e))
            raise BaselineFailed(f"{name}: {e}") from e


@dataclass(frozen=True)
class CpuRaceBaselines:
    """Baselines in the judge's own process."""

    task: Task

    def prefetch(self) -> None:
        """See `RaceBaselines`: nothing is needed."""

    def compile_ahead(self, cases: Sequence[Case]) -> None:
        """See `RaceBaselines`: they are compiled where they run, which is in this process."""

    def open(self, case: Case, arena: Arena) -> OpenBaselines:
        """See `RaceBaselines`."""
        del arena
        ready: dict[str, CpuBaseline] = {}
        missing: dict[str, str] = {}
        for name in baseline_names(self.task, "cpu"):
            try:
                call = baseline_call(self.task, case, name, secrets.randbits(31))
                ready[name] = CpuBaseline(make_call(call, torch.device("cpu")))
            except Exception as e:  # noqa: BLE001 - an expert or a compiler may raise anything
                missing[name] = f"{type(e).__name__}: {e}".partition("\n")[0]
        return _CpuOpened(ready, missing)


class _CpuOpened:
    launcher: Launcher | None = None

    def __init__(self, ready: dict[str, CpuBaseline], missing: Mapping[str, str]) -> None:
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
        """Times in µs of one call, as `CpuLauncher.samples` takes them."""
        return [max(us, LEAST_US) for us in self._ready[name].samples(count)]
