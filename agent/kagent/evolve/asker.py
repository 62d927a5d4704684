"""Open briefs: those that a proposer works on, and what comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

from kagent.llm.chat import ModelError
from kagent.runs.brief import Brief, Draft, Proposer
from kagent.runs.events import Asked, CallFailed, Observer
from kagent.runs.known_sources import Known
from kagent.runs.store import RunStore

FAILURES_IN_A_ROW = 3  # calls without a reply, one after the other, after which asking ends


async def first_new(proposer: Proposer, brief: Brief, known: Known) -> tuple[Brief, Draft] | None:
    """Ask until the draft is no duplicate of an accepted proposal, at most `resamples` times more.

    Returns the brief as it was answered, with its draft; None if there is nothing left to propose.
    """
    draft = await proposer.propose(brief)
    while draft is not None and known.same(draft) is not None:
        if brief.attempt >= proposer.resamples:
            break
        pending = known.since(len(brief.lineage))
        brief = replace(brief, attempt=brief.attempt + 1, pending=pending)
        draft = await proposer.propose(brief)
    return None if draft is None else (brief, draft)


class Asker:
    """Puts briefs to the proposer, several at once, and counts its failures."""

    def __init__(
        self, proposer: Proposer, known: Known, store: RunStore, observe: Observer
    ) -> None:
        self._proposer = proposer
        self._known = known
        self._store = store
        self._observe = observe
        self._calls: dict[asyncio.Task[tuple[Brief, Draft] | None], Brief] = {}
        self._failures = 0

    def briefs(self) -> Iterator[Brief]:
        """Those that are open, in order."""
        return iter(sorted(self._calls.values(), key=lambda b: b.id))

    @property
    def asks(self) -> bool:
        """Whether there is anybody to ask."""
        return self._proposer.at_once > 0

    @property
    def has_room(self) -> bool:
        """Whether the proposer can take another brief."""
        return len(self._calls) < self._proposer.at_once

    @property
    def in_order(self) -> bool:
        """Whether answers are to be waited for before anything else is looked at."""
        return self._proposer.at_once == 1

    @property
    def tasks(self) -> set[asyncio.Task[tuple[Brief, Draft] | None]]:
        """To wait for."""
        return set(self._calls)

    def ask(self, brief: Brief, *, stored: bool = False) -> None:
        """Commit a decision, then put it to the proposer."""
        if not stored:
            self._store.ask(brief.ask())
        self._observe(Asked(brief.id, brief.operator))
        work = first_new(self._proposer, brief, self._known)
        self._calls[asyncio.create_task(work, name=f"ask {brief.id}")] = brief

    def answers(self) -> Iterator[tuple[Brief, Draft | None]]:
        """What has come back, in the order of asks. A call that failed is made once more.

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
