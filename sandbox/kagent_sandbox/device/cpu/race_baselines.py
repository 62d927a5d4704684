"""Baselines of a race on a CPU: in the judge's own process, which no candidate shares, timed as
candidates are.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Self

import torch

from kagent_sandbox.device.baseline_calls import drawer, forget_compiled, make_call
from kagent_sandbox.device.cpu.baselines import CpuBaseline
from kagent_sandbox.device.device_memory import lacks_memory
from kagent_sandbox.device.interface import LEAST_US

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Mapping, Sequence

    from kagent_sandbox.device.baseline_calls import BaselineCall
    from kagent_sandbox.device.interface import Arena, Launcher
    from kagent_sandbox.process.device_lock import Mode


class CpuRaceBaselines:
    """See `BaselineSource`."""

    def prefetch(self) -> None:
        """See `BaselineSource`: nothing is needed."""

    def compile_ahead(
        self, calls: Sequence[BaselineCall], call_bytes: int, *, shared: Collection[str]
    ) -> Generator[Mode, None, Collection[str]]:
        """See `BaselineSource`: they are compiled where they run, which is in this process."""
        del call_bytes, shared
        yield from ()
        return {str(call.case["name"]) for call in calls}

    def open(self, calls: Sequence[BaselineCall], arena: Arena) -> OpenedInJudge:
        """See `BaselineSource`."""
        del arena
        draw = drawer(calls[0], torch.device("cpu"))  # they differ in nothing but the name
        ready: dict[str, CpuBaseline] = {}
        missing: dict[str, str] = {}
        lacking: list[str] = []
        for call in calls:
            try:
                ready[call.name] = CpuBaseline(make_call(call, torch.device("cpu")), draw)
            except Exception as e:  # noqa: BLE001 - an expert or a compiler may raise anything
                missing[call.name] = f"{type(e).__name__}: {e}".partition("\n")[0]
                if lacks_memory(e):
                    lacking.append(call.name)
        return OpenedInJudge(ready, missing, lacking)


class OpenedInJudge:
    """See `OpenBaselines`."""

    launcher: Launcher | None = None

    def __init__(
        self,
        ready: dict[str, CpuBaseline],
        missing: Mapping[str, str],
        lacking: Sequence[str],
    ) -> None:
        self._ready = ready
        self.missing = missing
        self.lacking = lacking
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
