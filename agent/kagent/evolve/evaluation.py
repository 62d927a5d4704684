"""Evaluation of one accepted proposal, beside others that are in progress.

Candidates are built in any order. Decisions are taken in the order of ids, by waiting for the
evaluation before: whether a candidate is a duplicate, and its time against the incumbent.

With several judges candidates are timed in any order, too, beside the incumbent of that moment.
Verdicts are recorded in the order of ids all the same; one whose incumbent was replaced meanwhile
is given again if that may matter (`kagent.evolve.rematch`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from kagent_sandbox.data.build import BuildRequest, Built, Contender
from kagent_sandbox.data.race import Race
from kagent_sandbox.data.records import to_json
from kagent_sandbox.data.verdict import (
    CaseError,
    IncumbentWrong,
    Passed,
    Rejected,
    Stage,
    Status,
    Verdict,
)
from kagent_sandbox.errors import ChildDied, JudgeMoved, KagentError, MachineError, RunError

from kagent.evolve.admission import (
    SEEDS,
    ComparedUnits,
    Pairs,
    compare,
    compare_units,
    timed_pairs,
)
from kagent.evolve.device_slot import DeviceSlot
from kagent.evolve.judge_pool import JudgeHandle, JudgePool
from kagent.evolve.machine import Machine, Unit, contender
from kagent.evolve.rematch import wants_rematch, widened
from kagent.evolve.tuning import Tuned, Tuning
from kagent.runs.ask import Ask
from kagent.runs.events import Observer, Progress, Step, Withdrawn, Working
from kagent.runs.final_race import Repeat
from kagent.runs.history import History
from kagent.runs.kernel_files import read_kernel
from kagent.runs.lineage import (
    FREE,
    Candidate,
    Facts,
    Lineage,
    Operator,
    Proposal,
    Withdrawal,
    duplicate,
)
from kagent.runs.source_index import SourceIndex
from kagent.runs.store import RunStore
from kagent.runs.timed_configs import TimedConfigs

T = TypeVar("T")

_TUNED_BEFORE = (*FREE, Operator.MIGRATE)
"""Operators of kernels whose constants are as they should be: those that others tuned."""


@dataclass(eq=False)
class Evaluation:
    """A proposal between its acceptance and its verdict."""

    proposal: Proposal
    before: Evaluation | None  # the one with the id before, unless that was recorded long ago
    ask: Ask | None = None  # that it answers; None for seeds, and for what a session took up
    built: Built | None = None  # once told apart from all earlier work
    timed: bool = False  # it has a verdict, which may still wait for those before it
    told_apart: asyncio.Event = field(default_factory=asyncio.Event)
    recorded: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[Candidate] | None = None

    def finish(self) -> None:
        """After the verdict is recorded: free binaries and history, let the next be timed."""
        self.built = self.before = None
        self.recorded.set()


@dataclass(frozen=True, slots=True)
class _Judged:
    """Knowledge of a candidate once a judge has had it. No verdict: it is to be timed when all
    before it are recorded.
    """

    errors: tuple[CaseError, ...] = ()
    tuned: Tuned | None = None
    verdict: Verdict | None = None
    unit: str = ""


@dataclass(frozen=True, slots=True)
class _Admission:
    """Kernels that all devices of a session have timed, and their ratios on the first one."""

    entrants: Sequence[Contender]
    pairs: Pairs


def texts_of(store: RunStore, history: History) -> SourceIndex:
    """All texts of a run: also those that its candidates had before they were tuned."""
    known = SourceIndex([*(c.proposal for c in history.lineage), *history.pending])
    for candidate in (c for c in history.lineage if c.written):
        known.written(candidate.proposal, read_kernel(store.folder, candidate.written))
    return known


def verdict_of_text(proposal: Proposal, known: SourceIndex) -> Rejected | None:
    """Decide what the text alone decides."""
    if proposal.fault:
        return Rejected(Stage.PARSE, Status.NO_KERNEL, proposal.fault)
    same = known.same(proposal)
    if same is not None and same < proposal.id:
        return duplicate(Stage.PARSE, "text", same)
    return None


class Evaluator:
    """Takes proposals to their verdicts. `incumbent` is what they are timed against: its id and
    what was built of it.
    """

    def __init__(
        self,
        lineage: Lineage,
        known: SourceIndex,
        store: RunStore,
        machine: Machine,
        observe: Observer,
    ) -> None:
        self.incumbent: Contender | None = None
        self._lineage = lineage
        self._known = known
        self._store = store
        self._machine = machine
        self._observe = observe
        self._slot = DeviceSlot(machine.jobs, quiet=machine.quiet)
        self._build_threads = ThreadPoolExecutor(machine.jobs, "build")
        self._pool = JudgePool(Unit(machine.unit, machine.judge), self._slot)
        self._units: Sequence[Unit] = ()  # further ones, which have not been compared yet
        self._admission: _Admission | None = None  # what further devices are compared by
        self._spread = 0.0  # of log(ratio) from device to device
        self._work = {c.facts.work_hash: c.id for c in reversed(list(lineage)) if c.facts}

    async def evaluate(self, evaluation: Evaluation) -> Candidate:
        """Take a proposal from acceptance to its verdict."""
        proposal = evaluation.proposal
        verdict = verdict_of_text(proposal, self._known)
        if verdict is not None:
            evaluation.told_apart.set()
            return Candidate(proposal, verdict)
        built = await self.build(proposal)
        found, facts = await self._deduplicate(evaluation, built)
        withdrawals: list[Withdrawal] = []
        tuned: Tuned | None = None
        unit = ""
        if found is None:
            found, tuned, unit = await self._judged(evaluation, withdrawals)
        evaluation.timed = True
        if tuned is None:
            return Candidate(proposal, found, facts, tuple(withdrawals), unit=unit)
        assert facts is not None
        facts = replace(facts, tuned=tuned.what, configs=tuned.configs)
        if evaluation.built is not None:
            built = evaluation.built
            facts = replace(
                facts, work_hash=built.work_hash, remarks=built.remarks, loops=built.loops
            )
        return Candidate(
            replace(proposal, source=tuned.source),
            found,
            facts,
            tuple(withdrawals),
            written=proposal.kernel,
            unit=unit,
        )

    async def build(self, proposal: Proposal, *, race: bool = False) -> Built | Rejected:
        """Build a proposal's kernel for all cases of the search, or of the final race."""
        machine = self._machine
        make = machine.race_request if race and machine.race_request else machine.request
        request = replace(make(proposal.source), loops=not race)
        if proposal.configs is not None:
            request = replace(request, max_configs=proposal.configs)
        self._observe(Working(proposal.id, Step.WAIT))
        async with self._slot.build():
            self._observe(Working(proposal.id, Step.BUILD))
            built = await _in(self._build_threads, lambda: machine.builder.build(request))
        if isinstance(built, Built) and built.log:
            self._store.log(proposal.id, built.log)
        return built

    async def race(self, contenders: Sequence[Contender]) -> Race:
        """Time finalists and baselines on hidden cases, where the task has some."""
        return await self._race_at(self._pool.home, contenders)

    async def race_again(self, contenders: Sequence[Contender]) -> Sequence[Repeat]:
        """The same race on a second device, if there is one that does not fail."""
        for handle in self._pool.others:
            self._observe(Progress(f"the final race again, on {handle.unit.name}"))
            try:
                return [Repeat(handle.unit.name, await self._race_at(handle, contenders))]
            except (MachineError, ChildDied) as e:
                self._drop(handle, e)
        return []

    async def _race_at(self, handle: JudgeHandle, contenders: Sequence[Contender]) -> Race:
        hidden = self._machine.race_request is not None
        judge = handle.unit.judge
        while True:
            try:
                async with handle.slot.measure():
                    return await handle.call(lambda: judge.race(contenders, hidden=hidden))
            except JudgeMoved:
                await self._admit_moved(handle)

    async def prepare(self) -> None:
        """Measure what candidates are compared with, before anything else runs."""
        loop = asyncio.get_running_loop()

        def say(text: str) -> None:  # from the judge's thread
            loop.call_soon_threadsafe(self._observe, Progress(text))

        home, others = self._pool.home, self._machine.others
        async with self._slot.measure():
            found = await home.call(lambda: self._machine.prepare(say))
            if others is not None:
                self._units = await home.call(lambda: others(say))
        self._store.append("baselines", found)

    @property
    def slot(self) -> DeviceSlot:
        """Turns on the device of the run's own judge."""
        return self._slot

    @property
    def judges(self) -> int:
        """Judges that candidates go to."""
        return self._pool.count

    async def admit(self, seeds: Sequence[Candidate]) -> None:
        """Let candidates go to further judges, if the seeds' ratios are the same on their devices;
        where a judge may come back on another one, have ratios to compare that with.

        Args:
            seeds: Those that passed, the fastest first.
        """
        units, self._units = self._units, ()
        if not units and (not self._machine.moves or self._admission is not None):
            return
        all_built = [(c, await self.build(c.proposal)) for c in seeds[:SEEDS]]
        entrants = [contender(c, b) for c, b in all_built if isinstance(b, Built)]
        self._observe(Progress("comparing devices by the seeds"))
        fleet, pairs = await compare_units(self._pool.home, units, entrants)
        self._admission = _Admission(entrants, pairs)
        for unit, found in zip(units, fleet.others, strict=True):
            if found.why_not:
                self._observe(Progress(f"{found.unit} does not judge: {found.why_not}"))
            else:
                self._pool.add(unit)
                self._observe(
                    Progress(f"{found.unit} judges, too: ratios differ by {found.apart:.2%}")
                )
        self._spread = fleet.spread
        if units:
            self._store.append("units", to_json(fleet))

    async def _admit_moved(self, handle: JudgeHandle) -> None:
        """Go on with a judge that came back on another device, if that would be admitted.

        Raises:
            ChildDied: It was lost once more.
            MachineError: It is not.
        """
        async with handle.admission:
            moved, known = handle.moved, self._admission
            if moved is None:  # another candidate has seen to it
                return
            if known is None:
                raise MachineError(f"{moved}; nothing was compared on that one yet")
            self._observe(Progress(f"comparing {moved.unit} by the seeds: a judge has moved there"))
            mine = await timed_pairs(handle, known.entrants, on_trial=True)
            found = compare(moved.unit, known.pairs, mine)
            if found.why_not:
                raise MachineError(f"{moved}; {found.why_not}")
            handle.unit = replace(handle.unit, name=moved.unit)
            handle.moved = None
        fleet = ComparedUnits(self._pool.home.unit.name, (found,))
        self._observe(Progress(f"{moved.unit} judges now: ratios differ by {found.apart:.2%}"))
        self._spread = max(self._spread, fleet.spread)
        self._store.append("units", to_json(fleet))

    def _drop(self, handle: JudgeHandle, error: KagentError) -> None:
        """Let no candidate go to a judge that failed. The run's own judge has to work."""
        if not self._pool.drop(handle):
            raise error
        self._observe(Progress(f"{handle.unit.name} judges no more: {error}"))

    def close(self) -> None:
        """Start nothing more. Threads that still work end when builder and judge are closed."""
        self._build_threads.shutdown(wait=False, cancel_futures=True)
        self._pool.close()

    async def _deduplicate(
        self, evaluation: Evaluation, built: Built | Rejected
    ) -> tuple[Verdict | None, Facts | None]:
        """A verdict if it was not built, or does the same as an earlier candidate."""
        if evaluation.before is not None:
            await evaluation.before.told_apart.wait()
        if isinstance(built, Rejected):
            evaluation.told_apart.set()
            return built, None
        facts = Facts(
            built.tree_hash,
            built.work_hash,
            len(built.configs),
            built.build_s,
            remarks=built.remarks,
            loops=built.loops,
        )
        same = self._work.setdefault(facts.work_hash, evaluation.proposal.id)
        evaluation.told_apart.set()
        if same != evaluation.proposal.id:
            return duplicate(Stage.BUILD, "machine code", same), facts
        evaluation.built = built
        return None, facts

    async def _judged(
        self, evaluation: Evaluation, withdrawals: list[Withdrawal]
    ) -> tuple[Verdict, Tuned | None, str]:
        """Return the verdict, the constants that the candidate was given before, and the device.
        Incumbents that are found wrong beside it are added to `withdrawals`.
        """
        number = evaluation.proposal.id
        found = await self._somewhere(partial(self._first_judged, evaluation))
        if isinstance(found.verdict, Rejected):
            return found.verdict, None, found.unit
        evaluation.timed = found.verdict is not None
        self._observe(Working(number, Step.WAIT))
        if evaluation.before is not None:  # the incumbent is known once all before it are recorded
            await evaluation.before.recorded.wait()
        assert evaluation.built is not None
        if found.tuned is not None:
            same = self._work.get(evaluation.built.work_hash, number)
            self._work[evaluation.built.work_hash] = min(same, number)
            if same < number:
                return duplicate(Stage.BUILD, "machine code", same), found.tuned, ""
        if found.verdict is None or wants_rematch(self._lineage, found.verdict):
            found = await self._measured_beside(evaluation, found, withdrawals)
        assert found.verdict is not None
        return found.verdict, found.tuned, found.unit

    async def _somewhere(
        self, work: Callable[[JudgeHandle], Awaitable[_Judged]], *, first: bool = False
    ) -> _Judged:
        """The outcome at a judge that has room, and at another one if that judge fails."""
        while True:
            async with self._pool.take(first=first) as handle:
                try:
                    try:
                        return await work(handle)
                    except JudgeMoved:
                        await self._admit_moved(handle)
                except (MachineError, ChildDied) as e:
                    self._drop(handle, e)

    async def _first_judged(self, evaluation: Evaluation, handle: JudgeHandle) -> _Judged:
        """Check it and choose its constants; time it, too, where several judges work in any
        order.
        """
        assert evaluation.built is not None
        number, unit = evaluation.proposal.id, self._name(handle)
        errors = await self._check(handle, number, evaluation.built)
        if isinstance(errors, Rejected):
            return _Judged(verdict=errors, unit=unit)
        tuned = await self._tune(handle, evaluation)
        if tuned is not None:
            evaluation.built, errors = tuned[1:]
        found = _Judged(errors, None if tuned is None else tuned[0], None, unit)
        if self._pool.count == 1:
            return found
        try:
            verdict = await self._measure(handle, number, evaluation.built, errors)
        except IncumbentWrong:
            return found  # it will be seen whether that is still the incumbent
        return replace(found, verdict=verdict)

    def _name(self, handle: JudgeHandle) -> str:
        """Name of a judge's device; "" where the run has one device."""
        return handle.unit.name if self._machine.others is not None else ""

    async def _check(
        self, handle: JudgeHandle, number: int, built: Built
    ) -> tuple[CaseError, ...] | Rejected:
        self._observe(Working(number, Step.WAIT))
        async with handle.slot.check():
            self._observe(Working(number, Step.CHECK))
            return await handle.call(lambda: handle.unit.judge.check(built))

    async def _tune(
        self, handle: JudgeHandle, evaluation: Evaluation
    ) -> tuple[Tuned, Built, tuple[CaseError, ...]] | None:
        """Better constants, what was built with them, and its errors; None where there are none,
        or they are not right.
        """
        proposal, machine = evaluation.proposal, self._machine
        timed = machine.timed_request
        if timed is None or machine.tune < 2 or proposal.operator in _TUNED_BEFORE:
            return None

        async def build(request: BuildRequest) -> Built | Rejected:
            async with self._slot.build():
                self._observe(Working(proposal.id, Step.BUILD))
                return await _in(self._build_threads, lambda: machine.builder.build(request))

        async def sweep(built: Built) -> Sequence[Mapping[str, float]] | Rejected:
            async with handle.slot.measure():
                self._observe(Working(proposal.id, Step.MEASURE))
                return await handle.call(lambda: handle.unit.judge.sweep(built))

        assert evaluation.built is not None
        tuning = Tuning(machine.tune, timed, build, sweep)
        found = await tuning.best(proposal.source, evaluation.built)
        if tuning.timed:
            self._store.timed(TimedConfigs(proposal.id, tuple(tuning.timed)))
        if found is None:
            return None
        built = await self.build(replace(proposal, source=found.source))
        if isinstance(built, Rejected):
            return None
        errors = await self._check(handle, proposal.id, built)
        return None if isinstance(errors, Rejected) else (found, built, errors)

    async def _measured_beside(
        self, evaluation: Evaluation, found: _Judged, withdrawals: list[Withdrawal]
    ) -> _Judged:
        """Its verdict beside the incumbent, or beside the one before it where it was wrong. All
        before it are recorded.
        """
        number, built = evaluation.proposal.id, evaluation.built
        assert built is not None

        async def measure(handle: JudgeHandle) -> _Judged:
            verdict = await self._measure(handle, number, built, found.errors)
            return replace(found, verdict=verdict, unit=self._name(handle))

        while True:
            try:
                return await self._somewhere(measure, first=True)
            except IncumbentWrong as e:
                withdrawals.append(await self._withdraw(e, {w.id for w in withdrawals}))

    async def _measure(
        self, handle: JudgeHandle, number: int, built: Built, errors: tuple[CaseError, ...]
    ) -> Verdict:
        """Its verdict beside the incumbent of this moment.

        Raises:
            IncumbentWrong: That one failed, or was wrong.
        """
        judge = handle.unit.judge

        def work() -> Verdict:
            if best is None:
                return judge.measure(built, errors)
            return judge.measure(built, errors, best.built, best.id, choice=best.choice)

        async with handle.slot.measure():
            best = self.incumbent
            self._observe(Working(number, Step.MEASURE))
            verdict = await handle.call(work)
        if isinstance(verdict, Passed) and verdict.versus is not None:
            verdict = replace(verdict, versus=widened(verdict.versus, self._spread))
        return verdict

    async def _withdraw(self, found: IncumbentWrong, gone: Collection[int]) -> Withdrawal:
        """Hold up the incumbent before the one that was found wrong."""
        assert self.incumbent is not None
        withdrawal = Withdrawal(int(self.incumbent.id), found.verdict)
        left = self._lineage.incumbent_without({*gone, withdrawal.id})
        self._observe(Withdrawn(withdrawal, None if left is None else left.id))
        await self.use_incumbent(left)
        return withdrawal

    async def use_incumbent(self, incumbent: Candidate | None) -> None:
        """Time candidates against this incumbent from now on. It is built again.

        Raises:
            RunError: It no longer builds.
        """
        if incumbent is None:
            self.incumbent = None
            return
        built = await self.build(incumbent.proposal)
        if isinstance(built, Rejected):
            raise RunError(
                f"candidate {incumbent.id}, the incumbent, no longer builds: {built.message}"
            )
        self.incumbent = contender(incumbent, built)


async def _in(threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(threads, work)
