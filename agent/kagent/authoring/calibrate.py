"""Tolerances from what rounding does: a task's results computed in other ways that are as right.

The ways are torch.compile, float32 throughout, another number of threads, `eager` with its sums and
matrix products in other orders, and the seed that was derived from torch's compiler. Each is held
against the float64 reference, as a candidate is. No other candidate takes part, so none can widen
what it is held against.
"""

from __future__ import annotations

import contextlib
import functools
import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from kagent_sandbox.builder.client import Builder
from kagent_sandbox.data.build_case import build_case
from kagent_sandbox.data.calibration import (
    FILE,
    LEAST_FLOOR,
    LEAST_K,
    MOST_FLOOR,
    MOST_K,
    Calibration,
    KindCalibration,
    ResultCalibration,
    read_calibration,
    write_calibration,
)
from kagent_sandbox.data.task import load_task
from kagent_sandbox.data.verdict import Examined, Rejected
from kagent_sandbox.device.cpu.facts import cpu_facts
from kagent_sandbox.device.plan_ops import dtype_of
from kagent_sandbox.device.table import device_for, own_unit
from kagent_sandbox.device.traits import InputPolicy
from kagent_sandbox.errors import TaskError
from kagent_sandbox.judge.check import numerics
from kagent_sandbox.judge.check.cases import bench_cases, check_cases, race_cases
from kagent_sandbox.judge.check.inputs import InputSampler
from kagent_sandbox.judge.client import JudgeClient
from kagent_sandbox.process.device_lock import DeviceLock

from kagent.authoring.draft.orders import ORDERS, ROOM, Reordered, draws_of
from kagent.authoring.seeds import NAMES
from kagent.evolve.open_machine import request_maker
from kagent.tasks import sound_task
from kagent.text import local_time

if TYPE_CHECKING:
    from kagent_sandbox.data.arguments import ResultSpec
    from kagent_sandbox.data.case import Case
    from kagent_sandbox.data.kind import Kind
    from kagent_sandbox.data.task import Task
    from kagent_sandbox.judge.check.inputs import InputSet

_KS = (LEAST_K, 3.0, 4.0, 6.0, 8.0, 12.0, MOST_K)
_SEED = 21  # of the hidden cases that are drawn


# -- the ways --------------------------------------------------------------------------------------

Way = Callable[[InputSampler, "InputSet"], tuple[torch.Tensor, ...]]


def _under(context: Callable[[], AbstractContextManager[Any]]) -> Way:
    def run(sampler: InputSampler, inputs: InputSet) -> tuple[torch.Tensor, ...]:
        with context():
            return sampler.call("eager", inputs)

    return run


def _in_float32(sampler: InputSampler, inputs: InputSet) -> tuple[torch.Tensor, ...]:
    """Compute in float32 throughout, like kernels that keep intermediate values in registers."""
    tensors = {
        n: t.float() if t.is_floating_point() and t.dtype.itemsize < 4 else t
        for n, t in inputs.tensors.items()
    }
    wide = replace(inputs, tensors=tensors, known_results=None, known_errors=None)
    return sampler.call("eager", wide)


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _ways(device: torch.device) -> dict[str, Way]:
    compiled: Callable[..., Any] = functools.cache(functools.partial(torch.compile, dynamic=True))
    ways: dict[str, Way] = {
        "eager": lambda s, i: s.call("eager", i),
        "float32": _in_float32,
        "torch.compile": lambda s, i: s.call("eager", i, compiled),
    }
    if device.type == "cpu":
        other = 1 if torch.get_num_threads() > 1 else 2
        ways[f"eager, {other} thread" + ("s" if other > 1 else "")] = _under(
            functools.partial(_threads, other)
        )
    for name, (split, pairs) in ORDERS.items():
        ways[name] = _under(functools.partial(Reordered, split, pairs=pairs))
    return ways


# -- what they give --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ErrorSample:
    """One kind of error of one result, one way, in one case."""

    way: str
    case: str
    error: float
    of_k: float  # allowed for k = 1
    of_floor: float  # allowed for floor = 1
    eps: float  # of the result's dtype
    exact: bool  # row or element: an error in the sense of epsilons


@dataclass
class _Found:
    seen: dict[str, list[_ErrorSample]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    seeds: list[str] = field(default_factory=list)


def calibrate(task: Task, kind: Kind, say: Callable[[str], None]) -> KindCalibration:
    """Find the tolerances of a task's results on a device of this machine.

    Args:
        task: The task, not calibrated.
        kind: The kind of device; one is here.
        say: Is told what is being done.

    Raises:
        TaskError: reference.py fails; or other orders of rounding differ by more than any
            tolerance may allow for.
    """
    device = torch.device("cuda" if kind == "gpu" else "cpu")
    cases = [*check_cases(task, kind, _SEED), *bench_cases(task, kind)]
    cases += race_cases(task, kind, _SEED)
    sampler = InputSampler(task, device, InputPolicy(pool=0))
    ways, found = _ways(device), _Found()
    lock = DeviceLock(own_unit(kind), say)
    with contextlib.closing(lock):
        for case in cases:
            draws = draws_of(task, case)
            say(f"{kind}: {case.name}, {len(ways)} ways, {draws} draws")
            with lock.turn("work"):
                for seed in range(draws):
                    _try_case(task, sampler, sampler.fresh(case, seed), ways, found)
    for derived in (task.folder / name for name in NAMES[kind]):
        if derived.is_file():
            say(f"{kind}: {derived.name}")
            _try_seed(task, kind, derived, cases, found, say)
    results = {
        name: _tolerance(task, name, found.seen[name]) for name in found.seen if found.seen[name]
    }
    name = torch.cuda.get_device_name() if kind == "gpu" else cpu_facts().name
    return KindCalibration(
        digest=task.digest,
        device=name,
        torch=str(torch.__version__),
        made=local_time(),
        cases=len(cases),
        ways=tuple(w for w in (*ways, *found.seeds) if w not in found.left_out),
        results=results,
        left_out=found.left_out,
    )


def calibrate_folder(
    task: Task, kinds: Sequence[Kind], say: Callable[[str], None] = lambda _: None
) -> Calibration:
    """Calibrate a task for these kinds of device, and write calibration.json into its folder.

    What is known of other kinds stays, if it is of the task as it is now. The task is checked with
    the new tolerances; if that finds a fault, the file stays as it was.

    Args:
        task: The task, not calibrated.
        kinds: Kinds of device that are here.
        say: Is told what is being done.

    Raises:
        TaskError: See `calibrate`, and `sound_task`.
    """
    path = task.folder / FILE
    before = path.read_bytes() if path.is_file() else None
    try:
        known = read_calibration(task.folder, task.digest)
    except TaskError:
        known = None  # of another version of the task, or damaged
    found = {} if known is None else dict(known.kinds)
    for kind in kinds:
        found[kind] = calibrate(task, kind, say)
    calibration = Calibration(found)
    write_calibration(task.folder, calibration)
    try:
        for kind in kinds:
            sound_task(load_task(task.folder), kind, say)
    except TaskError:
        if before is None:
            path.unlink()
        else:
            path.write_bytes(before)
        raise
    return calibration


def _try_case(
    task: Task, sampler: InputSampler, inputs: InputSet, ways: Mapping[str, Way], found: _Found
) -> None:
    """Compute one draw in every way, beside torch's own errors as a check takes them."""
    case = inputs.case
    yardsticks = sampler.torch_errors(inputs)
    specs = build_case(task, case).compared
    for way, run in ways.items():
        if way in found.left_out:
            continue
        try:
            outputs = run(sampler, inputs)
        except TaskError as e:
            if way == "eager":
                raise
            found.left_out[way] = str(e).partition(f"case {case.name}: ")[2][:200] or str(e)[:200]
            continue
        valid, expected = sampler.valid_parts(inputs, outputs, sampler.expected(inputs))
        for result, spec, out, ref, yardstick in zip(
            task.compared, specs, valid, expected, yardsticks, strict=True
        ):
            dtype = dtype_of(spec.dtype)
            if not dtype.is_floating_point:
                continue
            errors = numerics.measure_errors(out.to(dtype), ref, result.row_dims)
            seen = found.seen.setdefault(result.name, [])
            if math.isfinite(errors.row):  # float16 overflows in some ways
                seen += _seen(way, case.name, result, errors, yardstick, dtype)


def _try_seed(
    task: Task,
    kind: Kind,
    path: Path,
    cases: Sequence[Case],
    found: _Found,
    say: Callable[[str], None],
) -> None:
    """Check a derived seed as a candidate, with the largest tolerance that there may be.

    Of its errors those of rows and elements count. A seed that fails is left out.
    """
    widest = ResultCalibration(MOST_K, MOST_FLOOR, 0.0, 0.0, "the most that a calibration allows")
    results = dict.fromkeys((r.name for r in task.compared), widest)
    with tempfile.TemporaryDirectory(prefix="kagent_calibrate_") as aside:
        folder = Path(aside, task.folder.name)
        folder.mkdir()
        for name in ("task.toml", "reference.py"):
            shutil.copyfile(task.folder / name, folder / name)
        known = KindCalibration(task.digest, "", "", "", 0, (), results, {})
        write_calibration(folder, Calibration({kind: known}))
        with (
            Builder(1, on_wait=say) as builder,
            JudgeClient(folder, device_for(kind), _SEED, on_wait=say) as judge,
        ):
            request = request_maker(task, judge.facts, list(cases), 1)
            built = builder.build(request(path.read_text(encoding="utf-8")))
            checked = (
                Examined((), (built,))
                if isinstance(built, Rejected)
                else judge.examine(built, bench_shapes=True)
            )
    if checked.failed:
        first = checked.failed[0]
        found.left_out[path.name] = f"{first.status} in {first.case or 'all cases'}"
        return
    found.seeds.append(path.name)
    by_name = {c.name: c for c in cases}
    for error in checked.errors:
        case = by_name[error.case]
        (result,) = (r for r in task.compared if r.name == error.output)
        dtype = dtype_of(task.dtype(result.dtype, case))
        if not dtype.is_floating_point:
            continue
        eps = numerics.epsilon(dtype)
        for off, of_torch in (
            (error.row, error.torch_row),
            (error.element, error.torch_element),
        ):
            of_k = min(of_torch, numerics.MOST_TORCH_ERROR)
            seen = _ErrorSample(path.name, error.case, off, of_k, eps, eps, exact=True)
            found.seen.setdefault(error.output, []).append(seen)


def _seen(
    way: str,
    case: str,
    result: ResultSpec,
    errors: numerics.Errors,
    yardstick: numerics.Errors,
    dtype: torch.dtype,
) -> Iterator[_ErrorSample]:
    of_k = numerics.allowed(yardstick, result.model_copy(update={"k": 1.0, "floor": 0.0}), dtype)
    of_floor = numerics.allowed(
        yardstick, result.model_copy(update={"k": 0.0, "floor": 1.0}), dtype
    )
    for kind in ("row", "element", "bias"):
        yield _ErrorSample(
            *(way, case, getattr(errors, kind), getattr(of_k, kind), getattr(of_floor, kind)),
            *(numerics.epsilon(dtype), kind != "bias"),
        )


def _tolerance(task: Task, name: str, seen: Sequence[_ErrorSample]) -> ResultCalibration:
    """The smallest tolerance that leaves room for all that was seen.

    Of the `k` that will do, each with the least `floor`, that which allows for the least on the
    whole: the geometric mean over all that was seen.

    Raises:
        TaskError: None will do.
    """
    choices = [(k, _least_floor(seen, k)) for k in _KS]
    fine = [c for c in choices if c[1] <= MOST_FLOOR]
    if not fine:
        k, floor = choices[-1]
        worst = _tightest(seen, k, floor)
        raise TaskError(
            f"{task.folder / 'reference.py'}: result {name}: {worst.way} in case {worst.case} errs "
            f"by {worst.error:.3g}, and k = {MOST_K:g} would need floor = {floor:g}, more than "
            f"{MOST_FLOOR:g}: the reference or eager is off, or rounding decides there"
        )

    def allowed(choice: tuple[float, float]) -> float:
        k, floor = choice
        return math.fsum(math.log(k * s.of_k + floor * s.of_floor) for s in seen)

    k, floor = min(fine, key=allowed)
    worst = _tightest(seen, k, floor)
    return ResultCalibration(
        k=k,
        floor=floor,
        of_torch=max((s.error / s.of_k for s in seen if s.exact and s.of_k > 0), default=0.0),
        of_eps=max((s.error / s.eps for s in seen if s.exact), default=0.0),
        why=f"{worst.way} in case {worst.case} errs by {worst.error:.3g}; room is a factor of "
        f"{ROOM:g}",
    )


def _least_floor(seen: Iterable[_ErrorSample], k: float) -> float:
    """The least floor beside `k`, rounded up to two digits."""
    floor = max(LEAST_FLOOR, *((ROOM * s.error - k * s.of_k) / s.of_floor for s in seen))
    unit = 10.0 ** (math.floor(math.log10(floor)) - 1)
    return round(math.ceil(floor / unit - 1e-9) * unit, 6)


def _tightest(seen: Iterable[_ErrorSample], k: float, floor: float) -> _ErrorSample:
    """Find the result that comes nearest to what is allowed."""
    return max(seen, key=lambda s: s.error / (k * s.of_k + floor * s.of_floor))
