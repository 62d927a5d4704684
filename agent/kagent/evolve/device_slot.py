"""Access to the machine: builds share the cores, checks and timings take turns.

On a GPU a build costs only the host's cores, so that timing one candidate and building the next
overlap. On a CPU they would disturb each other: a timing waits until the running builds are over,
and new ones wait until it is done. Checks are not timed and share the cores with builds. While a
timing waits, checks wait, too: they run beside the builds after the timing instead of alone before
it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class DeviceSlot:
    """One device. `quiet` means that nothing may be built while it times."""

    def __init__(self, builders: int, *, quiet: bool) -> None:
        self._builders = builders
        self._quiet = quiet
        self._building = 0
        self._taken = False  # by a check or a timing
        self._hushed = 0  # timings that run or wait, where builds must make room
        self._waiting = 0  # checks and timings that want the device
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def build(self) -> AsyncIterator[None]:
        """One of the builders' places."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._building < self._builders and not self._hushed
            )
            self._building += 1
        try:
            yield
        finally:
            async with self._changed:
                self._building -= 1
                self._changed.notify_all()

    @asynccontextmanager
    async def check(self) -> AsyncIterator[None]:
        """The device, not timed."""
        async with self._take(quiet=False):
            yield

    @asynccontextmanager
    async def measure(self) -> AsyncIterator[None]:
        """The device, timed."""
        async with self._take(quiet=self._quiet):
            yield

    @asynccontextmanager
    async def spare(self) -> AsyncIterator[None]:
        """The device, once no check or timing wants it. Those that come later wait."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._taken and not self._waiting)
            self._taken = True
        try:
            yield
        finally:
            self._taken = False
            async with self._changed:
                self._changed.notify_all()

    @asynccontextmanager
    async def _take(self, *, quiet: bool) -> AsyncIterator[None]:
        self._hushed += quiet
        try:
            async with self._changed:
                self._waiting += 1
                try:
                    await self._changed.wait_for(
                        lambda: not self._taken and not (self._building if quiet else self._hushed)
                    )
                finally:
                    self._waiting -= 1
                self._taken = True
            try:
                yield
            finally:
                self._taken = False
        finally:
            self._hushed -= quiet
            async with self._changed:
                self._changed.notify_all()
