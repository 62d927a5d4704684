"""Checks a task: `python -m kagent_sandbox.judge.check.task_checker`.

Trusted code: torch and the task's reference.py. It reads one JSON request from standard input and
writes one JSON object: {"ok": a `TaskCheck` for each kind of device} or one line of why not:
{"error": a fault of the task}, {"full": memory was not enough} or {"failed": torch's error about
the device}.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kagent_sandbox.builder.policy import base_name
from kagent_sandbox.builder.trace.dynamo import call_wrapped_functions_directly
from kagent_sandbox.data.build_case import build_case
from kagent_sandbox.data.records import from_json, to_json
from kagent_sandbox.data.task import load_task
from kagent_sandbox.device import device_memory
from kagent_sandbox.device.plan_ops import dtype_of
from kagent_sandbox.device.traits import InputPolicy
from kagent_sandbox.errors import DeviceFull, TaskError
from kagent_sandbox.judge.check import numerics
from kagent_sandbox.judge.check.altered_inputs import unread_arguments
from kagent_sandbox.judge.check.corners import check_corners
from kagent_sandbox.judge.check.flop_counts import product_counter
from kagent_sandbox.judge.check.inputs import YARDSTICKS, InputSampler
from kagent_sandbox.judge.check.omissions import OmissionRecorder
from kagent_sandbox.judge.check.shape_gaps import find_gaps
from kagent_sandbox.judge.check.task_cases import (
    MOST_WORK,
    checked_cases,
    elements_of,
    sizes_of,
    timed_cases,
    toml_error,
    work_of,
)
from kagent_sandbox.judge.check.tf32 import may_use_tf32
from kagent_sandbox.judge.check.wrong_results import (
    SAME,
    Wrong,
    can_change,
    changes_of,
    check_idle,
    find_holes,
    is_declared,
    same_bits,
)
from kagent_sandbox.judge.task_check import TaskCheck
from kagent_sandbox.process.exit import exit_fast
from kagent_sandbox.process.parent import end_with_parent

if TYPE_CHECKING:
    from kagent_sandbox.data.arguments import ResultSpec
    from kagent_sandbox.data.case import Case
    from kagent_sandbox.data.kind import Kind
    from kagent_sandbox.data.task import Task
    from kagent_sandbox.judge.check.inputs import InputSet

NONFINITE_DRAWS = 8
"""Draws of a case of infinities and NaN, each of which must have some."""
MOST_EAGER_EPS = 1024.0
"""Most machine epsilons that `eager` may err by, of the result's dtype, the inputs' or TF32 where a
GPU computes in it, whichever are coarser; and never more than `numerics.MOST_TORCH_ERROR`."""
TF32_EPS = 2.0**-10
"""Epsilon of TF32, to which torch rounds the operands of float32 convolutions on a GPU unless it is
told not to, and those of products where it is told to.
"""
BYTES_SLACK = 1.05
FLOPS_FACTOR = 100.0
"""Largest factor between `flops` and what eager does: it is an estimate, of another algorithm."""


def main() -> None:
    """Serve one request, and end the process."""
    request = json.load(sys.stdin)
    end_with_parent(request["parent"])
    # Output of reference.py must not be taken for the answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer: dict[str, object]
    try:
        task = load_task(Path(request["task"]))
        answer = {"ok": [to_json(_checked(task, kind, request)) for kind in request["known"]]}
    except TaskError as e:
        answer = {"error": str(e)}
    except DeviceFull as e:
        answer = {"full": str(e)}
    except RuntimeError as e:  # a GPU's errors come late, where no function of the task is called
        answer = {"failed": " ".join(f"{type(e).__name__}: {e}".split())}
    answers.write(json.dumps(answer))
    answers.close()
    exit_fast()


def _checked(task: Task, kind: Kind, request: Mapping[str, Any]) -> TaskCheck:
    """Findings of the check that is asked for, for a kind of device.

    Raises:
        TaskError: The task has a fault, or is too large for the device.
        DeviceFull: Its memory is not enough while others hold some of it.
    """
    device, known = torch.device(request["device"]), request["known"][kind]
    try:
        return check(task.calibrated(kind), kind, device, known and from_json(TaskCheck, known))
    except (DeviceFull, RuntimeError) as e:
        if not device_memory.lacks_memory(e):
            raise
        use = device_memory.memory_use(device)
        raise device_memory.explain(e, use, alone=request["alone"]) from None


def check(
    task: Task, kind: Kind, device: torch.device, known: TaskCheck | None = None
) -> TaskCheck:
    """Check a task.

    Args:
        task: The task.
        kind: Whose cases.
        device: Where they are computed. Wrong results are tried on the CPU: an operation that is
            left out may send an index astray, which no CUDA context survives.
        known: Findings about the same task with other declarations of what has no effect. Then
            these are checked alone.

    Raises:
        TaskError: It has a fault.
    """
    began = time.perf_counter()
    call_wrapped_functions_directly()
    found = _check_undeclared(task, kind, device) if known is None else known
    idle = check_idle(task, kind)
    holes = (*found.holes, *found.excused)
    excused = tuple(h for h in holes if is_declared(task, h))
    return replace(
        found,
        holes=tuple(h for h in holes if h not in excused),
        excused=excused,
        without_effect=idle,
        seconds=time.perf_counter() - began,
    )


def _check_undeclared(task: Task, kind: Kind, device: torch.device) -> TaskCheck:
    """Check all of a task but what it declares to have no effect: that is among the holes."""
    _check_allow(task)
    _check_experts(task)
    bench, checked = timed_cases(task, kind), checked_cases(task, kind)
    for case in (*bench, *checked):
        _check_bytes(task, case)
    stands_in = kind == "gpu" and device.type == "cpu"
    most = MOST_WORK if stands_in else math.inf
    sampler = InputSampler(task, device, InputPolicy(pool=YARDSTICKS))
    checker = _CaseChecker(task, sampler, kind)
    computed = [c for c in checked if work_of(task, c) <= most]
    for case in computed:
        checker.check(case)
    check_corners(task, kind, sampler)
    checker.require_finite()
    checker.require_exact_reference()
    checker.check_distributions([c for c in computed if elements_of(task, c) <= MOST_WORK])
    drawn = [
        c for c in bench if elements_of(task, c) <= (MOST_WORK / 8 if stands_in else MOST_WORK)
    ]
    checker.check_draws(drawn, computed)
    checker.check_nonfinite([c for c in computed if c.inputs == "nonfinite"])
    if device.type != "cpu":
        sampler = InputSampler(task, torch.device("cpu"), InputPolicy(pool=YARDSTICKS))
    tried = [c for c in checked if work_of(task, c) <= MOST_WORK]
    wrong, holes = find_holes(task, sampler, tried, checker.shown)
    windows, gaps = find_gaps(task, kind)
    holes += [
        f"task.toml: arguments.{name}: no other values of it show in any check case: a kernel that "
        "does not read it passes"
        for name in unread_arguments(sampler, sorted(tried, key=lambda c: work_of(task, c)))
    ]
    return TaskCheck(
        kind=kind,
        device=device.type,
        cases=len(computed),
        skipped=tuple(c.name for c in checked if c not in computed),
        wrong=wrong + windows,
        holes=(*holes, *gaps),
        eager_eps=checker.eager_eps,
        seconds=0.0,
    )


# -- task.toml -------------------------------------------------------------------------------------


def _check_allow(task: Task) -> None:
    """Make sure that torch has the operations that host code may call."""
    for entry in task.allow:
        bare = entry.split("::")[-1] if "::" in entry else entry.removeprefix("torch.")
        name, _, overload = bare.partition(".")
        schemas = torch._C._jit_get_schemas_for_operator(f"aten::{base_name(name)}")  # noqa: SLF001
        if not schemas:
            raise toml_error(task, "allow", f"torch has no operation {entry!r}: as in aten::mm")
        if overload and overload not in {s.overload_name for s in schemas}:
            known = ", ".join(s.overload_name for s in schemas if s.overload_name)
            raise toml_error(task, "allow", f"{entry!r}: no such overload; there are {known}")


def _check_bytes(task: Task, case: Case) -> None:
    """Hold `bytes` and `written` against the sizes of the tensors."""
    read = sum(n for _, n, is_read, _ in sizes_of(task, case) if is_read)
    written = sum(n for _, n, _, is_written in sizes_of(task, case) if is_written)
    if not read + written:
        return
    # An argument may be read or written in part, and so may a result with `valid`.
    results = sum(n for _, n, is_read, _ in sizes_of(task, case) if not is_read)
    least = 0 if any(r.valid for r in task.results) else results
    if task.min_bytes(case) * BYTES_SLACK < least:
        text = f"{task.bytes!r} is {task.min_bytes(case):g}, and the results alone have {least:g}"
        raise toml_error(task, "bytes", f"case {case.name}: {text}")
    for key, value, most in (
        ("bytes", task.min_bytes(case), read + written),
        ("written", task.min_written(case), min(written, task.min_bytes(case))),
    ):
        if value > BYTES_SLACK * most or (key == "bytes" and value == 0):
            raise toml_error(
                task,
                key,
                f"case {case.name}: {task.bytes if key == 'bytes' else task.written!r} is "
                f"{value:g}, and the tensors allow for {most:g} at most (each input read once, "
                "each result written once): expected the fewest bytes",
            )


# -- reference.py ----------------------------------------------------------------------------------


def _check_experts(task: Task) -> None:
    """Make sure that `experts` gives functions by name."""
    text, reference = "", task.reference()
    try:
        found: object = reference.experts()
    except (Exception, SystemExit) as e:  # noqa: BLE001 - a user's code: one line for whatever it is
        text = f"{type(e).__name__}: {e}; leave out what cannot be imported here"
    else:
        if not isinstance(found, Mapping):
            text = f"returns {type(found).__name__}, expected a dict of functions by name"
        else:
            odd = [(n, f) for n, f in found.items() if not callable(f) or not isinstance(n, str)]
            if odd:
                text = f"{odd[0][0]} is {type(odd[0][1]).__name__}, expected a function by its name"
    if text:
        raise TaskError(" ".join(f"{task.folder / 'reference.py'}: experts: {text}".split()))


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the elements that operations give, and knows whether a GPU computes one in TF32."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0
        self.tf32 = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation, and count its results."""
        self.tf32 = self.tf32 or may_use_tf32(func, args)
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else (out,):
            self.elements += each.numel() if isinstance(each, torch.Tensor) else 0
        return out


@dataclass
class _CaseChecker:
    """Holds the functions of reference.py against what docs/tasks.md promises of them."""

    task: Task
    sampler: InputSampler
    kind: Kind
    eager_eps: float = 0.0
    _overflow: TaskError | None = None
    _finite: bool = False  # eager was, in a case
    _rounds: bool = False  # eager had an error, in a case
    _rounded: TaskError | None = None  # a reference that had one, too
    _fixed: dict[str, bool] = field(default_factory=dict)  # by case: inputs know no seed
    shown: dict[str, list[Wrong]] = field(default_factory=dict)
    """By case: wrong results that it can show. Of cases on a CPU alone, where these are tried."""

    def check(self, case: Case) -> None:
        """Compute a case twice.

        Raises:
            TaskError: Something is wrong with it.
        """
        input_set = self.sampler.fresh(case, 1)
        self._check_seeds(input_set)
        before = {n: t.clone() for n, t in input_set.tensors.items()}
        results = self._call("reference", input_set, before)
        input_set.known_results = results
        self._check_again(input_set, before)
        (expected,) = self.sampler.valid_parts(input_set, results)
        with product_counter() as products, _Operations() as operations:
            outputs = self._call("eager", input_set, before)
        before.clear()  # what is not needed is freed: a case may fill the device
        accepted, _ = self.sampler.accepted(input_set, outputs)
        (found,) = self.sampler.valid_parts(input_set, accepted)
        for result, out, ref in zip(self.task.compared, found, expected, strict=True):
            self._check_eager(case, result, out, ref, tf32=operations.tf32)
        del outputs, accepted, found, out
        if not (self._rounds or self._rounded):
            self._note_rounding(input_set, results)
        self._check_flops(case, products.get_total_flops(), operations.elements)

    def require_finite(self) -> None:
        """Make sure that `eager` was finite in one case at least.

        Raises:
            TaskError: It was not.
        """
        if self._overflow is not None and not self._finite:
            raise self._overflow

    def require_exact_reference(self) -> None:
        """Make sure that `reference` does not round as `eager` does, in a dtype of less than its
        own: kernels that round otherwise would seem wrong.

        Raises:
            TaskError: It does. Eager had no error at all, and the reference gave another result of
                the same inputs in float64.
        """
        if self._rounded is not None and not self._rounds:
            raise self._rounded

    def _note_rounding(self, input_set: InputSet, results: Sequence[torch.Tensor]) -> None:
        wide = {
            n: t.double() if t.is_floating_point() and t.dtype.itemsize > 1 else t
            for n, t in input_set.tensors.items()
        }
        same = replace(input_set, tensors=wide, known_results=None)
        try:
            exact = self.sampler.call("reference", same)
        except TaskError:  # it does not take float64: nothing is known
            return
        for result, one, two in zip(self.task.compared, results, exact, strict=True):
            if not (one.is_floating_point() and two.is_floating_point()):
                continue
            errors = numerics.measure_errors(one, two, result.row_dims)
            if max(errors.row, errors.element) > SAME.get(one.dtype, math.inf):
                text = f"result {result.name} is rounded as eager's: convert the inputs first"
                self._rounded = self._error("reference", input_set.case, text)

    def check_distributions(self, cases: Sequence[Case]) -> None:
        """Make sure that `inputs` heeds each case's distribution and scale, in one case at least.

        Raises:
            TaskError: It does not: the case tests less than it says.
        """
        kinds = dict.fromkeys(c.inputs for c in cases)
        scaled = [c for c in cases if c.scale not in (0.0, 1.0)]
        if scaled and not any(self._differs(c, "scale", 1.0) for c in scaled):
            text = f"scale = {scaled[0].scale:g} changes nothing: multiply by case.scale"
            raise self._error("inputs", scaled[0], text)
        for kind in kinds:
            own = [c for c in cases if c.inputs == kind]
            for other in kinds:
                if kind == other or any(self._differs(c, "inputs", other) for c in own):
                    continue
                text = f"{kind!r} gives the same as {other!r}: look at case.inputs"
                raise self._error("inputs", own[0], text)

    def _differs(self, case: Case, field: str, value: object) -> bool:
        """Whether a case's tensors are others with another value of a field."""
        one = self.sampler.fresh(case, 1).tensors
        try:
            two = self.sampler.fresh(case.model_copy(update={field: value}), 1).tensors
        except TaskError:
            return True
        return any(not same_bits(tensor, two[name]) for name, tensor in one.items())

    def check_draws(self, bench: Iterable[Case], checked: Iterable[Case]) -> None:
        """Make sure that inputs depend on the generator: in all benchmark cases, whose executions
        all have inputs of their own, and in one check case at least.

        Raises:
            TaskError: They do not.
        """
        for case in bench:
            self._check_seeds(self.sampler.fresh(case, 1))
            if self._fixed[case.name]:
                raise self._error("inputs", case, "all seeds give the same: use the generator")
        fixed = [self._fixed[c.name] for c in checked]
        if fixed and all(fixed):
            case = next(iter(checked))
            raise self._error("inputs", case, "all seeds give the same: use the generator")

    def check_nonfinite(self, cases: Iterable[Case]) -> None:
        """Make sure that inputs of the distribution `nonfinite` have infinities or NaN in every
        draw: by chance alone they would have none in some checks, which then see nothing of them.

        Raises:
            TaskError: They have none in one of some draws.
        """
        for case in cases:
            for seed in range(NONFINITE_DRAWS):
                tensors = self.sampler.fresh(case, seed).tensors.values()
                if not any(map(_has_nonfinite, tensors)):
                    text = "'nonfinite' has no infinity and no NaN in some draws: plant one always"
                    raise self._error("inputs", case, text)

    def _check_seeds(self, input_set: InputSet) -> None:
        case = input_set.case
        for name in self._changed_by(input_set, 1):
            text = f"{name} differs between two generators of one seed: draw it all from them"
            raise self._error("inputs", case, text)
        self._fixed[case.name] = not any(self._changed_by(input_set, seed) for seed in (2, 3, 4))

    def _changed_by(self, input_set: InputSet, seed: int) -> list[str]:
        """Names of the inputs that are others with a seed. One draw is held beside these."""
        other = self.sampler.fresh(input_set.case, seed).tensors
        return [n for n, tensor in input_set.tensors.items() if not same_bits(tensor, other[n])]

    def _call(
        self, which: str, input_set: InputSet, before: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Results of a function, which must leave its inputs as they were."""
        results = self.sampler.call(which, input_set)
        for name, tensor in input_set.tensors.items():
            if not same_bits(tensor, before[name]):
                text = f"overwrites its input {name}: work on a copy"
                raise self._error(which, input_set.case, text)
        return results

    def _check_again(self, input_set: InputSet, before: Mapping[str, torch.Tensor]) -> None:
        """Compute the reference once more; on a CPU with a look at its operations, which torch may
        then compute in another way. So it is computed plainly where that is another result.
        """
        case, results = input_set.case, self.sampler.expected(input_set)
        if self.sampler.device.type == "cpu":
            with OmissionRecorder(self.task.folder / "reference.py", keep=False) as recorder:
                again = self._call("reference", input_set, before)
            try:
                self._check_reference(input_set, again)
            except TaskError:
                pass
            else:
                changes = [
                    wrong
                    for i, wrong in changes_of(self.task, case)
                    if can_change(results[i], wrong[1], self.task.compared[i].row_dims)
                ]
                self.shown[case.name] = [*changes, *recorder.found]
                return
        self._check_reference(input_set, self._call("reference", input_set, before))

    def _check_reference(self, input_set: InputSet, again: Sequence[torch.Tensor]) -> None:
        """Hold results against those of another call, and against what task.toml declares."""
        case = input_set.case
        parts = self.sampler.valid_parts(input_set, self.sampler.expected(input_set), again)
        for result, one, two in zip(self.task.compared, *parts, strict=True):
            declared = dtype_of(self.task.dtype(result.dtype, case))
            if declared.is_floating_point:
                wide = declared.itemsize >= 4
                fine = (torch.float64,) if wide else (torch.float64, torch.float32)
                if one.dtype not in fine:
                    names = " or ".join(map(str, fine))
                    text = f"result {result.name} is {one.dtype}, expected {names}"
                    raise self._error("reference", case, text)
                errors = numerics.measure_errors(two, one, result.row_dims)
                same = max(errors.row, errors.element) <= SAME[one.dtype]
            else:
                same = bool(torch.equal(one, two))
            if not same:
                text = f"result {result.name} differs between two calls with the same inputs"
                raise self._error("reference", case, text)

    def _check_eager(
        self, case: Case, result: ResultSpec, out: torch.Tensor, ref: torch.Tensor, *, tf32: bool
    ) -> None:
        declared = dtype_of(self.task.dtype(result.dtype, case))
        if out.dtype != declared:
            text = f"result {result.name} is {out.dtype}, task.toml says {declared}"
            raise self._error("eager", case, text)
        if not out.dtype.is_floating_point:
            if numerics.measure_errors(out, ref, result.row_dims).row:
                text = f"result {result.name} differs from the reference's: one of the two is wrong"
                raise self._error("eager", case, text)
            return
        dtypes = (declared, *self._input_dtypes(case))
        finite = _finite(out)
        if bool((finite & ~torch.isfinite(ref)).any()):
            text = f"result {result.name} is not finite where eager is"
            raise self._error("reference", case, text)
        errors = numerics.measure_errors(out, ref, row_dims=0)  # rows of tails may be far off
        if not math.isfinite(errors.row):
            text = f"result {result.name} is not finite where the reference is"
            self._overflow = self._error("eager", case, text)
            # float16 may overflow on the way: no yardstick in that case (numerics), and no fault.
            nan = bool((out.isnan() & torch.isfinite(ref)).any())
            if nan or torch.float16 not in dtypes:
                raise self._overflow
            return
        self._finite = True
        self._rounds |= errors.row > 0
        eps = max(map(numerics.epsilon, dtypes))
        if tf32 and self.kind == "gpu":
            eps = max(eps, TF32_EPS)
        most = min(MOST_EAGER_EPS * eps, numerics.MOST_TORCH_ERROR)
        if errors.row > most:
            raise self._error(
                "eager",
                case,
                f"result {result.name} differs from the reference by {errors.row:.3g} of its "
                f"norm, {errors.row / eps:.0f} machine epsilons, expected {most / eps:.0f} at "
                "most: it is the yardstick of kernels",
            )
        self.eager_eps = max(self.eager_eps, errors.row / eps)

    def _input_dtypes(self, case: Case) -> list[torch.dtype]:
        return [dtype_of(a.dtype) for a in build_case(self.task, case).tensors]

    def _check_flops(self, case: Case, products: float, elements: float) -> None:
        """Hold `flops` against the products and elements that eager computes."""
        flops, done = self.task.flop_count(case), products + elements + elements_of(self.task, case)
        if flops > FLOPS_FACTOR * done:
            done_text = f"eager does about {done:g}"
        elif self.task.matrix and flops * FLOPS_FACTOR < products:
            done_text = f"the matrix products of eager are {products:g}"
        else:
            return
        text = f"case {case.name}: {self.task.flops!r} is {flops:g}, and {done_text}"
        raise toml_error(self.task, "flops", text)

    def _error(self, function: str, case: Case, text: str) -> TaskError:
        file = self.task.folder / "reference.py"
        return TaskError(f"{file}: {function}: case {case.name}: {text}")


def _has_nonfinite(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.dtype == torch.float4_e2m1fn_x2:
        return False
    return not bool(_finite(tensor).all())


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    """Find the elements that are finite; torch itself cannot among 8-bit numbers."""
    return torch.isfinite(tensor.float() if tensor.dtype.itemsize == 1 else tensor)


if __name__ == "__main__":
    main()
