"""Schedule of a simulated program: its partitions as threads that run one at a time, and copies
that land late.

A schedule decides at every operation that other partitions can see (barriers, copies, waits). It
is adverse and repeatable. A partition that waits for products gets there last, so that whoever may
overwrite their operands has done so; a copy lands when nobody else can go on, or at random. When
nobody can go on and nothing is under way, the program hangs, and each partition's wait is told.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any


class SimulatedFault(Exception):  # noqa: N818
    """The kernel does what hardware would answer with a hang or with undefined results."""


class NotSimulated(Exception):  # noqa: N818
    """The kernel uses what the simulation does not know: it is neither right nor wrong."""


class _Abandoned(BaseException):
    """Another partition failed: this one ends."""


class Partition:
    """One thread of a program: what it waits for, and its products and stores under way."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.baton = threading.Semaphore(0)
        self.ready: Callable[[], bool] | None = None  # None: it can go on
        self.waits_for = ""
        self.last = False  # whether it goes on only when nobody else can
        self.products: list[Any] = []
        self.stores: list[Callable[[], None]] = []
        self.copies: list[list[Callable[[], None]]] = [[]]  # cp.async: groups, the last one open
        self.ended = False

    @property
    def can_go_on(self) -> bool:
        """Whether it can be given the baton."""
        return not self.ended and (self.ready is None or self.ready())

    def end(self) -> None:
        """Check what it leaves behind.

        Raises:
            SimulatedFault: Something asynchronous was never waited for.
        """
        for count, what in (
            (len(self.products), "products (warpgroup_mma_wait)"),
            (len(self.stores), "TMA stores that still read shared memory (tma.store_wait)"),
        ):
            if count:
                raise SimulatedFault(f"{self.name} ends and has not waited for {count} {what}")


class ProgramRun:
    """The run of one program. The calling thread is its first partition."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - an order, no secret
        self._late = seed % 2 == 0  # copies land when nobody can go on; else at random
        self._landing: list[tuple[Callable[[], None], Any]] = []
        self.running = Partition("the program")
        self._partitions = [self.running]
        self._fault: BaseException | None = None

    def later(self, land: Callable[[], None], to: Any = None) -> None:
        """Have a copy land, in a buffer, at some time from now on."""
        self._landing.append((land, to))

    def filling(self) -> list[Any]:
        """Buffers that copies have yet to land in."""
        return [to for _, to in self._landing]

    def pause(self, *, last: bool = False) -> None:
        """A point at which others may go on, or all others first."""
        me = self.running
        me.last = last
        self._switch()
        me.last = False

    def wait(self, ready: Callable[[], bool], waits_for: Callable[[], str]) -> None:
        """Go on when something has come true.

        Raises:
            SimulatedFault: It never does.
        """
        me = self.running
        me.ready, me.waits_for = ready, waits_for()
        self._switch()
        me.ready = None

    def run(self, work: Sequence[tuple[str, Callable[[], None]]]) -> None:
        """Run partitions to their ends; the caller waits.

        Raises:
            SimulatedFault: One of them failed, or all wait for ever.
            NotSimulated: One of them does what is not simulated.
        """
        started: list[tuple[Partition, threading.Thread]] = []
        for name, function in work:
            partition = Partition(name)
            thread = threading.Thread(target=self._run, args=(partition, function), daemon=True)
            started.append((partition, thread))
            self._partitions.append(partition)
            thread.start()
        try:
            self.wait(lambda: all(p.ended for p, _ in started), lambda: "its partitions")
        finally:
            for _, thread in started:
                thread.join()
        if self._fault is not None:
            raise self._fault

    def finish(self) -> None:
        """End the program: its copies land, and nothing may be left to wait for."""
        self.running.end()
        while self._landing:
            self._landing.pop()[0]()

    def _run(self, partition: Partition, function: Callable[[], None]) -> None:
        partition.baton.acquire()
        try:
            if self._fault is None:
                self.running = partition
                function()
                partition.end()
        except BaseException as e:  # noqa: BLE001 - raised again in the thread that waits
            if self._fault is None and not isinstance(e, _Abandoned):
                self._fault = e
        partition.ended = True
        self._next().baton.release()

    def _switch(self) -> None:
        me, following = self.running, self._next()
        if following is not me:
            following.baton.release()
            me.baton.acquire()
            self.running = me
        if self._fault is not None:
            raise self._fault if me is self._partitions[0] else _Abandoned

    def _next(self) -> Partition:
        """Choose the thread that goes on: any that can, first those that need not be last."""
        if self._fault is None:
            if not self._late and self._landing and self._random.random() < 0.5:
                self._land()
            while True:
                able = [p for p in self._partitions if p.can_go_on]
                if able:
                    return self._random.choice([p for p in able if not p.last] or able)
                if not self._landing:
                    break
                self._land()
            waiting = [f"{p.name} for {p.waits_for}" for p in self._partitions if not p.ended]
            named = waiting[1:] or waiting  # the program itself waits for its partitions
            self._fault = SimulatedFault("it hangs: nobody can go on; " + "; ".join(named))
        left = [p for p in self._partitions[1:] if not p.ended]  # they end, then the program
        return left[0] if left else self._partitions[0]

    def _land(self) -> None:
        self._landing.pop(self._random.randrange(len(self._landing)))[0]()
