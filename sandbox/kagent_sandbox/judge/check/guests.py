"""Check that native code leaves the process that calls it as it found it.

A winner is a library in somebody's process. It may change its results and nothing else: not the
rounding of floating point or the treatment of subnormal numbers, and not signals, threads, open
files or OpenMP's settings. It may not write its inputs, not even to put them back, and a call may
keep no memory. Every check case runs once more in a launcher of its own: first with its inputs in
pages that cannot be written, then many times in a row. So do the timed plans of who may be
promoted, since host code and kernels choose by shape. Other threads then call the plan, two of them
at once (`two_callers`). At last these threads end and the libraries are unloaded, so that
destructors run while somebody looks. A library stays loaded where the first thread still has an
object of its own with a destructor, a `thread_local`: its other destructors run at the very end.
"""

from __future__ import annotations

import dataclasses
import mmap
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from kagent_sandbox.data.build_case import build_case
from kagent_sandbox.data.plan import Launch, Plan, PlanError
from kagent_sandbox.data.verdict import Rejected, Status
from kagent_sandbox.device.interface import LaunchFailed
from kagent_sandbox.device.process_snapshot import ProcessSnapshot, differences
from kagent_sandbox.device.time_limits import bounded
from kagent_sandbox.judge.arena.layout import lay_out
from kagent_sandbox.judge.arena.placement import PlanPlacement
from kagent_sandbox.judge.arena.session import RUN_LIMIT_S, Arenas, CandidateRejected
from kagent_sandbox.judge.check.two_callers import CALLERS, TwoCallers, places_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kagent_sandbox.data.build import Built, Contender
    from kagent_sandbox.data.case import Case
    from kagent_sandbox.data.task import Task
    from kagent_sandbox.device.interface import Arena, Backend, GuestHost
    from kagent_sandbox.judge.arena.layout import Layout
    from kagent_sandbox.judge.check.inputs import InputSampler
    from kagent_sandbox.judge.check.time_budget import TimeBudget

REPEAT_S = 0.005
"""Seconds for which runs of a case are repeated from one look at its memory to the next."""
_FEW_RUNS, _FEW_S = 64, 0.05
"""Least runs, and the time that they may take. On a busy host few runs may take `REPEAT_S`, and
show little.
"""
_MOST_RUNS = 1024  # between two looks
_OWN_BYTES = 1 << 20
"""Memory that the launcher itself may have asked for meanwhile: Python's, for plans."""
_LOOKS = 12
"""Calls keep memory if it grew between all of these but one, which the process's own work may have
hidden. Mostly the second look is the last one: whatever is allocated once is so by then.
"""


def refuse_bad_guests(
    task: Task,
    backend: Backend,
    arenas: Arenas,
    sampler: InputSampler,
    contender: Contender,
    cases: Sequence[Case],
    budget: TimeBudget,
) -> dict[str, int]:
    """Run a candidate's native code, which is known to compute what it should, as a guest.

    There is nothing to do on devices that have none.

    Args:
        task: The task.
        backend: The device.
        arenas: Source of the memory; a launcher that has mapped it must not be used afterwards.
        sampler: Source of the inputs.
        contender: The candidate, and its configuration for each case.
        cases: The cases whose plans are run.
        budget: Seconds that its executions may take, and the stage of a rejection.

    Returns:
        By case, the bytes that native code has taken itself and kept from one call to the next.
        What it frees before it returns is not known.

    Raises:
        CandidateRejected: It changes its host or an input, keeps memory, takes too long, or is
            wrong or failing when other threads call it.
    """
    plans = {c.name: contender.plan(c.name) for c in cases}
    native = {name for name, plan in plans.items() if _is_native(plan)}
    if not backend.traits.native or not native:
        return {}
    layouts = {name: _in_pages(plan) for name, plan in plans.items()}
    visited_bytes = max(layout.stop for layout in layouts.values())
    arena = arenas.at_least(max(visited_bytes, *(places_bytes(plans[name]) for name in native)))
    # as `Backend.launcher` says
    host = cast("GuestHost", backend.launcher(arena, timed=False, callers=CALLERS))
    try:
        visit = _Visit(task, host, arena, budget)
        try:
            visit.begin(contender.built)
            for case in cases:
                if case.name in native:
                    visit.case(case, plans[case.name], layouts[case.name], sampler)
            visit.end()
        except LaunchFailed as e:
            raise CandidateRejected(Rejected(budget.stage, e.status, str(e), visit.at)) from e
        except PlanError as e:
            raise CandidateRejected(Rejected(budget.stage, Status.TAMPER, str(e), visit.at)) from e
        return visit.own_bytes
    finally:
        host.close()


@dataclass
class _Visit:
    """One candidate's code in one launcher."""

    task: Task
    host: GuestHost
    arena: Arena
    budget: TimeBudget
    at: str | None = None
    """The case that runs."""
    _before: ProcessSnapshot | None = None
    _asked_bytes: int = 0
    own_bytes: dict[str, int] = field(default_factory=dict)
    """Memory that the code has taken itself, by case."""
    _others_bytes: int = 0
    """Part of what the process has asked for that is not one caller's."""

    def begin(self, built: Built) -> None:
        """Look at the host before any of the candidate's code is loaded."""
        self.host.load(built.binaries)
        self.host.remember()
        self._before = self._look()
        self._others_bytes = self.host.asked_bytes()

    def case(self, case: Case, plan: Plan, layout: Layout, sampler: InputSampler) -> None:
        """Load what a case needs, run it on inputs that cannot be written, then repeatedly."""
        self.at = case.name
        placement = self._place(case, plan, layout)
        self.host.prepare(placement.key, plan, layout.offsets)
        self._refuse_changes("loading its library")
        self.host.stop()
        placement.write(sampler.draw(case).tensors, sampler.stale(case))
        lent = {
            b.name: _pages(layout.offsets[b.id], b.nbytes)
            for b in plan.buffers
            if b.kind == "input" and b.nbytes and b.name not in self.task.mutates
        }
        self.host.lend(list(lent.values()))
        try:
            with self.budget.spend(case.name):
                self.host.run(placement.key, limit_s=bounded(RUN_LIMIT_S))
        except LaunchFailed as e:
            if "SIGSEGV" not in str(e):
                raise
            names = " or ".join(str(name) for name in lent) or "an input"
            text = (
                f"writes to an argument that it may only read ({names}), if only to put it back: "
                "with the inputs in read-only memory it died of SIGSEGV. Others may read them "
                "meanwhile; use memory of your own"
            )
            raise self._out(Status.TAMPER, text) from e
        self.host.lend([])
        self._refuse_changes("a call")
        self._refuse_leaks(placement.key)
        self._refuse_changes("a call")
        self.host.forget(placement.key)
        self.host.stop()
        own_bytes = self.host.asked_bytes() - self._others_bytes
        self.own_bytes[case.name] = own_bytes if own_bytes > _OWN_BYTES else 0
        TwoCallers(self.task, sampler, self.host, self.arena, self.budget).call(case, plan)
        self.host.stop()
        self._others_bytes = self.host.asked_bytes() - own_bytes

    def end(self) -> None:
        """Have all callers but the first end and the libraries unloaded, as when a program ends."""
        try:
            self.host.unload()
        except LaunchFailed as e:
            text = (
                "when a thread that called it ends and its library is unloaded, as at the end of "
                f"its caller: {e}. A destructor does it, of the library, or of a static object or "
                "one of the thread"
            )
            raise self._out(e.status, text) from e
        self._refuse_changes("unloading its library", ended=True)

    def _place(self, case: Case, plan: Plan, layout: Layout) -> PlanPlacement:
        specs, mutates = build_case(self.task, case).tensors, self.task.mutates
        return PlanPlacement(f"guest/{case.name}", plan, layout, self.arena, specs, mutates)

    def _look(self) -> ProcessSnapshot:
        self.host.stop()
        return self.host.seen()

    def _refuse_changes(self, by: str, *, ended: bool = False) -> None:
        """Make sure that the host is as it was; threads may have `ended`.

        Raises:
            CandidateRejected: It is not.
        """
        assert self._before is not None, "begin first"
        after = self._look()
        before = self._before
        if ended:
            left = {n: s for n, s in before.threads.items() if n in after.threads}
            before = dataclasses.replace(before, threads=left)
        found = differences(before, after)
        if said := self.host.changes():
            found.append(said)
        if found:
            text = (
                f"{by} leaves the calling process changed: {'; '.join(found)}. Restore it before "
                "returning, or leave it alone: a library is a guest in its caller's process"
            )
            raise self._out(Status.POLICY, text)

    def _refuse_leaks(self, key: str) -> None:
        """Make sure that the process's memory stops growing while a plan is repeated.

        Raises:
            CandidateRejected: It goes on growing.
        """
        limit_s = bounded(RUN_LIMIT_S)
        count, looks, kept, steady = 4, 0, 0, 0
        self._grown()
        while looks < _LOOKS:
            began = time.perf_counter()
            with self.budget.spend(self.at):
                self.host.repeat(key, count, limit_s=limit_s)
            took_s = time.perf_counter() - began
            more = self._grown()
            enough_s = REPEAT_S / 2 if count >= _FEW_RUNS else _FEW_S
            if looks == 0 and took_s < enough_s and count < _MOST_RUNS:
                count *= 2 if took_s > enough_s / 4 else 4  # too few to show anything
                continue
            limit_s = max(limit_s, bounded(RUN_LIMIT_S) + 10 * took_s)
            looks += 1
            kept += more
            steady += not more
            if steady > 1:
                return
        calls = _LOOKS * count
        text = (
            f"calls keep memory: {calls} of them {kept / 1024:,.0f} KiB, and it grew from "
            "one look to the next. Free what a call allocates, and take workspaces as tensors that "
            "the host function makes with torch.empty: a static buffer is shared by all callers"
        )
        raise self._out(Status.POLICY, text)

    def _grown(self) -> int:
        """Bytes by which the process's memory has grown since this was asked last, or 0."""
        self.host.stop()
        asked = self.host.asked_bytes()
        more, self._asked_bytes = asked - self._asked_bytes, asked
        return max(0, more, self.host.more_bytes())

    def _out(self, status: Status, text: str) -> CandidateRejected:
        return CandidateRejected(Rejected(self.budget.stage, status, text, self.at))


def _is_native(plan: Plan) -> bool:
    return any(isinstance(op, Launch) for op in plan.ops)


def _in_pages(plan: Plan) -> Layout:
    """Every buffer begins a page of its own, and none begins where another ends."""
    return lay_out(plan, align=mmap.PAGESIZE, guard=mmap.PAGESIZE)


def _pages(start: int, nbytes: int) -> tuple[int, int]:
    """The pages of a buffer that begins one."""
    return start, start + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
