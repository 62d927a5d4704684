"""Check of a candidate: four runs of every check case on three draws, against the reference."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from kagent_sandbox.data.build_case import build_case
from kagent_sandbox.data.plan import Launch, PlanError
from kagent_sandbox.data.verdict import CaseError, Rejected, Stage, Status
from kagent_sandbox.device.plan_ops import dtype_of
from kagent_sandbox.judge.arena.layout import lay_out_many
from kagent_sandbox.judge.arena.placement import PlanPlacement, bit_view
from kagent_sandbox.judge.arena.session import CandidateRejected
from kagent_sandbox.judge.check import numerics
from kagent_sandbox.judge.check.inputs import NotAcceptable
from kagent_sandbox.judge.check.spot_reading import differing, element_errors, worst_by_draw

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from kagent_sandbox.data.build import Built
    from kagent_sandbox.data.case import Case
    from kagent_sandbox.data.plan import Plan
    from kagent_sandbox.data.task import Task
    from kagent_sandbox.device.interface import Arena
    from kagent_sandbox.judge.arena.session import LauncherSession
    from kagent_sandbox.judge.check.inputs import InputSampler, InputSet
    from kagent_sandbox.judge.check.spot_reading import SpotReading
    from kagent_sandbox.judge.check.time_budget import TimeBudget


def check_results(task: Task, built: Built, cases: Sequence[Case]) -> None:
    """Compare the shapes and dtypes that plans return with the task's, before anything runs.

    Args:
        task: The task.
        built: The candidate's plans.
        cases: The cases to compare.

    Raises:
        CandidateRejected: A plan returns something else.
        KeyError: The declared configuration was not built for a case.
    """
    by_name = {c.name: c for c in cases}
    for case in cases:
        if (0, case.name) not in built.plans:
            raise KeyError(f"not built for case {case.name}")
    for (_, name), plan in built.plans.items():
        if name not in by_name:
            continue
        case = by_name[name]
        results = build_case(task, case).compared
        got = [list(t.shape) for t in plan.outputs]
        if got != [list(r.shape) for r in results]:
            want = ", ".join(f"{r.name} {list(r.shape)}" for r in results)
            raise _out(Status.INCORRECT_SHAPE, f"returns shapes {got}, expected {want}", case)
        dtypes = [t.dtype for t in plan.outputs]
        if dtypes != [r.dtype for r in results]:
            want = ", ".join(f"{r.name} {r.dtype}" for r in results)
            raise _out(Status.INCORRECT_DTYPE, f"returns {dtypes}, expected {want}", case)


def place_plan(
    task: Task,
    case: Case,
    plan: Plan,
    arena: Arena,
    *,
    count: int,
    pitch: int | None = None,
    prefix: str = "",
    owner: str = "",
    beyond: int = 0,
) -> list[PlanPlacement]:
    """Place a case's plan several times, from the start of the arena on.

    Args:
        task: The task.
        case: The case.
        plan: The candidate's plan for it.
        arena: Memory for the placements.
        count: Number of placements.
        pitch: Bytes from one placement to the next; by default they touch.
        prefix: Makes the launcher's keys unique.
        owner: Name of the contender that may have a launcher of its own.
        beyond: See `lay_out_many`.

    Raises:
        CandidateRejected: The plan's inputs are not the case's.
    """
    layouts = lay_out_many(plan, count, pitch, beyond=beyond)
    inputs = build_case(task, case).tensors
    try:
        return [
            PlanPlacement(
                f"{prefix}/{case.name}/{i}", plan, layout, arena, inputs, task.mutates, owner
            )
            for i, layout in enumerate(layouts)
        ]
    except PlanError as e:
        raise _out(Status.TAMPER, str(e), case) from e


@dataclass(frozen=True)
class Checker:
    """Compares what a session's plans compute with the reference.

    `beyond` is how far beyond its own alignment the judge places memory that is aligned as torch's
    is, and no better.
    """

    task: Task
    sampler: InputSampler
    beyond: int = 0

    def check(
        self,
        session: LauncherSession,
        built: Built,
        case: Case,
        input_sets: Sequence[InputSet],
        *,
        config: int = 0,
        budget: TimeBudget | None = None,
    ) -> list[CaseError]:
        """Run one case: on the first draw in two places, then on the others where it ran last.

        Memory of the second place is aligned no better than torch's own. The third run has new data
        at the same addresses, right after the run before it; those after it the data of the run
        before but for one element.

        Args:
            session: The candidate's stay on the device.
            built: The candidate's plans.
            case: The case.
            input_sets: Two draws of the case, and the second one altered; or one for a single run,
                for further configurations of a checked candidate. They are released.
            config: Index of the configuration.
            budget: Seconds for the executions of all cases; None: each has its own limit only.

        Returns:
            The error of each result.

        Raises:
            CandidateRejected: A wrong result, two different ones, or tampering.
        """
        plan = built.plans[config, case.name]
        placements = place_plan(
            self.task,
            case,
            plan,
            session.arena,
            count=min(2, len(input_sets)),
            prefix=f"c{config}",
            beyond=self.beyond,
        )
        session.prepare(placements, case.name)
        first, *others = input_sets
        again = placements[1] if others else None
        errors = self._run(session, placements[0], first, again, budget)
        self.sampler.release(first)
        for other in others:
            found = self._run(session, placements[-1], other, None, budget)
            self.sampler.release(other)
            errors = [
                max(pair, key=lambda e: e.share_of_tolerance)
                for pair in zip(errors, found, strict=True)
            ]
        return errors

    def _run(
        self,
        session: LauncherSession,
        placement: PlanPlacement,
        input_set: InputSet,
        again: PlanPlacement | None,
        budget: TimeBudget | None,
    ) -> list[CaseError]:
        """One run on a draw, and with `again` a second one on the same inputs in another place."""
        name = input_set.case.name
        with session.paused():
            stale = self.sampler.stale(input_set.case)
            placement.write(input_set.tensors, stale)
            if again is not None:
                again.write(input_set.tensors, stale)
        with _spend(budget, name):
            session.run(placement, name)
        with session.paused():
            self.reject_tampering(placement, input_set.case, Stage.CHECK)
            first = (
                [t.clone() for t in placement.outputs()]
                if again is not None
                else placement.outputs()
            )
            errors = [] if again is not None else self.compare(first, input_set, Stage.CHECK)
        if again is None:
            return errors
        with _spend(budget, name):
            session.run(again, name)
        with session.paused():
            self.reject_tampering(again, input_set.case, Stage.CHECK)
            self._compare_runs(first, again.outputs(), input_set)
        return self.compare(first, input_set, Stage.CHECK)

    def compare(
        self,
        outputs: Sequence[torch.Tensor],
        input_set: InputSet,
        stage: Stage,
        *,
        typical: bool = False,
        slack: float = 1.0,
    ) -> list[CaseError]:
        """Compare all results of one run with the reference.

        Args:
            outputs: The results, in their own dtypes.
            input_set: The inputs of the run.
            stage: Stage of a rejection.
            typical: Whether torch's errors on one draw are enough where they do not decide.
            slack: Factor on the task's tolerance.

        Returns:
            The error of each result.

        Raises:
            CandidateRejected: One is not within its tolerance.
        """
        errors: list[CaseError] = []
        outputs, expected = self.sampler.valid_parts(
            input_set,
            self._accepted(input_set, outputs, stage),
            self.sampler.expected(input_set),
        )
        yardsticks = self.sampler.usual_errors(input_set, typical=typical)
        for i, (result, out, ref, yardstick) in enumerate(
            zip(self.task.compared, outputs, expected, yardsticks, strict=True)
        ):
            found = numerics.measure_errors(out, ref, result.row_dims, effective=False)
            name, dtype = input_set.case.name, out.dtype
            error = numerics.case_error(name, result, found, yardstick, dtype)
            most = numerics.share(found, numerics.most_allowed(result, dtype))
            if not error.share_of_tolerance <= slack and most <= slack:
                # Torch may err more on this draw. It is asked only where that decides: eager and
                # its comparison cost as much as the candidate's.
                yardstick = self.sampler.torch_errors(input_set)[i]
                error = numerics.case_error(name, result, found, yardstick, dtype)
            if not error.share_of_tolerance <= slack:
                limit = numerics.allowed(yardstick, result, dtype)
                text = numerics.describe(
                    error, limit, numerics.find_worst(out, ref), result, self.task.tolerance_from
                )
                if input_set.is_altered:
                    text += (
                        "; the run before had the same inputs in the same place but for one "
                        "element: results must not be kept from call to call"
                    )
                raise _out(Status.INCORRECT_NUMERICAL, text, input_set.case, stage)
            errors.append(error)
        return errors

    def _accepted(
        self, input_set: InputSet, outputs: Sequence[torch.Tensor], stage: Stage
    ) -> list[torch.Tensor]:
        """See `InputSampler.accepted`.

        Raises:
            CandidateRejected: The task's rule fails on these results.
        """
        try:
            return self.sampler.accepted(input_set, outputs)[0]
        except NotAcceptable as e:
            text = f"the results are not the reference's, and the task cannot accept them: {e}"
            raise _out(Status.INCORRECT_NUMERICAL, text, input_set.case, stage) from None

    def accept_spot_checks(
        self,
        reading: SpotReading,
        placements: Sequence[PlanPlacement],
        input_sets: Sequence[InputSet],
    ) -> None:
        """Ask the task's rule about what was read of one sample and is not the reference's.

        The rule sees whole results, as they lie there after the sample. It speaks for a place only
        if the value that was read in time is still there: no result is accepted that came late.
        """
        for number in reading.unequal():
            outputs = [t.clone() for t in placements[number].outputs()]
            input_set = input_sets[number]
            kept = input_set.known_results
            with contextlib.suppress(NotAcceptable):  # then its places count as they are
                _, masks = self.sampler.accepted(input_set, outputs)
                reading.accept(number, outputs, masks)
            input_set.known_results = kept  # whole results in float64, of every draw

    def compare_spot_checks(self, readings: Sequence[SpotReading], case: Case) -> None:
        """Hold what was read of timed executions against the reference.

        Raises:
            CandidateRejected: An element errs by more than its result may. The message does not
                name the element, since its draw will be used again.
        """
        dtypes = [dtype_of(spec.dtype) for spec in build_case(self.task, case).compared]
        yardsticks = self.sampler.typical_errors(case)
        limits = [
            numerics.allowed(yardstick, result, dtype).element
            for yardstick, result, dtype in zip(yardsticks, self.task.compared, dtypes, strict=True)
        ]
        found = element_errors(readings)
        if self.sampler.spots_are_torchs:
            # Torch errs, too: what differs from it by the rest is within the reference's limit.
            rest = [
                max(0.0, limit - yardstick.element)
                for limit, yardstick in zip(limits, yardsticks, strict=True)
            ]
            if doubted := differing(readings, found, rest):
                for reading, number in doubted:
                    draw, places = reading.draws[number], reading.places(number)
                    reading.hold_against(number, self.sampler.exact_spot_checks(draw, places))
                found = element_errors(readings)
        for i, (result, dtype, errors, limit) in enumerate(
            zip(self.task.compared, dtypes, found, limits, strict=True)
        ):
            if not errors.numel() or float(errors.amax()) <= limit:
                continue
            most = numerics.most_allowed(result, dtype).element
            for worst, input_set in worst_by_draw(readings, i, errors):
                if worst <= limit:
                    break
                limit_there = limit
                if worst <= most:  # as in `compare`, where torch's error on the draw decides
                    own = self.sampler.errors_there(input_set)[i]
                    limit_there = numerics.allowed(own, result, dtype).element
                    if worst <= limit_there:
                        continue
                text = (
                    f"result {result.name} is wrong where it was timed: an element errs by "
                    f"{worst:.3g} of its magnitude, allowed {limit_there:.3g} "
                    f"({numerics.tolerance_text(result, self.task.tolerance_from)}). "
                    "Every timed execution has "
                    "inputs of its own, and secret elements of its results are compared"
                )
                raise _out(Status.INCORRECT_NUMERICAL, text, case, Stage.MEASURE)

    def reject_decoys(self, session: LauncherSession, built: Built, cases: Sequence[Case]) -> None:
        """Run the ghost test, where plans do more than launch kernels: copies and fills may be all
        of an operation, too.

        Without its launches a plan must no longer give the right result, on at least one case. The
        test does not find a kernel that does little beside the rest, or one that does nothing
        beside other kernels.

        Raises:
            CandidateRejected: No kernel has a part in any result.
        """
        for case in cases:
            plan = built.plans[0, case.name]
            if not plan.works_beside_launches:
                return
            rest = tuple(op for op in plan.ops if not isinstance(op, Launch))
            ghost = replace(plan, ops=rest, kernels=())
            (placement,) = place_plan(
                self.task, case, ghost, session.arena, count=1, prefix="ghost"
            )
            session.prepare([placement], case.name)
            input_set = self.sampler.draw(case)
            with session.paused():
                placement.write(input_set.tensors, self.sampler.stale(case))
            session.run(placement, case.name)
            session.forget([placement])
            with session.paused():
                try:
                    self.compare(placement.outputs(), input_set, Stage.CHECK)
                except CandidateRejected:
                    return
            self.sampler.release(input_set)
        text = (
            "the results are right without any launch: no kernel has a part in them. Copies, fills "
            "and operations of torch may be part of a candidate, not all of it"
        )
        raise _out(Status.POLICY, text, cases[0])

    def reject_tampering(self, placement: PlanPlacement, case: Case, stage: Stage) -> None:
        """Make sure that a placement's guard bands and inputs are as they were written.

        Args:
            placement: The placement, after a run.
            case: The case of a rejection.
            stage: The stage of a rejection.

        Raises:
            CandidateRejected: They are not.
        """
        tampering = placement.tampering()
        if tampering is not None:
            raise _out(Status.TAMPER, tampering, case, stage)

    def _compare_runs(
        self, first: Sequence[torch.Tensor], second: Sequence[torch.Tensor], input_set: InputSet
    ) -> None:
        """Refuse results that differ between two runs by more than rounding explains."""
        first, second = self.sampler.valid_parts(
            input_set,
            self._accepted(input_set, first, Stage.CHECK),
            self._accepted(input_set, second, Stage.CHECK),
        )
        for i, (result, one, two) in enumerate(zip(self.task.compared, first, second, strict=True)):
            if torch.equal(bit_view(one), bit_view(two)):
                continue
            yardstick = self.sampler.torch_errors(input_set)[i]
            limit = numerics.allowed(yardstick, result, one.dtype)
            difference = numerics.measure_errors(
                two, one.double(), result.row_dims, effective=False
            )
            # Each may err by all that is allowed, in opposite directions.
            if numerics.share(difference, limit) > 2:
                worst = numerics.find_worst(two, one.double())
                index = ", ".join(str(n) for n in worst.index)
                text = (
                    f"result {result.name} differs between two runs on the same inputs: element "
                    f"[{index}] is {worst.expected:.6g}, then {worst.got:.6g} "
                    "(a race, memory that was not written, or a result at an address that only "
                    "torch's own alignment holds for?)"
                )
                raise _out(Status.NONDETERMINISTIC, text, input_set.case)


def _spend(budget: TimeBudget | None, case: str) -> AbstractContextManager[None]:
    return contextlib.nullcontext() if budget is None else budget.spend(case)


def _out(status: Status, text: str, case: Case, stage: Stage = Stage.CHECK) -> CandidateRejected:
    return CandidateRejected(Rejected(stage, status, text, case.name))
