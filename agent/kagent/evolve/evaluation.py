"""Evaluation of one accepted proposal, beside others that are in progress.

Candidates are built in any order. Decisions are taken in the order of ids, by waiting for the
evaluation before: whether a candidate is a duplicate, and its time against the incumbent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from kagent_sandbox.data.build import BuildRequest, Built, Contender
from kagent_sandbox.data.race import Race
from kagent_sandbox.data.verdict import CaseError, IncumbentWrong, Rejected, Stage, Status, Verdict
from kagent_sandbox.errors import RunError

from kagent.evolve.device_slot import DeviceSlot
from kagent.evolve.machine import Machine, contender
from kagent.evolve.tuning import Tuned, Tuning
from kagent.runs.ask import Ask
from kagent.runs.events import Observer, Progress, Step, Withdrawn, Working
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
    told_apart: asyncio.Event = field(default_factory=asyncio.Event)
    recorded: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[Candidate] | None = None

    def finish(self) -> None:
        """After the verdict is recorded: free binaries and history, let the next be timed."""
        self.built = self.before = None
        self.recorded.set()


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
        self._judge_thread = ThreadPoolExecutor(1, "judge")
        self._work = {c.facts.work_hash: c.id for c in reversed(list(lineage)) if c.facts}

    async def evaluate(self, evaluation: Evaluation) -> Candidate:
        """Take a proposal from acceptance to its verdict."""
        proposal = evaluation.proposal
        verdict = self._read(proposal)
        if verdict is not None:
            evaluation.told_apart.set()
            return Candidate(proposal, verdict)
        built = await self.build(proposal)
        found, facts = await self._deduplicate(evaluation, built)
        withdrawals: list[Withdrawal] = []
        tuned: Tuned | None = None
        if found is None:
            found, tuned = await self._judged(evaluation, withdrawals)
        if tuned is None:
            return Candidate(proposal, found, facts, tuple(withdrawals))
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
        )

    def _read(self, proposal: Proposal) -> Rejected | None:
        """Decide what the text alone decides."""
        if proposal.fault:
            return Rejected(Stage.PARSE, Status.NO_KERNEL, proposal.fault)
        same = self._known.same(proposal)
        if same is not None and same < proposal.id:
            return duplicate(Stage.PARSE, "text", same)
        return None

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
        judge, hidden = self._machine.judge, self._machine.race_request is not None
        async with self._slot.measure():
            return await _in(self._judge_thread, lambda: judge.race(contenders, hidden=hidden))

    async def prepare(self) -> None:
        """Measure what candidates are compared with, before anything else runs."""
        loop = asyncio.get_running_loop()

        def say(text: str) -> None:  # from the judge's thread
            loop.call_soon_threadsafe(self._observe, Progress(text))

        async with self._slot.measure():
            found = await _in(self._judge_thread, lambda: self._machine.prepare(say))
        self._store.append("baselines", found)

    def close(self) -> None:
        """Start nothing more. Threads that still work end when builder and judge are closed."""
        self._build_threads.shutdown(wait=False, cancel_futures=True)
        self._judge_thread.shutdown(wait=False, cancel_futures=True)

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
    ) -> tuple[Verdict, Tuned | None]:
        """Return the verdict, and the constants that the candidate was given before. Incumbents
        that are found wrong beside it are added to `withdrawals`.
        """
        assert evaluation.built is not None
        number = evaluation.proposal.id
        errors = await self._check(number, evaluation.built)
        if isinstance(errors, Rejected):
            return errors, None
        tuned = await self._tune(evaluation)
        if tuned is not None:
            built, errors = tuned[1:]
            evaluation.built = built
        self._observe(Working(number, Step.WAIT))
        if evaluation.before is not None:  # the incumbent is known once all before it are recorded
            await evaluation.before.recorded.wait()
        if tuned is not None:
            same = self._work.get(evaluation.built.work_hash, number)
            self._work[evaluation.built.work_hash] = min(same, number)
            if same < number:
                return duplicate(Stage.BUILD, "machine code", same), tuned[0]
        verdict = await self._measure_beside(number, evaluation.built, errors, withdrawals)
        return verdict, None if tuned is None else tuned[0]

    async def _check(self, number: int, built: Built) -> tuple[CaseError, ...] | Rejected:
        self._observe(Working(number, Step.WAIT))
        async with self._slot.check():
            self._observe(Working(number, Step.CHECK))
            return await _in(self._judge_thread, lambda: self._machine.judge.check(built))

    async def _tune(
        self, evaluation: Evaluation
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
            async with self._slot.measure():
                self._observe(Working(proposal.id, Step.MEASURE))
                return await _in(self._judge_thread, lambda: machine.judge.sweep(built))

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
        errors = await self._check(proposal.id, built)
        return None if isinstance(errors, Rejected) else (found, built, errors)

    async def _measure_beside(
        self,
        number: int,
        built: Built,
        errors: tuple[CaseError, ...],
        withdrawals: list[Withdrawal],
    ) -> Verdict:
        """The verdict beside the incumbent, or beside the one before it where it was wrong."""
        while True:
            try:
                async with self._slot.measure():
                    self._observe(Working(number, Step.MEASURE))
                    return await _in(
                        self._judge_thread, partial(self._measure, built, errors, self.incumbent)
                    )
            except IncumbentWrong as e:
                withdrawals.append(await self._withdraw(e, {w.id for w in withdrawals}))

    def _measure(
        self, built: Built, errors: tuple[CaseError, ...], best: Contender | None
    ) -> Verdict:
        judge = self._machine.judge
        if best is None:
            return judge.measure(built, errors)
        return judge.measure(built, errors, best.built, best.id, choice=best.choice)

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
