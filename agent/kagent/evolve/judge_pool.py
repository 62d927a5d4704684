"""The judges of a session, each on a device of its own.

The first one is the run's own: scores, baselines and the final race are quoted from it. Others are
equal devices that were compared with it (`kagent.evolve.admission`). A comparison is always made
by one judge, on one device.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

from kagent_sandbox.errors import JudgeMoved

from kagent.evolve.device_slot import DeviceSlot
from kagent.evolve.machine import Unit

T = TypeVar("T")

MOST_PER_JUDGE = 2
"""Candidates at one judge of several: one is timed while the other's constants are built."""


class JudgeHandle:
    """A judge with the thread that calls it, and its turns on the device."""

    def __init__(self, unit: Unit, slot: DeviceSlot) -> None:
        self.unit = unit
        self.slot = slot
        self.load = 0  # candidates that are there now
        self.moved: JudgeMoved | None = None  # to another device, where nothing is asked of it yet
        self.admission = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "judge")

    async def call(self, work: Callable[[], T], *, on_trial: bool = False) -> T:
        """Call the judge in its thread. The caller has the device (`slot`).

        Args:
            work: Calls it.
            on_trial: Whether it is called although it has moved to another device.

        Raises:
            JudgeMoved: It has, and that device is not admitted.
        """

        def called() -> T:  # one after the other: who is next knows that it has moved
            if self.moved is not None and not on_trial:
                raise self.moved
            try:
                return work()
            except JudgeMoved as e:
                self.moved = e
                raise

        return await asyncio.get_running_loop().run_in_executor(self._thread, called)

    def close(self) -> None:
        """Start nothing more. What still runs ends when the judge is closed."""
        self._thread.shutdown(wait=False, cancel_futures=True)


class JudgePool:
    """The judges that candidates may go to.

    Args:
        home: The run's own judge.
        slot: Turns on its device, beside the builders.
    """

    def __init__(self, home: Unit, slot: DeviceSlot) -> None:
        self.home = JudgeHandle(home, slot)
        self._others: list[JudgeHandle] = []
        self._dropped: list[JudgeHandle] = []
        self._waiting_first = 0
        self._changed = asyncio.Condition()

    @property
    def others(self) -> Sequence[JudgeHandle]:
        """All but the home."""
        return tuple(self._others)

    @property
    def count(self) -> int:
        """Judges, the home included."""
        return 1 + len(self._others)

    def add(self, unit: Unit) -> None:
        """Let candidates go to one more judge."""
        self._others.append(JudgeHandle(unit, DeviceSlot(0, quiet=False)))

    def drop(self, handle: JudgeHandle) -> bool:
        """Let no candidate go to a judge any more; False for the home, which has to stay."""
        if handle is self.home:
            return False
        if handle in self._others:  # what is there now ends by itself
            self._others.remove(handle)
            self._dropped.append(handle)
        return True

    @asynccontextmanager
    async def take(self, *, first: bool = False) -> AsyncIterator[JudgeHandle]:
        """A judge with room; among several the one with the fewest candidates.

        A single judge has room for all: they take turns on its device in the order of ids.

        Args:
            first: Whether this goes before all that wait without it: others wait for its verdict.
        """
        async with self._changed:
            self._waiting_first += first
            try:
                await self._changed.wait_for(
                    lambda: self._free() is not None and (first or not self._waiting_first)
                )
                handle = self._free()
                assert handle is not None
                handle.load += 1
            finally:
                self._waiting_first -= first
                self._changed.notify_all()  # others may have room now
        try:
            yield handle
        finally:
            handle.load -= 1
            async with self._changed:
                self._changed.notify_all()

    def close(self) -> None:
        """Start nothing more at any judge."""
        for handle in (self.home, *self._others, *self._dropped):
            handle.close()

    def _free(self) -> JudgeHandle | None:
        if not self._others:
            return self.home
        handle = min((self.home, *self._others), key=lambda s: s.load)
        return handle if handle.load < MOST_PER_JUDGE else None
