"""Baselines of a race on a GPU: compiled and captured inside of the race's launcher before it locks
itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, Self

from kagent_sandbox.data.verdict import Status
from kagent_sandbox.device import compiler_cache
from kagent_sandbox.device.baseline_calls import ReadyBaseline
from kagent_sandbox.device.interface import SAMPLE_LIMIT_S, BaselineFailed, LaunchFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Mapping, Sequence

    from kagent_sandbox.device.baseline_calls import BaselineCall
    from kagent_sandbox.device.cuda.launcher import GpuLauncher
    from kagent_sandbox.device.interface import Arena, Launcher
    from kagent_sandbox.process.device_lock import Mode

MOST_LOSSES = 2
"""Times that a baseline which was made ready may fail in a case before the race does without it."""


class RaceHost(Protocol):
    """The part of a GPU's backend that a race's baselines use."""

    def prefetch_race(self) -> None:
        """Begin to import torch's compiler."""

    def compile_ahead(
        self, calls: Sequence[BaselineCall], need_bytes: int
    ) -> Generator[Mode, None, list[bytes]]:
        """Compile calls and return what torch's compiler kept of each; see `BaselineSource`."""

    def launcher(
        self, arena: Arena, baselines: Mapping[str, BaselineCall], compiled: Sequence[bytes]
    ) -> GpuLauncher:
        """Start a launcher that has baselines."""


@dataclass(frozen=True)
class GpuRaceBaselines:
    """Baselines inside of the race's launcher."""

    backend: RaceHost
    _compiled: dict[str, list[bytes]] = field(default_factory=dict)  # by case
    _lost: dict[tuple[str, str], list[LaunchFailed]] = field(default_factory=dict)
    """Failures beside candidates, by case and baseline."""

    def prefetch(self) -> None:
        """See `BaselineSource`."""
        self.backend.prefetch_race()

    def compile_ahead(
        self, calls: Sequence[BaselineCall], call_bytes: int, *, shared: Collection[str]
    ) -> Generator[Mode, None, Collection[str]]:
        """See `BaselineSource`."""
        made = yield from self.backend.compile_ahead(calls, call_bytes)
        for case in map(_case, calls):
            self._compiled.pop(case, None)
        for call, archive in zip(calls, made, strict=True):
            if not archive:
                continue
            if _case(call) in shared:
                compiler_cache.unpack(archive, compiler_cache.shared_folder())
            else:
                self._compiled.setdefault(_case(call), []).append(archive)
        return {_case(call) for call, archive in zip(calls, made, strict=True) if archive}

    def open(self, calls: Sequence[BaselineCall], arena: Arena) -> OpenedInLauncher:
        """See `BaselineSource`. Leaves out what failed here beside candidates time and again."""
        case = _case(calls[0])  # eager is always there
        lost = {n: why for (c, n), why in self._lost.items() if c == case}
        out = {
            n: ReadyBaseline(
                failed=f"failed twice beside candidates: {why[-1]}",
                lacked=why[-1].status is Status.RESOURCE_LIMIT,
            )
            for n, why in lost.items()
            if len(why) >= MOST_LOSSES
        }
        kept = {f"baseline/{call.name}/0": call for call in calls if call.name not in out}
        launcher = self.backend.launcher(arena, kept, self._compiled.get(case, ()))

        def lose(name: str, why: LaunchFailed) -> None:
            self._lost.setdefault((case, name), []).append(why)

        return OpenedInLauncher(launcher, out, lose)


class OpenedInLauncher:
    """See `OpenBaselines`."""

    def __init__(
        self,
        launcher: GpuLauncher,
        out: Mapping[str, ReadyBaseline],
        lose: Callable[[str, LaunchFailed], None],
    ) -> None:
        self._lose = lose
        self.launcher: Launcher | None = launcher
        self._launcher = launcher
        found = {key.split("/")[1]: how for key, how in launcher.baselines.items()} | dict(out)
        self.names: Sequence[str] = [n for n, how in found.items() if not how.failed]
        self.missing: Mapping[str, str] = {n: h.failed for n, h in found.items() if h.failed}
        self.lacking: Sequence[str] = [n for n, how in found.items() if how.lacked]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._launcher.close()

    def samples(self, name: str, count: int) -> list[float]:
        """See `OpenBaselines`.

        Raises:
            BaselineFailed: See `OpenBaselines`.
        """
        try:
            return self._launcher.samples([f"baseline/{name}/0"], count, limit_s=SAMPLE_LIMIT_S)
        except LaunchFailed as e:
            # It worked when it was made ready. What broke it, its own fault, a candidate's stray
            # write or the driver, cannot be told from here: so nobody is blamed.
            self._lose(name, e)
            raise BaselineFailed(f"{name}: {e}") from e


def _case(call: BaselineCall) -> str:
    return str(call.case["name"])
