"""Bytes of a response as they arrive, many pieces at once.

A server sends each token in a piece of its own, and what a piece takes on its way through HTTP's
layers, 0.1 ms, adds up where dozens of replies come at once. So whoever waited for a piece pauses
for a moment, in which more of them come, and then has them all at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

PAUSE = 0.01
"""Share of the time since the first piece that a pause may take: so much later a reply ends."""
MOST_PAUSE_S = 0.25
_AT_ONCE_S = 0.001  # pieces that were there already follow each other faster than this


class Arrivals:
    """Reads in a task of its own, which ends with the context."""

    def __init__(self, parts: AsyncIterator[bytes]) -> None:
        self._parts = parts
        self._waiting: list[bytes] = []
        self._news = asyncio.Event()

    async def next(self) -> bytes | None:
        """All that has come since the last call, at least one piece; None at the end.

        Raises what reading raised.
        """
        if not self._waiting and not self._reader.done():
            await self._news.wait()
        self._news.clear()
        if not self._waiting:
            await self._reader
            return None
        piece = b"".join(self._waiting)
        self._waiting.clear()
        return piece

    async def _read(self) -> None:
        clock = asyncio.get_running_loop().time
        begun = last = clock()
        try:
            async for part in self._parts:
                self._waiting.append(part)
                self._news.set()
                now = clock()
                if now - last > _AT_ONCE_S:
                    await asyncio.sleep(min(MOST_PAUSE_S, PAUSE * (now - begun)))
                    now = clock()
                last = now
        finally:
            self._news.set()

    async def __aenter__(self) -> Self:
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
