"""Open asks: those that a proposer works on, and what comes back."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from kagent.llm.chat import ModelError
from kagent.runs.ask import Ask, CapReached, Draft, Proposer
from kagent.runs.events import Asked, CallFailed, Observer
from kagent.runs.source_index import SourceIndex
from kagent.runs.store import RunStore

FAILURES_IN_A_ROW = 4  # calls without a reply, one after the other, after which asking ends
WAITS_S = (5.0, 30.0, 120.0)
"""Seconds before a call is made again, by failures in a row: a server that is busy, or is started
anew, is there again after some of them.
"""
MOST_WAIT_S = 600.0
"""Seconds that a server may ask to wait."""


async def first_new(
    proposer: Proposer,
    ask: Ask,
    known: SourceIndex,
    attempts: Counter[int],
    after_s: float = 0.0,
) -> tuple[Ask, Draft] | None:
    """Ask until the draft is no duplicate of an accepted proposal, at most `resamples` times more.

    `attempts` counts those at each ask, by its number: also failed ones, and those of earlier
    sessions, whose texts are kept. The first begins `after_s`.

    Returns the ask as it was answered, with its draft; None if there is nothing left to propose.
    """
    if after_s:
        await asyncio.sleep(after_s)
    draft = None
    for resample in range(1 + proposer.resamples):
        pending = known.since(len(ask.lineage)) if resample else ()
        ask = replace(ask, attempt=attempts[ask.id], pending=pending)
        attempts[ask.id] += 1
        draft = await proposer.propose(ask)
        if draft is None or known.same(draft) is None:
            break
    return None if draft is None else (ask, draft)


@dataclass(frozen=True, slots=True)
class _Call:
    """A call under way: its ask, failures before it was made, and when it begins or began."""

    ask: Ask
    failures: int
    begins_s: float


class AskQueue:
    """Puts asks to the proposer, several at once, and counts its failures."""

    def __init__(
        self,
        proposer: Proposer,
        known: SourceIndex,
        store: RunStore,
        observe: Observer,
        attempts: Mapping[int, int],
    ) -> None:
        """`attempts`: at each ask, by earlier sessions."""
        self._proposer = proposer
        self._known = known
        self._store = store
        self._observe = observe
        self._attempts = Counter(attempts)
        self._calls: dict[asyncio.Task[tuple[Ask, Draft] | None], _Call] = {}
        self._in_a_row = 0  # failures since the last reply
        self._failures = 0  # all that were counted
        self._ended = False

    def open(self) -> Iterator[Ask]:
        """Open asks, in order."""
        return iter(sorted((c.ask for c in self._calls.values()), key=lambda b: b.id))

    @property
    def has_proposer(self) -> bool:
        """Whether there is anybody to ask."""
        return self._proposer.at_once > 0

    @property
    def has_room(self) -> bool:
        """Whether the proposer can take another ask."""
        return len(self._calls) < self._proposer.at_once

    @property
    def in_order(self) -> bool:
        """Whether answers are to be waited for before anything else is looked at."""
        return self._proposer.at_once == 1

    @property
    def tasks(self) -> set[asyncio.Task[tuple[Ask, Draft] | None]]:
        """Tasks to wait for."""
        return set(self._calls)

    def ask(self, ask: Ask, *, stored: bool = False, after_s: float = 0.0) -> None:
        """Commit a decision, then put it to the proposer, `after_s`."""
        if not stored:
            self._store.ask(ask.record())
        self._observe(Asked(ask.id, ask.operator))
        work = first_new(self._proposer, ask, self._known, self._attempts, after_s)
        call = _Call(ask, self._failures, time.monotonic() + after_s)
        self._calls[asyncio.create_task(work, name=f"ask {ask.id}")] = call

    def answers(self) -> Iterator[tuple[Ask, Draft | None]]:
        """Answers that have come back, in the order of asks. A call that failed is made once more,
        later and later. What fails beside others counts once: it is one time of trouble.

        Once it raises, calls under way still come home, and no other is made.

        Raises:
            CapReached: A limit on money or tokens leaves no room for another call.
            ModelError: The model failed for good, or too often in a row.
        """
        error: CapReached | ModelError | None = None
        done = sorted((t for t in self._calls if t.done()), key=lambda t: self._calls[t].ask.id)
        for task in done:
            call = self._calls.pop(task)
            try:
                answer = task.result()
            except CapReached as e:
                self._ended, error = True, error or e
            except ModelError as e:
                if self._failed(call, e) and not self._ended:
                    self._ended, error = True, e
                elif not self._ended:
                    wait_s = max(WAITS_S[self._in_a_row - 1], min(e.wait_s, MOST_WAIT_S))
                    self.ask(call.ask, stored=True, after_s=wait_s)
            else:
                self._in_a_row = 0
                yield (call.ask, None) if answer is None else answer
        if self._ended:
            now = time.monotonic()
            self._let_go([t for t, c in self._calls.items() if c.begins_s > now])
        if error is not None:
            raise error

    def _failed(self, call: _Call, error: ModelError) -> bool:
        """Count a failure; whether it is the last."""
        if call.failures == self._failures or not self._in_a_row:
            self._failures += 1
            self._in_a_row += 1
        self._observe(CallFailed(str(error), self._in_a_row))
        return error.permanent or self._in_a_row >= FAILURES_IN_A_ROW

    def _let_go(self, tasks: Iterable[asyncio.Task[tuple[Ask, Draft] | None]]) -> None:
        """Drop calls that have not begun."""
        for task in tasks:
            del self._calls[task]
            task.cancel()

    async def cancel(self) -> None:
        """Let go of all calls. Their asks are stored, and put again by the next session."""
        tasks = list(self._calls)
        self._calls.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
