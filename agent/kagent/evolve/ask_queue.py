"""Open asks: those that a proposer works on, and what comes back."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from kagent.llm.chat import ModelError
from kagent.runs.ask import Ask, Draft, Proposer
from kagent.runs.events import Asked, CallFailed, Observer
from kagent.runs.source_index import SourceIndex
from kagent.runs.store import RunStore

FAILURES_IN_A_ROW = 3  # calls without a reply, one after the other, after which asking ends


async def first_new(
    proposer: Proposer, ask: Ask, known: SourceIndex, attempts: Counter[int]
) -> tuple[Ask, Draft] | None:
    """Ask until the draft is no duplicate of an accepted proposal, at most `resamples` times more.

    `attempts` counts those at each ask, by its number: also failed ones, and those of earlier
    sessions, whose texts are kept.

    Returns the ask as it was answered, with its draft; None if there is nothing left to propose.
    """
    draft = None
    for resample in range(1 + proposer.resamples):
        pending = known.since(len(ask.lineage)) if resample else ()
        ask = replace(ask, attempt=attempts[ask.id], pending=pending)
        attempts[ask.id] += 1
        draft = await proposer.propose(ask)
        if draft is None or known.same(draft) is None:
            break
    return None if draft is None else (ask, draft)


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
        self._calls: dict[asyncio.Task[tuple[Ask, Draft] | None], Ask] = {}
        self._failures = 0

    def open(self) -> Iterator[Ask]:
        """Open asks, in order."""
        return iter(sorted(self._calls.values(), key=lambda b: b.id))

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

    def ask(self, ask: Ask, *, stored: bool = False) -> None:
        """Commit a decision, then put it to the proposer."""
        if not stored:
            self._store.ask(ask.record())
        self._observe(Asked(ask.id, ask.operator))
        work = first_new(self._proposer, ask, self._known, self._attempts)
        self._calls[asyncio.create_task(work, name=f"ask {ask.id}")] = ask

    def answers(self) -> Iterator[tuple[Ask, Draft | None]]:
        """Answers that have come back, in the order of asks. A call that failed is made once more.

        Raises:
            CapReached: A limit on money or tokens leaves no room for another call.
            ModelError: The model failed for good, or for the third time in a row.
        """
        for task in sorted((t for t in self._calls if t.done()), key=lambda t: self._calls[t].id):
            asked = self._calls.pop(task)
            try:
                answer = task.result()
            except ModelError as e:
                self._failures += 1
                self._observe(CallFailed(str(e), self._failures))
                if e.permanent or self._failures >= FAILURES_IN_A_ROW:
                    raise
                self.ask(asked, stored=True)
                continue
            self._failures = 0
            yield (asked, None) if answer is None else answer

    async def cancel(self) -> None:
        """Let go of all calls. Their asks are stored, and put again by the next session."""
        tasks = list(self._calls)
        self._calls.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
