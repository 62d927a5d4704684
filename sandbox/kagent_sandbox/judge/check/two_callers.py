"""Check that native code may be called by several threads at once.

Threads of a program call a library at the same time: ctypes lets go of Python's lock, and autograd,
data loaders and servers have threads. Memory that calls share, such as a static buffer, is then
written by one while another reads it. So two threads of a launcher call a plan at once, on memory
and inputs of their own. What they compute is held against what the plan computes alone, and where
that differs, against the reference.

A third thread, which gets fewer threads of OpenMP, calls the plan alone. Those of a program are
others than those of this machine, and a kernel that counts on a number of them leaves rows out.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kagent_sandbox.data.verdict import Rejected
from kagent_sandbox.device.interface import LaunchFailed
from kagent_sandbox.device.time_limits import bounded
from kagent_sandbox.judge.arena.layout import lay_out_many, pitch_of
from kagent_sandbox.judge.arena.placement import bit_view
from kagent_sandbox.judge.arena.session import RUN_LIMIT_S, CandidateRejected
from kagent_sandbox.judge.check.checker import Checker, place_plan

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kagent_sandbox.data.case import Case
    from kagent_sandbox.data.plan import Plan
    from kagent_sandbox.data.task import Task
    from kagent_sandbox.device.interface import Arena, GuestHost
    from kagent_sandbox.judge.arena.placement import PlanPlacement
    from kagent_sandbox.judge.check.inputs import InputSampler, InputSet
    from kagent_sandbox.judge.check.time_budget import TimeBudget

CALLERS = 3
"""Threads of the launcher: two that call at once, and one that has fewer threads of OpenMP."""
_SIDES = 2
_MOST_PLACES = 5  # of one caller
_PLACES_BYTES = 8 << 20  # of one caller, beyond its first place
_TOGETHER_S = 0.05
"""Seconds of a case for which the callers are set off again and again."""
_LEAST_ROUNDS, _LEAST_S = 3, 1.0  # these many at least, unless calls are so slow
_MOST_ROUNDS = 64
_BUSY_S = 5e-4
"""Seconds for which a caller is busy before and after what is looked at: the other one, which may
wake up later by that much, is then in the middle of its own calls.
"""
_MOST_BUSY = 128  # such calls
_ADVICE = (
    "Calls share memory: a static or global buffer, most likely. Allocate workspaces with "
    "torch.empty in the host function and pass them to the kernel"
)

_TOGETHER = "wrong when two threads call it at once, each with memory of its own"
_FEWER = "fewer threads of OpenMP than this machine"
_THREADS_ADVICE = (
    "Divide the work by omp_get_num_threads(), asked inside of the parallel region, or by "
    "`omp for`: a caller may have any number of threads"
)


def places_bytes(plan: Plan) -> int:
    """Bytes of an arena in which both callers have their places."""
    return _SIDES * _places(plan) * pitch_of([plan])


def _places(plan: Plan) -> int:
    """Places of each caller."""
    return min(_MOST_PLACES, 1 + _PLACES_BYTES // pitch_of([plan]))


@dataclass(frozen=True)
class _Caller:
    """One thread's inputs, its places, and what the plan computes there alone."""

    draw: InputSet
    busy: PlanPlacement | None
    """Is called before and after the others, as often as it takes, and not looked at. None where
    calls are long.
    """
    places: Sequence[PlanPlacement]
    alone: Sequence[torch.Tensor]

    def keys(self, busy: int) -> list[str]:
        """Names of plans to call, in order."""
        around = [self.busy.key] * busy if self.busy else []
        return [*around, *(p.key for p in self.places), *around]

    def different(self) -> Iterator[list[torch.Tensor]]:
        """Results of the places that are not what they are alone."""
        for place in self.places:
            found = place.outputs()
            pairs = zip(found, self.alone, strict=True)
            if not all(torch.equal(bit_view(one), bit_view(other)) for one, other in pairs):
                yield found


@dataclass(frozen=True)
class TwoCallers:
    """The two callers of a candidate's code in one launcher that has two."""

    task: Task
    sampler: InputSampler
    host: GuestHost
    arena: Arena
    budget: TimeBudget

    def call(self, case: Case, plan: Plan) -> None:
        """Call a plan, which is known to compute what it should, in two threads at once.

        Raises:
            CandidateRejected: A result is wrong, or the process fails or hangs.
            LaunchFailed: It fails when it is called alone.
        """
        layouts = lay_out_many(plan, _SIDES * _places(plan))
        placements = place_plan(
            self.task, case, plan, self.arena, count=len(layouts), prefix="together"
        )
        for p in placements:
            self.host.prepare(p.key, plan, p.layout.offsets)
        first = self.sampler.draw(case)
        second = self.sampler.draw(case, other_than=first)
        # The places alternate: neighbours in memory are of different callers.
        callers = [
            self._alone(draw, placements[side::_SIDES]) for side, draw in enumerate((first, second))
        ]
        self._with_fewer_threads(callers[0])
        busy = self._busy_calls(callers[0])
        began = time.perf_counter()
        for done in range(1, _MOST_ROUNDS + 1):
            self._round(callers, busy)
            if time.perf_counter() - began > (_TOGETHER_S if done >= _LEAST_ROUNDS else _LEAST_S):
                break
        for caller in callers:
            self.sampler.release(caller.draw)
        for p in placements:
            self.host.forget(p.key)

    def _alone(self, draw: InputSet, placements: Sequence[PlanPlacement]) -> _Caller:
        """A caller, once its plan has run alone."""
        busy, places = (
            (placements[0], placements[1:]) if len(placements) > 1 else (None, placements)
        )
        self._write(draw, placements)
        with self.budget.spend(draw.case.name):
            self.host.run(places[0].key, limit_s=bounded(RUN_LIMIT_S))
        self.host.stop()
        return _Caller(draw, busy, places, [t.clone() for t in places[0].outputs()])

    def _with_fewer_threads(self, caller: _Caller) -> None:
        """Have the third thread call a caller's plan.

        Raises:
            CandidateRejected: A result is wrong, or the process fails or hangs.
        """
        place, draw = caller.places[0], caller.draw
        self._write(draw, [place])
        try:
            with self.budget.spend(draw.case.name):
                self.host.execute_together([[], [], [place.key]], limit_s=bounded(RUN_LIMIT_S))
        except LaunchFailed as e:
            text = f"in a thread that has {_FEWER}: {e}. {_THREADS_ADVICE}"
            verdict = Rejected(self.budget.stage, e.status, text, draw.case.name)
            raise CandidateRejected(verdict) from e
        self.host.stop()
        self._refuse_wrong(
            place.outputs(), draw, f"wrong in a thread that has {_FEWER}", _THREADS_ADVICE
        )

    def _write(self, draw: InputSet, placements: Sequence[PlanPlacement]) -> None:
        """Put inputs and stale values into places."""
        self.host.stop()
        for place in placements:
            place.write(draw.tensors, self.sampler.stale(draw.case))

    def _refuse_wrong(
        self, found: Sequence[torch.Tensor], draw: InputSet, when: str, advice: str
    ) -> None:
        """Make sure that results are right.

        Raises:
            CandidateRejected: They are not.
        """
        try:
            Checker(self.task, self.sampler).compare(list(found), draw, self.budget.stage)
        except CandidateRejected as e:
            text = f"{when}: {e.verdict.message}. {advice}"
            verdict = Rejected(self.budget.stage, e.verdict.status, text, draw.case.name)
            raise CandidateRejected(verdict) from e

    def _busy_calls(self, caller: _Caller) -> int:
        """Number of calls that keep a caller busy for `_BUSY_S`."""
        if caller.busy is None:
            return 0
        calls = 1
        while True:
            began = time.perf_counter()
            with self.budget.spend(caller.draw.case.name):
                self.host.repeat(caller.busy.key, calls, limit_s=bounded(RUN_LIMIT_S))
            if time.perf_counter() - began >= _BUSY_S:
                return calls // 2  # being asked takes a part of it
            if calls >= _MOST_BUSY:
                return calls
            calls *= 4

    def _round(self, callers: Sequence[_Caller], busy: int) -> None:
        """Set both callers off once.

        Raises:
            CandidateRejected: As in `call`.
        """
        for caller in callers:
            self._write(caller.draw, caller.places)
        case = callers[0].draw.case
        try:
            with self.budget.spend(case.name):
                keys = [*(caller.keys(busy) for caller in callers), []]
                self.host.execute_together(keys, limit_s=bounded(4 * RUN_LIMIT_S))
        except LaunchFailed as e:
            text = f"when two threads call it at once: {e}. {_ADVICE}"
            raise CandidateRejected(Rejected(self.budget.stage, e.status, text, case.name)) from e
        self.host.stop()
        for caller in callers:
            for found in caller.different():
                self._refuse_wrong(found, caller.draw, _TOGETHER, _ADVICE)
