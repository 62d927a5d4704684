"""Limits on money and tokens that include calls in flight."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kagent.runs.ask import CapReached
from kagent.runs.cost import ModelCall, Spent
from kagent.runs.events import Stop


@dataclass(frozen=True, slots=True)
class CallBound:
    """The most that a call can take. `dollars` is None where no price is known."""

    tokens: int
    dollars: float | None


class SpendLimit:
    """Lets a call begin only if it fits even when every call in flight takes the most it can.

    A call whose cost is not known afterwards (it failed, was given up, or the endpoint did not say)
    is counted with the most that it could take, in later sessions, too.
    """

    def __init__(
        self, spent: Spent, *, max_dollars: float | None = None, max_tokens: int | None = None
    ) -> None:
        """`spent`: by the sessions of the run before this one."""
        self.spent = spent
        self._max_dollars = max_dollars
        self._max_tokens = max_tokens
        self._held: list[CallBound] = []
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def reserve(self, most: CallBound) -> AsyncIterator[None]:
        """Keep back the most that a call can take, while it is made; waits until it fits.

        Raises:
            CapReached: It does not fit although nothing else is in flight.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._full(most) is None or not self._held)
            stop = self._full(most)
            if stop is not None:
                raise CapReached(stop)
            self._held.append(most)
        try:
            yield
        finally:
            async with self._changed:
                self._held.remove(most)
                self._changed.notify_all()

    def charge(self, call: ModelCall) -> None:
        """Count a call that is over."""
        self.spent = self.spent.and_call(call)

    def _full(self, most: CallBound) -> Stop | None:
        """Name the resource that does not suffice for one more call."""
        dollars = self.spent.bound_dollars + sum(h.dollars or 0.0 for h in self._held)
        if self._max_dollars is not None and dollars + (most.dollars or 0.0) > self._max_dollars:
            return Stop.COST
        tokens = self.spent.bound_tokens + sum(h.tokens for h in self._held)
        if self._max_tokens is not None and tokens + most.tokens > self._max_tokens:
            return Stop.TOKENS
        return None
