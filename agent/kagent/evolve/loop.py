"""The loop. Without the overlap of several proposals it does this:

    while budget.left(lineage):
        ask = select(setting, lineage, number)    # pure
        proposal = await propose(ask)             # one model call, or one mutation
        built = build(proposal)                     # on any core
        verdict = check(built) and measure(built)   # one at a time, against the incumbent
        lineage.record(Candidate(proposal, verdict))

`in_flight` proposals are in progress at once: asks that a model works on
(`kagent.evolve.ask_queue`), and answers on their way to a verdict (`kagent.evolve.evaluation`). An
answer becomes the next candidate when it comes, so a slow reply blocks nobody. From there on,
decisions are taken in the order of ids. An ask is selected on the lineage as it stands when a place
becomes free.

The loop waits for a proposer that works on one ask at a time. So a run with the same seed and the
same measurements is the same run, and one that was killed and resumed continues as it would have.
With a model, asks and answers are stored in their order, and the tests take every decision once
more (tests/agent/replaying.py).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kagent_sandbox.data.build import Contender
from kagent_sandbox.data.race import Race
from kagent_sandbox.data.verdict import Rejected
from kagent_sandbox.errors import TaskError

from kagent.evolve.ask_queue import AskQueue
from kagent.evolve.evaluation import Evaluation, Evaluator, texts_of
from kagent.evolve.incumbent_profiles import IncumbentProfiles
from kagent.evolve.machine import Machine, contender
from kagent.evolve.phases import PhaseClock
from kagent.evolve.remembering import SeedText
from kagent.llm.chat import ModelError
from kagent.runs.ask import Ask, AskRecord, CapReached, Draft, Proposer, Setting
from kagent.runs.events import (
    Answered,
    Finished,
    Observer,
    Phase,
    Progress,
    Proposed,
    Raced,
    Recorded,
    Started,
    Step,
    Stop,
    Working,
)
from kagent.runs.final_race import FinalRace, choose_finalists, winner
from kagent.runs.lineage import FREE, Lineage, Operator, Proposal, roofline_share
from kagent.runs.profiles import Profile, stored_profiles
from kagent.runs.store import RunStore
from kagent.search import recombine
from kagent.search.select import restored_ask, select
from kagent.search.settled import nothing_to_gain
from kagent.text import plural

UNTIMED = 2  # candidates of each judge that are built and not timed, up to which more is asked
ENDS_WITH_JOINING = (
    Stop.BUDGET,
    Stop.EXHAUSTED,
    Stop.SETTLED,
)  # once nothing more is asked, kernels are joined


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that end a session before its budget does. They also say whether a race ends it."""

    seconds: float | None = None  # then work in flight is abandoned; the race follows
    stop_at: float | None = None  # share of the roofline that is enough, 0 to 1
    early_stop: bool = False  # whether the search ends when there is nothing left to gain
    race: bool = True


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
        limits: Limits | None = None,
        phases: PhaseClock | None = None,
        profiles: list[Profile] | None = None,
    ) -> None:
        """Read the store. Profiles of incumbents are added to `profiles`, which has the run's."""
        history = store.history()
        self.lineage: Lineage = history.lineage
        self._history = history
        self._setting = setting
        self._seeds = seeds
        self._store = store
        self._observe = observe
        self._limits = limits or Limits()
        self._phases = phases or PhaseClock(observe)
        self._deadline = math.inf
        self._asked = history.asked
        self._raced = list(history.race.finalists) if history.race else None
        self._known = texts_of(store, history)
        self._evaluator = Evaluator(self.lineage, self._known, store, machine, observe)
        self._profiles = IncumbentProfiles(
            machine.profile,
            self._evaluator.slot,
            store,
            observe,
            [*stored_profiles(history).values()] if profiles is None else profiles,
        )
        self._queue = AskQueue(proposer, self._known, store, observe, history.attempts)
        self._evaluations: deque[Evaluation] = deque()
        self._ended: Stop | None = None  # why nothing more is asked, once that is so
        self._failure: ModelError | None = None
        self._search_from: int | None = None  # evaluations before the first ask of this session
        self._joined_at = -1  # length of the lineage when two kernels were last joined
        self._settled, self._settled_at = False, -1  # and the lineage's length when that was seen
        self._dry = -1  # length of the lineage at which there was nothing left to propose

    async def run(self) -> Stop:
        """Evaluate seeds, then proposals, until the budget is used up or nothing is left to try.

        Cancelling ends it cleanly: what was recorded is in the store, and running again goes on.

        Raises:
            RunError: The store cannot be written.
            MachineError: The machine failed; what was recorded until then is kept.
            ModelError: The model failed for good, or several times in a row; all that was answered
                before, and by calls under way then, is evaluated and kept.
        """
        name, task = self._store.folder.name, self._setting.task.name
        if self._limits.seconds is not None:
            self._deadline = time.monotonic() + self._limits.seconds
        self._store.begin(self._setting.budget)
        self._observe(Started(name, task, self._setting.budget, tuple(self._recorded())))
        stop = Stop.FAILED
        try:
            if self._reason_to_stop() is None or self._history.pending or not self._raced:
                self._phases.begin(Phase.BASELINES)
                await self._evaluator.prepare()
            self._phases.begin(Phase.SEEDS)
            await self._restore()
            stop = await self._search()
            self._phases.end(self.lineage.counted - (self._search_from or 0))
            if stop is Stop.TIME:
                await self._profiles.cancel()
            await self._profiles.finish()
            if self._limits.race:
                await self._race()
        except BaseException as e:
            stop = Stop.INTERRUPTED if isinstance(e, asyncio.CancelledError) else Stop.FAILED
            if not isinstance(e, TaskError):  # of a fault of the task there is only that to say
                self._observe(Progress("stopping once the step in progress is over"))
            raise
        finally:
            try:
                await self._abandon()
                await self._profiles.cancel()
            finally:  # also after a second Ctrl-C
                self._evaluator.close()
                self._store.stop(stop)
                self._observe(Finished(stop))
        return stop

    def _recorded(self) -> Iterator[Recorded]:
        """The verdicts of earlier sessions, as they were told then."""
        promoted = {c.id for c in self.lineage.promotions}
        counted = 0
        for candidate in self.lineage:
            counted += candidate.counts
            speed_up = math.exp(self.lineage.log_speed(candidate.id))
            yield Recorded(candidate, candidate.id in promoted, counted, speed_up)

    async def _restore(self) -> None:
        """Build the incumbent again; take up what had no verdict when the run ended."""
        await self._evaluator.use_incumbent(self.lineage.incumbent)
        for proposal in self._history.pending:
            self._start(proposal, self._restored(self._history.answered.get(proposal.id)))
        for number in range(len(self._known), len(self._seeds)):
            self._accept(self._seeds[number].proposal(number))
        if self._queue.has_proposer:
            for record in self._history.asks:
                ask = self._restored(record)
                assert ask is not None
                self._queue.ask(ask, stored=True)

    def _restored(self, record: AskRecord | None) -> Ask | None:
        """A stored ask with its lineage; None for what nobody asked for."""
        if record is None:
            return None
        pending = [p for p in self._history.pending if p.operator is Operator.SEED]
        return restored_ask(
            self._setting,
            self.lineage,
            record,
            [*(c.proposal for c in self.lineage.seeds), *pending],
        )

    async def _search(self) -> Stop:
        while True:
            self._profile_incumbent()
            stop = self._ended or self._reason_to_stop()
            if (stop is None or stop in ENDS_WITH_JOINING) and self._join():
                continue
            if stop is None and self._has_room():
                await self._admit()
                self._ask()
            elif self._queue.tasks or self._evaluations:
                await self._next()
            elif self._failure is not None:
                raise self._failure
            elif self.lineage.incumbent is None and stop is not Stop.TIME:
                return Stop.NO_SEED
            else:
                return stop or (Stop.EXHAUSTED if self._queue.has_proposer else Stop.ANSWERED)

    def _profile_incumbent(self) -> None:
        """Have the incumbent profiled, once the seeds are judged: each may be one for a moment."""
        incumbent, built = self.lineage.incumbent, self._evaluator.incumbent
        if (
            incumbent is not None
            and built is not None
            and built.id == str(incumbent.id)
            and not any(f.proposal.operator is Operator.SEED for f in self._evaluations)
        ):
            self._profiles.want(incumbent, built.built)

    def _has_room(self) -> bool:
        """Whether another ask may be selected now."""
        on_their_way = len(self._queue.tasks) + len(self._evaluations)
        return (
            self.lineage.incumbent is not None
            and not any(f.proposal.operator is Operator.SEED for f in self._evaluations)
            and self._queue.has_room
            and on_their_way < self._setting.in_flight
            and self._keeps_up()
            and self._dry != len(self.lineage)
        )

    def _keeps_up(self) -> bool:
        """Whether judges keep up with what is built: asks that come later see more verdicts. A
        proposer of one ask at a time is answered at once, and its run does not depend on timing.
        """
        waiting = sum(f.built is not None and not f.timed for f in self._evaluations)
        return self._queue.in_order or waiting < UNTIMED * self._evaluator.judges

    def _join(self) -> bool:
        """Send off two measured kernels in one file, where that should beat the incumbent. Nobody
        is asked, and nothing is charged.
        """
        at_work = {f.proposal.operator for f in self._evaluations}
        if (
            Operator.RECOMBINE not in self._setting.operators
            or self._joined_at == len(self.lineage)
            or not at_work.isdisjoint((Operator.SEED, Operator.RECOMBINE))
        ):
            return False
        self._joined_at = len(self.lineage)
        draft = recombine.best(self._setting, self.lineage, lambda d: self._known.same(d) is None)
        if draft is not None:
            self._accept(draft.unasked(len(self.lineage), len(self._known)))
        return draft is not None

    async def _admit(self) -> None:
        """Let further judges take part, once there are seeds to compare their devices by; where
        the run has none, finalists.
        """
        seeds = [c for c in self.lineage.passed() if c.proposal.operator is Operator.SEED]
        await self._evaluator.admit(seeds or choose_finalists(self.lineage))

    def _ask(self) -> None:
        if self._search_from is None:
            self._search_from = self.lineage.counted
            self._phases.begin(Phase.SEARCH)
        ask = select(
            self._setting, self.lineage.as_of(len(self.lineage)), self._asked, self._open()
        )
        self._asked += 1
        self._queue.ask(ask)

    def _open(self) -> list[Ask]:
        """Asks without a verdict, in the order of asks."""
        answered = [f.ask for f in self._evaluations if f.ask is not None]
        return sorted([*answered, *self._queue.open()], key=lambda b: b.id)

    async def _next(self) -> None:
        """Wait for what comes first: an answer, the oldest proposal's verdict, or the deadline."""
        waiting: set[asyncio.Task[object]] = set(self._queue.tasks)
        if self._evaluations and not (waiting and self._queue.in_order):
            task = self._evaluations[0].task
            assert task is not None
            waiting.add(task)
        left_s = self._deadline - time.monotonic()
        timeout_s = None if math.isinf(left_s) else max(0.0, left_s)
        done, _ = await asyncio.wait(
            waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            await self._abandon()
            return
        try:
            for ask, draft in self._queue.answers():
                self._take(ask, draft)
        except CapReached as e:
            self._ended = e.stop
        except ModelError as e:
            self._ended, self._failure = Stop.FAILED, e  # calls under way come home: they are paid
        if self._evaluations and self._evaluations[0].task in done:
            await self._finish_one()

    def _take(self, ask: Ask, draft: Draft | None) -> None:
        """An answer becomes the next candidate."""
        if draft is None:
            self._store.drop(ask.id)
            self._observe(Answered(ask.id, None))
            # Verdicts since then may have opened new ground; if there are none, that was all.
            if len(self.lineage) == len(ask.lineage):
                self._dry = len(self.lineage)
            return
        self._observe(Answered(ask.id, len(self._known)))
        self._accept(draft.proposal(ask, len(self._known)), ask)

    def _accept(self, proposal: Proposal, ask: Ask | None = None) -> None:
        """Commit a proposal to the store, before any work is put into it, and send it off."""
        self._store.propose(proposal)
        self._known.add(proposal)
        self._observe(Proposed(proposal))
        self._start(proposal, ask)

    async def _race(self) -> None:
        """The finalists once more, on cases that nobody has seen; that is the run's result."""
        finalists = choose_finalists(self.lineage)
        if not finalists or self._raced == [c.id for c in finalists]:
            return
        self._phases.begin(Phase.RACE)
        self._observe(Progress(f"{plural(len(finalists), 'finalist')}, on hidden cases"))
        contenders: list[Contender] = []
        failed: dict[str, Rejected] = {}
        all_built = await asyncio.gather(
            *(self._evaluator.build(c.proposal, race=True) for c in finalists)
        )
        for candidate, built in zip(finalists, all_built, strict=True):
            if isinstance(built, Rejected):
                failed[str(candidate.id)] = built
            else:
                contenders.append(contender(candidate, built))
        for each in contenders:
            self._observe(Working(int(each.id), Step.MEASURE))
        await self._admit()  # who did not take part in a search repeats the race
        race = await self._evaluator.race(contenders) if contenders else Race((), {})
        repeats = await self._evaluator.race_again(contenders) if contenders else ()
        race = replace(race, failed={**race.failed, **failed})
        ids = tuple(c.id for c in finalists)
        result = FinalRace(ids, winner(race, finalists), race, tuple(repeats))
        self._store.race(result)
        self._phases.end()
        self._observe(Raced(result))

    def _reason_to_stop(self) -> Stop | None:
        """Return the reason why no further ask may be selected now; None if one may."""
        operators = [b.operator for b in self._queue.open()]
        operators += [f.proposal.operator for f in self._evaluations]
        charged = sum(o not in FREE for o in operators)
        if self.lineage.counted + charged >= self._setting.budget:
            return Stop.BUDGET
        if time.monotonic() >= self._deadline:
            return Stop.TIME
        incumbent, enough = self.lineage.incumbent, self._limits.stop_at
        if (
            incumbent is not None
            and enough is not None
            and roofline_share(incumbent.verdict) >= enough
        ):
            return Stop.GOAL
        if self.lineage.is_repeating:
            return Stop.EXHAUSTED
        return Stop.SETTLED if self._is_settled() else None

    def _is_settled(self) -> bool:
        if self._limits.early_stop and self._settled_at != len(self.lineage):
            self._settled_at = len(self.lineage)
            self._settled = nothing_to_gain(self._setting, self.lineage)
        return self._settled

    def _start(self, proposal: Proposal, ask: Ask | None = None) -> None:
        before = self._evaluations[-1] if self._evaluations else None
        evaluation = Evaluation(proposal, before, ask)
        evaluation.task = asyncio.create_task(
            self._evaluator.evaluate(evaluation), name=f"candidate {proposal.id}"
        )
        self._evaluations.append(evaluation)

    async def _finish_one(self) -> None:
        """Record the oldest proposal's verdict."""
        evaluation = self._evaluations[0]
        assert evaluation.task is not None
        candidate = await evaluation.task
        self._evaluations.popleft()
        self._store.record(candidate)
        if candidate.written:
            self._known.tuned(candidate.proposal)
        promoted = self.lineage.record(candidate)
        if promoted:
            assert evaluation.built is not None
            self._evaluator.incumbent = contender(candidate, evaluation.built)
        evaluation.finish()
        speed_up = math.exp(self.lineage.log_speed(candidate.id))
        self._observe(Recorded(candidate, promoted, self.lineage.counted, speed_up))

    async def _abandon(self) -> None:
        """Let go of all that is on its way. It is stored, and taken up by the next session."""
        await self._queue.cancel()
        tasks = [f.task for f in self._evaluations if f.task is not None]
        self._evaluations.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
