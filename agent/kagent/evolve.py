"""The loop. What it does, without the overlap of several proposals:

    while budget.left(lineage):
        brief = select(setting, lineage, id)        # pure
        proposal = await propose(brief)             # one model call, or one mutation
        built = build(proposal)                     # on any core
        verdict = check(built) and measure(built)   # one at a time, against the incumbent
        lineage.record(Candidate(proposal, verdict))

`in_flight` proposals are worked on at once, each in a task of its own (`kagent.flight`). Three
rules make the run the same whatever order their work ends in: each proposal is selected on the
lineage as it stands when its place becomes free; a place becomes free only when the oldest
proposal's verdict is recorded; whatever decides is done in the order of ids. So a run with the same
seed and the same measurements is the same run, and one that was killed and resumed continues the
one that it was.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kagent_sandbox.errors import RunError
from kagent_sandbox.figures import Contender
from kagent_sandbox.race_result import Race
from kagent_sandbox.verdict import Rejected

from kagent.duplicates import Known
from kagent.events import Finished, Observer, Progress, Raced, Recorded, Started, Stop
from kagent.flight import Flight, Pilot
from kagent.lineage import Lineage, Operator, Proposal
from kagent.machine import Machine, contender
from kagent.propose import Brief, Proposer, Setting
from kagent.race import FinalRace, choose_finalists, winner
from kagent.select import select
from kagent.store import RunStore

DUPLICATES_IN_A_ROW = 40  # duplicates are free; after so many nothing new is to be expected


@dataclass(frozen=True, slots=True)
class SeedText:
    """A kernel that the search starts from."""

    name: str
    source: str


class Evolution:
    """One session of a run: construct, then `await run()`, once."""

    def __init__(
        self,
        setting: Setting,
        seeds: Sequence[SeedText],
        store: RunStore,
        machine: Machine,
        proposer: Proposer,
        observe: Observer,
        *,
        minutes: float | None = None,
    ) -> None:
        """Read the store. `minutes` bounds this session's time."""
        history = store.history()
        self.lineage: Lineage = history.lineage
        self._setting = setting
        self._seeds = seeds
        self._store = store
        self._observe = observe
        self._deadline = time.monotonic() + 60 * minutes if minutes is not None else None
        self._resumed = history.pending
        self._raced = list(history.race.finalists) if history.race else None
        self._known = Known([*(c.proposal for c in self.lineage), *history.pending])
        self._pilot = Pilot(self.lineage, self._known, store, machine, proposer, observe)
        self._flights: deque[Flight] = deque()

    async def run(self) -> Stop:
        """Evaluate seeds, then proposals, until the budget is used up or nothing is left to try.

        Cancelling ends it cleanly: what was recorded is in the store, and running again goes on.

        Raises:
            RunError: The store cannot be written.
            MachineError: The machine failed; what was recorded until then is kept.
        """
        name, task = self._store.folder.name, self._setting.task.name
        recorded, seeds = len(self.lineage), len(self._seeds)
        self._store.begin(len(self._known), self._setting.budget)
        self._observe(Started(name, task, self._setting.budget, recorded, seeds))
        stop = Stop.FAILED
        try:
            if self._reason_to_stop() is None or not self._raced:
                await self._pilot.prepare()
            await self._restore()
            await self._evaluate_seeds()
            stop = await self._search() if self.lineage.incumbent else Stop.NO_SEED
            await self._race()
        except BaseException as e:
            stop = Stop.INTERRUPTED if isinstance(e, asyncio.CancelledError) else Stop.FAILED
            self._observe(Progress("stopping once the step in progress is over"))
            raise
        finally:
            await self._abandon()
            self._pilot.close()
            self._store.stop(stop)
            self._observe(Finished(stop))
        return stop

    async def _restore(self) -> None:
        """Build the incumbent again; take up proposals that had no verdict when the run ended."""
        incumbent = self.lineage.incumbent
        if incumbent is not None:
            built = await self._pilot.build(incumbent.proposal)
            if isinstance(built, Rejected):
                raise RunError(
                    f"candidate {incumbent.id}, the incumbent, no longer builds: {built.message}"
                )
            self._pilot.incumbent = contender(incumbent, built)
        for proposal in self._resumed:
            brief = None
            if proposal.operator is not Operator.SEED:
                brief = self._select(proposal.id, proposal.seen)
            self._take_off(brief, proposal.id, proposal)

    async def _evaluate_seeds(self) -> None:
        for number in range(len(self._known), len(self._seeds)):
            seed = self._seeds[number]
            proposal = Proposal(
                id=number,
                parents=(),
                operator=Operator.SEED,
                name=seed.name,
                source=seed.source,
                hypothesis="one of the task's own kernels",
            )
            self._pilot.accept(proposal)
            self._take_off(None, number, proposal)
        while self._flights and self._flights[0].brief is None:
            await self._land()

    async def _search(self) -> Stop:
        while True:
            stop = self._reason_to_stop()
            if stop is None and len(self._flights) < self._setting.in_flight:
                number = len(self.lineage) + len(self._flights)
                self._take_off(self._select(number, len(self.lineage)), number)
            elif not self._flights:
                assert stop is not None
                return stop
            elif not await self._land():
                return Stop.EXHAUSTED

    async def _race(self) -> None:
        """The finalists once more, on cases that nobody has seen; that is the run's result."""
        finalists = choose_finalists(self.lineage)
        if not finalists or self._raced == [c.id for c in finalists]:
            return
        self._observe(Progress(f"final race of {len(finalists)} on hidden cases"))
        contenders: list[Contender] = []
        failed: dict[str, Rejected] = {}
        for candidate in finalists:
            built = await self._pilot.build(candidate.proposal, race=True)
            if isinstance(built, Rejected):
                failed[str(candidate.id)] = built
            else:
                contenders.append(contender(candidate, built))
        race = await self._pilot.race(contenders) if contenders else Race((), {})
        race = replace(race, failed={**race.failed, **failed})
        result = FinalRace(tuple(c.id for c in finalists), winner(race, finalists), race)
        self._store.race(result)
        self._observe(Raced(result))

    def _reason_to_stop(self) -> Stop | None:
        """Why no further proposal may start; None if one may."""
        if self.lineage.counted + len(self._flights) >= self._setting.budget:
            return Stop.BUDGET
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return Stop.TIME
        recent = self.lineage.last(DUPLICATES_IN_A_ROW)
        if len(recent) == DUPLICATES_IN_A_ROW and all(c.is_duplicate for c in recent):
            return Stop.EXHAUSTED
        return None

    def _select(self, number: int, seen: int) -> Brief:
        pending = [f.brief for f in self._flights if f.brief is not None]
        return select(self._setting, self.lineage.as_of(seen), number, pending)

    def _take_off(self, brief: Brief | None, number: int, proposal: Proposal | None = None) -> None:
        before = self._flights[-1] if self._flights else None
        flight = Flight(number, before, brief, proposal)
        flight.task = asyncio.create_task(self._pilot.fly(flight), name=f"candidate {number}")
        self._flights.append(flight)

    async def _land(self) -> bool:
        """Record the oldest proposal's verdict; False if there is nothing new left to propose."""
        flight = self._flights[0]
        assert flight.task is not None
        candidate = await flight.task
        if candidate is None:
            # Proposals recorded since may have opened new ground; if there are none, that was all.
            fresh = flight.brief is not None and len(self.lineage) > len(flight.brief.lineage)
            await self._abandon()
            return fresh
        self._flights.popleft()
        self._store.record(candidate)
        promoted = self.lineage.record(candidate)
        if promoted:
            assert flight.built is not None
            self._pilot.incumbent = contender(candidate, flight.built)
        flight.land()
        speed_up = math.exp(self.lineage.log_speed(candidate.id))
        self._observe(Recorded(candidate, promoted, self.lineage.counted, speed_up))
        return True

    async def _abandon(self) -> None:
        """Let go of all flights. What was accepted is stored, and taken up by the next session."""
        tasks = [f.task for f in self._flights if f.task is not None]
        self._flights.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
