"""One candidate's stay on the device: an arena, a launcher over it, and failures turned into
verdicts.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Self

from kagent_sandbox.data.plan import PlanError
from kagent_sandbox.data.verdict import Rejected, Stage, Status
from kagent_sandbox.device.interface import LEAST_US, SAMPLE_LIMIT_S, LaunchFailed, nothing
from kagent_sandbox.device.time_limits import bounded
from kagent_sandbox.judge.arena.phase_timer import PhaseTimer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kagent_sandbox.device.interface import Arena, Backend, Blame, Launcher
    from kagent_sandbox.judge.arena.placement import PlanPlacement

RUN_LIMIT_S = 10.0
"""One execution of one plan: the slowest seed of the slowest task takes 0.1 s."""
MEMORY_SHARE = 0.6
"""Most of the device's memory that arenas may take; references and inputs need the rest."""
_SHARED = ""  # the owner of the launcher of all who have none of their own


class CandidateRejected(Exception):  # noqa: N818
    """Ends an evaluation with a verdict.

    `owner` is the contender whose process failed, where each has one: it may do so in another's
    turn. None: the contender whose turn it is.
    """

    def __init__(self, verdict: Rejected, owner: str | None = None) -> None:
        super().__init__(verdict.message)
        self.verdict = verdict
        self.owner = owner

    @property
    def blame(self) -> Blame:
        """Whose failure it is, as the launcher that raised it has it."""
        return self.__cause__.blame if isinstance(self.__cause__, LaunchFailed) else "kernel"


_MOST_ROOM_SHARE = 1 / 64
"""Largest share of the device's memory by which an arena is larger than it must be."""
_SMALL_SHARE = 1 / 8
"""Share of an arena below which an evaluation that would have to empty it gets a small one."""


class Arenas:
    """Keeps one arena and replaces it by a larger one when a candidate needs more.

    Where arenas are emptied before each evaluation, and no launcher that has mapped one is kept, it
    keeps a small one as well: checks need a few MiB, timed blocks some hundred.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._arena: Arena | None = None
        self._small: Arena | None = None
        self.limit_bytes = int(backend.facts.memory_bytes * MEMORY_SHARE)

    def at_least(self, nbytes: int) -> Arena:
        """An arena of `nbytes` or more, for one evaluation.

        Nothing is left in it where draws are used again by later processes: what an earlier one
        had written down about them must not reach these.

        Raises:
            CandidateRejected: More than the device can spare.
        """
        if nbytes > self.limit_bytes:
            raise CandidateRejected(
                Rejected(
                    Stage.CHECK,
                    Status.RESOURCE_LIMIT,
                    f"needs {nbytes / 2**20:.0f} MiB of device memory, "
                    f"{self.limit_bytes / 2**20:.0f} MiB are there for it",
                )
            )
        if self._arena is None or not self.fits(nbytes):
            self.close()
            self._arena = self._new(nbytes)
        elif self._backend.traits.inputs.reused:
            kept = self._backend.traits.kept_launchers.most
            if not kept and nbytes <= _SMALL_SHARE * self._arena.nbytes:
                return self._emptied_small(nbytes)
            _empty(self._arena)
        return self._arena

    def _emptied_small(self, nbytes: int) -> Arena:
        if self._small is None or nbytes > self._small.nbytes:
            if self._small is not None:
                self._small.close()
            self._small = self._new(nbytes)
        else:
            _empty(self._small)
        return self._small

    def _new(self, nbytes: int) -> Arena:
        room = min(nbytes // 4, int(_MOST_ROOM_SHARE * self._backend.facts.memory_bytes))
        return self._backend.arena(min(self.limit_bytes, nbytes + room))

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept."""
        return sum(a.nbytes for a in (self._arena, self._small) if a is not None)

    def fits(self, nbytes: int) -> bool:
        """Whether the arena that there is holds `nbytes`; otherwise it will be replaced."""
        return self._arena is not None and nbytes <= self._arena.nbytes

    def close(self) -> None:
        """Give the memory back."""
        for arena in (self._arena, self._small):
            if arena is not None:
                arena.close()
        self._arena = self._small = None


def _empty(arena: Arena) -> None:
    arena.bytes(0, arena.nbytes).zero_()


class LauncherSession:
    """A launcher over an arena, for the binaries of one evaluation. A context manager.

    `launcher`, if given, is used (and closed) instead of a fresh one of the backend's. `clock`
    receives the times of the phases.

    Native code shares its launcher's process, where it could slow down other code. So owners in
    `apart` have a launcher each, and all but the one that is timed are stopped. `rest` is the
    contender that alone has the launcher of all others, where there is one. A session that is not
    `timed` takes no samples.
    """

    def __init__(
        self,
        backend: Backend,
        arena: Arena,
        binaries: Mapping[str, bytes],
        stage: Stage,
        launcher: Launcher | None = None,
        clock: PhaseTimer | None = None,
        apart: Mapping[str, Mapping[str, bytes]] | None = None,
        rest: str | None = None,
        *,
        timed: bool = True,
    ) -> None:
        self.arena = arena
        self.stage = stage
        self.clock = PhaseTimer() if clock is None else clock
        self._backend = backend
        self._rest = rest
        self._timed = timed
        shared = {_SHARED: binaries} if binaries or not apart else {}
        self._binaries = {**shared, **(apart or {})}
        self._launchers: dict[str, Launcher] = {}
        if launcher is not None:
            self._launchers[_SHARED] = launcher

    def __enter__(self) -> Self:
        try:
            with self.clock.part("start"), _blaming(self.stage, None):
                for owner in self._binaries.keys() - self._launchers.keys():
                    self._launchers[owner] = self._backend.launcher(self.arena, timed=self._timed)
            for owner, binaries in self._binaries.items():  # they start side by side
                with self.clock.part("start"), self._blaming(owner, None):
                    self._launchers[owner].load(binaries)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        with self.clock.part("close"):
            while self._launchers:
                self._launchers.popitem()[1].close()

    def resume(self, binaries: Mapping[str, bytes], stage: Stage, clock: PhaseTimer) -> Self:
        """Enter the session again for another stage with more binaries."""
        self._binaries[_SHARED] = {**self._binaries[_SHARED], **binaries}
        self.stage = stage
        self.clock = clock
        return self

    def restart(self) -> None:
        """A fresh process with the same binaries and nothing prepared."""
        self.close()
        self.__enter__()

    def prepare(self, placements: Sequence[PlanPlacement], case: str) -> None:
        """Resolve the placements' plans in their launchers."""
        with self.clock.part("prepare"):
            for placement in placements:
                with self._turn(placement, case) as launcher:
                    launcher.prepare(placement.key, placement.plan, placement.layout.offsets)

    def forget(self, placements: Sequence[PlanPlacement]) -> None:
        """Drop the placements' plans in their launchers."""
        for placement in placements:
            with self._turn(placement, None) as launcher:
                launcher.forget(placement.key)

    def wait_until_idle(self) -> None:
        """Wait until nothing else is being started or ended on the device: times count now."""
        with self.clock.part("wait"), _blaming(self.stage, None):
            for launcher in self._launchers.values():
                launcher.wait_until_idle()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The arena belongs to the judge: nothing of the candidate runs.

        Processes that were stopped go on when it is their turn, and not before. Launchers wait for
        the judge's writes before they execute anything; the judge need not.
        """
        self._suspend(None)
        yield

    def populate(self, placements: Sequence[PlanPlacement], case: str) -> None:
        """Have the placements' launcher hold their memory; see `Launcher`.

        Nobody else goes on until its sample is over, who could change that.
        """
        with self.clock.part("prepare"), self._turn(placements[0], case) as launcher:
            launcher.populate([s.key for s in placements])

    def settle(self) -> None:
        """Empty caches and let threads rest, right before a sample."""
        with self.clock.part("settle"):
            self._backend.settle()

    def run(self, placement: PlanPlacement, case: str) -> None:
        """Execute the placement's plan once."""
        with self._turn(placement, case) as launcher:
            launcher.run(placement.key, limit_s=bounded(RUN_LIMIT_S))

    def sample(
        self,
        placements: Sequence[PlanPlacement],
        case: str,
        *,
        limit_s: float = SAMPLE_LIMIT_S,
        observe: Callable[[], None] = nothing,
    ) -> float:
        """Execute the placements' plans once each, on the data written in `paused`; see `Launcher`.

        Args:
            placements: The placements.
            case: Case of a rejection.
            limit_s: Seconds after which the candidate counts as hung.
            observe: Reads results; on a CPU the clock runs until it returns.

        Returns:
            µs per execution, positive.
        """
        keys = [s.key for s in placements]
        with self.clock.part("samples"), self._turn(placements[0], case) as launcher:
            us = launcher.sample(keys, limit_s=bounded(limit_s), observe=observe)
        return max(us, LEAST_US)

    def wall_us(self, placements: Sequence[PlanPlacement], count: int, case: str) -> float | None:
        """µs per execution by the judge's own clock; None where samples are on it, too."""
        with self.clock.part("wall"), self._turn(placements[0], case) as launcher:
            return launcher.wall_us(
                [s.key for s in placements], count, limit_s=bounded(SAMPLE_LIMIT_S)
            )

    @contextlib.contextmanager
    def _turn(self, placement: PlanPlacement, case: str | None) -> Iterator[Launcher]:
        """The launcher of a placement, while all others are stopped."""
        owner = placement.owner if placement.owner in self._launchers else _SHARED
        self._suspend(case, but=owner)
        with self._blaming(owner, case):
            yield self._launchers[owner]

    def _suspend(self, case: str | None, but: str | None = None) -> None:
        """Stop all processes, or all but one, until they are asked for something.

        Raises:
            CandidateRejected: One has died since it answered, or does not stop. It is to blame,
                whoever's turn it is.
        """
        for owner, launcher in self._launchers.items():
            if owner != but:
                with self._blaming(owner, case):
                    launcher.stop()

    def _blaming(self, owner: str, case: str | None) -> AbstractContextManager[None]:
        """Turn failures of an owner's launcher into that contender's verdict."""
        contender = self._rest if owner == _SHARED else owner
        return _blaming(self.stage, case, contender)


@contextlib.contextmanager
def _blaming(stage: Stage, case: str | None, owner: str | None = None) -> Iterator[None]:
    """Turn failures of a candidate's code into its verdict."""
    try:
        yield
    except LaunchFailed as e:
        raise CandidateRejected(Rejected(stage, e.status, str(e), case), owner) from e
    except PlanError as e:
        raise CandidateRejected(Rejected(stage, Status.TAMPER, str(e), case), owner) from e
