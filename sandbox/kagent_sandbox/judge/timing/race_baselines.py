"""The baselines of a task in a race, on inputs of a seed of their own. Where they run is the
device's to say (`BaselineSource`).
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from kagent_sandbox.judge.timing.baselines import baseline_call, baseline_names

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Sequence

    from kagent_sandbox.data.case import Case
    from kagent_sandbox.data.task import Task
    from kagent_sandbox.device.baseline_calls import BaselineCall
    from kagent_sandbox.device.interface import Arena, Backend, BaselineSource, OpenBaselines
    from kagent_sandbox.process.device_lock import Mode


@dataclass(frozen=True)
class RaceBaselines:
    """Baselines of one task on one device."""

    task: Task
    source: BaselineSource
    modes: Sequence[str]  # of torch.compile, by name

    @classmethod
    def on(cls, backend: Backend, task: Task) -> Self:
        """Baselines of a task on an opened device."""
        return cls(task, backend.race_baselines(), backend.traits.compile_modes)

    def prefetch(self) -> None:
        """Begin, without waiting, what `open` will need: a race is going to come."""
        self.source.prefetch()

    def compile_ahead(
        self, hidden: Sequence[Case], visible: Sequence[Case]
    ) -> Generator[Mode, None, Collection[str]]:
        """Compile for all cases at once what `open` would for one after the other, where the device
        can, in steps. See `BaselineSource`.

        What is compiled for the visible cases is for the process that measures baselines, too.

        Of products and convolutions, the compiler times variants while it compiles. The steps in
        which it does so have the device alone, and hold it no longer: all that is done in Python
        and by compilers is done beside others.
        """
        cases = [*visible, *hidden]
        if not cases:
            return ()
        calls = [self._call(c, m) for c in cases for m in self.modes]
        most_bytes = max(self.task.min_bytes(c) for c in cases)
        shared = {c.name for c in visible}
        return (yield from self.source.compile_ahead(calls, int(most_bytes), shared=shared))

    def open(self, case: Case, arena: Arena) -> OpenBaselines:
        """Compile and warm up all baselines of a case; those that fail are left out."""
        names, seed = baseline_names(self.task, self.modes), secrets.randbits(31)
        return self.source.open([self._call(case, name, seed) for name in names], arena)

    def _call(self, case: Case, name: str, seed: int = 0) -> BaselineCall:
        """A baseline of a case. All of a race have one seed: no way of torch is the fastest because
        its draw is, where the time depends on that.
        """
        return baseline_call(self.task, case, name, seed)
