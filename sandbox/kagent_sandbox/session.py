"""One candidate's stay on the device: an arena, a launcher over it, and failures turned into
verdicts.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Self

import torch

from kagent_sandbox.lane_clock import LaneClock
from kagent_sandbox.launch.base import LaunchFailed
from kagent_sandbox.plan import PlanError
from kagent_sandbox.verdict import Rejected, Stage, Status

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kagent_sandbox.launch.base import Arena, Backend, Launcher
    from kagent_sandbox.seat import Seat

RUN_LIMIT_S = 10.0
"""One execution of one plan: the slowest seed of the slowest task takes 0.1 s."""
SAMPLE_LIMIT_S = 30.0
MEMORY_SHARE = 0.6
"""Most of the device's memory that arenas may take; references and inputs need the rest."""
LEAST_US = 1e-3
"""On a CPU a sample is a slope, and one of nothing but noise may be negative."""


class Disqualified(Exception):  # noqa: N818
    """Ends an evaluation with a verdict."""

    def __init__(self, verdict: Rejected) -> None:
        super().__init__(verdict.message)
        self.verdict = verdict


class Arenas:
    """Keeps one arena and replaces it by a larger one when a candidate needs more."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._arena: Arena | None = None
        self.limit_bytes = int(backend.facts.memory_bytes * MEMORY_SHARE)

    def at_least(self, nbytes: int) -> Arena:
        """An arena of `nbytes` or more, contents undefined.

        Raises:
            Disqualified: More than the device can spare.
        """
        if nbytes > self.limit_bytes:
            raise Disqualified(
                Rejected(
                    Stage.CHECK,
                    Status.RESOURCE_LIMIT,
                    f"needs {nbytes / 2**20:.0f} MiB of device memory, "
                    f"{self.limit_bytes / 2**20:.0f} MiB are there for it",
                )
            )
        if self._arena is None or not self.fits(nbytes):
            self.close()
            self._arena = self._backend.arena(min(self.limit_bytes, nbytes + nbytes // 4))
        return self._arena

    def fits(self, nbytes: int) -> bool:
        """Whether the arena that there is holds `nbytes`; otherwise it will be replaced."""
        return self._arena is not None and nbytes <= self._arena.nbytes

    def close(self) -> None:
        """Give the memory back."""
        if self._arena is not None:
            self._arena.close()
            self._arena = None


class Session:
    """A launcher over an arena, for the binaries of one evaluation. A context manager.

    `launcher`, where given, is used (and closed) instead of a fresh one of the backend's. `clock`
    is told what the time is spent on.
    """

    def __init__(
        self,
        backend: Backend,
        arena: Arena,
        binaries: Mapping[str, bytes],
        stage: Stage,
        launcher: Launcher | None = None,
        clock: LaneClock | None = None,
    ) -> None:
        self.arena = arena
        self.stage = stage
        self.clock = LaneClock() if clock is None else clock
        self._backend = backend
        self._binaries = binaries
        self._launcher = launcher

    def __enter__(self) -> Self:
        try:
            with self.clock.part("start"), self._blaming(None):
                if self._launcher is None:
                    self._launcher = self._backend.launcher(self.arena)
                self._launcher.load(self._binaries)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        if self._launcher is not None:
            with self.clock.part("close"):
                self._launcher.close()
            self._launcher = None

    def resume(self, binaries: Mapping[str, bytes], stage: Stage, clock: LaneClock) -> Self:
        """For another stage with more binaries: enter it again."""
        self._binaries = {**self._binaries, **binaries}
        self.stage = stage
        self.clock = clock
        return self

    def restart(self) -> None:
        """A fresh process with the same binaries and nothing prepared."""
        self.close()
        self.__enter__()

    def prepare(self, seats: Sequence[Seat], case: str) -> None:
        """Resolve the seats' plans in the launcher."""
        with self.clock.part("prepare"), self._blaming(case) as launcher:
            for seat in seats:
                launcher.prepare(seat.key, seat.plan, seat.layout.placement)

    def forget(self, seats: Sequence[Seat]) -> None:
        """Drop the seats' plans in the launcher."""
        with self._blaming(None) as launcher:
            for seat in seats:
                launcher.forget(seat.key)

    def hush(self) -> None:
        """Wait until nothing else is being started or ended on the device: times count now."""
        with self.clock.part("wait"), self._blaming(None) as launcher:
            launcher.hush()

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """The arena belongs to the judge: nothing of the candidate runs. Writes are done at the
        end.
        """
        with contextlib.ExitStack() as stack:
            with self._blaming(None) as launcher:  # the process may have died since it answered
                stack.enter_context(launcher.quiesced())
            yield
            if self._backend.device.type == "cuda":
                torch.cuda.synchronize(self._backend.device)

    def run(self, seat: Seat, case: str) -> None:
        """Execute the seat's plan once."""
        with self._blaming(case) as launcher:
            launcher.run(seat.key, limit_s=RUN_LIMIT_S)

    def samples(
        self, seats: Sequence[Seat], count: int, case: str, *, limit_s: float = SAMPLE_LIMIT_S
    ) -> list[float]:
        """`count` device times in µs, rotating over the seats. All positive."""
        with self.clock.part("samples"), self._blaming(case) as launcher:
            samples = launcher.samples([s.key for s in seats], count, limit_s=limit_s)
        return [max(us, LEAST_US) for us in samples]

    def wall_us(self, seats: Sequence[Seat], count: int, case: str) -> float:
        """µs per execution by the judge's own clock."""
        with self.clock.part("wall"), self._blaming(case) as launcher:
            return launcher.wall_us([s.key for s in seats], count, limit_s=SAMPLE_LIMIT_S)

    @contextlib.contextmanager
    def _blaming(self, case: str | None) -> Iterator[Launcher]:
        """Turn failures of the candidate's code into its verdict."""
        try:
            # On entry there is no launcher yet, and nobody uses what is yielded.
            yield self._launcher  # type: ignore[misc]
        except LaunchFailed as e:
            raise Disqualified(Rejected(self.stage, e.status, str(e), case)) from e
        except PlanError as e:
            raise Disqualified(Rejected(self.stage, Status.TAMPER, str(e), case)) from e
