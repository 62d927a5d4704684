"""A task from an operation: traced, sized, tried, written, checked."""

from __future__ import annotations

import math
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from kagent_sandbox.data.calibration import (
    MOST_FLOOR,
    MOST_K,
    Calibration,
    KindCalibration,
    ResultCalibration,
    write_calibration,
)
from kagent_sandbox.data.formula import evaluate
from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.task import Task, load_task
from kagent_sandbox.device.cpu.facts import cpu_facts
from kagent_sandbox.errors import TaskError, UserError
from kagent_sandbox.judge.task_check import TaskCheck, check_kinds

from kagent.authoring.draft.draft import (
    HALVES,
    DraftCase,
    DraftGenerator,
    DraftKind,
    TaskDraft,
    case_dtype,
    plain,
)
from kagent.authoring.draft.inputs import bounds_of_draws, constraints_of_draws, draw_example
from kagent.authoring.draft.pointers import (
    rounded_index,
    with_offsets,
    with_own_bounds,
    with_pointers,
)
from kagent.authoring.draft.reference import require_writable
from kagent.authoring.draft.trial import Trials, Tried, accepted, write, written
from kagent.authoring.errors import AuthoringError
from kagent.authoring.proofs import prove_holes
from kagent.authoring.seeds import SeedOutcome, write_seeds
from kagent.authoring.tracing.drawing import by_values
from kagent.authoring.tracing.operation import Example, Operation
from kagent.authoring.tracing.sizes import (
    Room,
    Sizes,
    above_power,
    below_power,
    boxes,
    explore,
    find_equal,
    prime,
)
from kagent.authoring.tracing.trace import Axis, TracedOperation, trace
from kagent.tasks import Seed, seeds_of

Say = Callable[[str], None]

LEAST_SIZE = 8
"""Smaller dimensions stay as in the example: channels, kernels' widths, pairs."""
MANY_ARGUMENTS = 12
"""Number of tensors from which on the sizes of a module's parameters stay as in the example."""
CHECK_ELEMENTS, CHECK_WORK = 6e4, 2e7
"""Elements and operations of a check case, about: a case takes milliseconds on a CPU."""
MOST_GROWN = 4.0**5
"""Times that a first case that cannot be one is made larger, at most: seconds on a CPU."""
FIXED_TIMES, MOST_FIXED_WORK = 16, 2.5e8
"""Times as many operations as at the least sizes that each case may take, up to a number of them:
wrong results are tried on cases of not much more."""
LARGE_ELEMENTS, LARGE_WORK = 1e6, 3e8
"""Elements and operations of the larger check cases for GPUs."""
BENCH_ELEMENTS, BENCH_WORK = 3e6, 1e8
"""Elements and operations of a benchmark case for CPUs, before it is timed."""
LEAST_BENCH = 1 / 16
"""Least share that a benchmark case is reduced to, so that a slow moment does not make it tiny."""
BENCH_S = 1.5e-3
"""Longest time of a call of a scaled benchmark case for CPUs, where sizes allow it."""
MOST_BENCH_S = 20e-3
"""Longest time of a call of the example's own sizes as a benchmark case for CPUs: a comparison
repeats it some hundred times."""
MANY_ELEMENTS, MANY_WORK = 1e6, 1e9
"""Elements and operations of a case that is small for its operation, and still so large that few
cases must do."""
_FEW = 16
MOST_BOUNDED = 2e7
"""Elements of a case that shows whether a dimension bounds what whole numbers point into."""
NONFINITE_DRAWS = 4
"""Draws of infinities and NaN that are tried at each scale."""
_ROWS = ("constant", "tiny", "large", "spiked", "zeros")
_SCALES = (30.0, 1e-3)
_SEEDS: Mapping[Kind, str] = {"gpu": "Triton", "cpu": "C++"}


@dataclass(frozen=True)
class Made:
    """A new task.

    Attributes:
        folder: Its folder.
        trace: What was found out about the operation.
        draft: What was written.
        checks: What the check of the task found, for each kind of device.
        derived: What became of the seeds that were derived, for each kind of device.
        seconds: Time that it took.
    """

    folder: Path
    trace: TracedOperation
    draft: TaskDraft
    checks: tuple[TaskCheck, ...]
    derived: tuple[SeedOutcome, ...]
    seconds: float

    @property
    def task(self) -> Task:
        """The task."""
        return load_task(self.folder)

    @property
    def seeds(self) -> tuple[Seed, ...]:
        """Kernels that a run starts from."""
        return tuple(seeds_of(self.task))

    @property
    def notes(self) -> tuple[str, ...]:
        """Changes and omissions, a line each."""
        none = (f"no {_SEEDS[d.kind]} seed: {d.reason}" for d in self.derived if d.path is None)
        return (*self.trace.operation.notes, *self.trace.notes, *self.draft.notes, *none)

    @property
    def holes(self) -> tuple[str, ...]:
        """Wrong results that would pass."""
        return tuple(dict.fromkeys(h for c in self.checks for h in c.holes))


def make_task(
    operation: Operation,
    folder: Path,
    *,
    vary: Mapping[tuple[str, int], str] | None = None,
    seeds: bool = True,
    force: bool = False,
    say: Say = lambda _: None,
) -> Made:
    """Make a task of an operation.

    Args:
        operation: The operation.
        folder: Folder that is written. It must not exist, or be empty.
        vary: Names of the dimensions that vary, by argument and dimension. By default all do that
            can, and that are not small.
        seeds: Whether seeds are derived, too (`write_seeds`).
        force: Whether files of a folder that is there are replaced, once the new ones are made.
            Its other files stay.
        say: Is told what is being done.

    Raises:
        UserError: The folder is there already, or `vary` names no dimension.
        AuthoringError: The operation cannot become a task.
        TaskError: The task has a fault that could not be mended.
    """
    if force and folder.is_dir():
        with tempfile.TemporaryDirectory(prefix=".kagent-", dir=folder.parent) as name:
            fresh = Path(name) / folder.resolve().name
            made = make_task(operation, fresh, vary=vary, seeds=seeds, say=say)
            for file in (p for p in fresh.iterdir() if p.is_file()):
                file.replace(folder / file.name)
        derived = tuple(
            replace(d, path=None if d.path is None else folder / d.path.name) for d in made.derived
        )
        return replace(made, folder=folder, derived=derived)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: it is there already: name another with --to, or remove it")
    began = time.perf_counter()
    say(f"running {operation.origin} on symbolic tensors")
    room, draft = _tried_rooms(find_rooms(operation, vary), say)
    _write(draft, folder)
    try:
        load_task(folder)
        checks = _checked(folder, say)
        if any(c.holes for c in checks):
            draft, checks = _without_idle(draft, folder, checks, say)
        if any(c.holes for c in checks):
            draft, checks = _mended(draft, folder, checks, say)
    except TaskError as e:
        if why := rounded_index(room.trace.graph):
            raise TaskError(f"{e}; {why}") from e
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    derived = tuple(write_seeds(folder, say=say)) if seeds else ()
    return Made(folder, room.trace, draft, checks, derived, time.perf_counter() - began)


# -- dimensions ------------------------------------------------------------------------------------


def find_rooms(
    operation: Operation, vary: Mapping[tuple[str, int], str] | None = None
) -> Iterator[Room]:
    """Find out which dimensions vary, and in which steps: in the first room most of them do, and
    in each further one fewer.

    Raises:
        UserError: `vary` names no dimension.
        AuthoringError: The operation cannot be run on symbolic tensors.
    """
    if vary:
        names = _axes_of(operation, vary)
        room = _room(operation, list(names), names)
        lost = dict.fromkeys(n for n in vary.values() if room is None or n not in room.trace.dims)
        if room is None or lost:
            raise AuthoringError(f"{', '.join(lost)}: {_tied(operation, names, lost)}")
        yield room
        return
    refusal: AuthoringError | None = None
    seen: list[object] = []
    for axes in _freedoms(operation):
        try:
            room = _room(operation, axes, {})
        except AuthoringError as e:
            refusal = e
            continue
        if room is not None and room.trace.shapes not in seen:
            seen.append(room.trace.shapes)
            yield room
    if not seen:
        cause = None if refusal is None else refusal.__cause__
        if isinstance(cause, TypeError) and "NoneType" in str(cause):  # the size of a symbol
            raise AuthoringError(
                f"{operation.origin} does not run on symbolic tensors: a size depends on a tensor's"
                " values, as in x[mask], torch.nonzero, torch.unique and torch.bincount: let "
                "results have sizes that follow from the arguments', as torch.where(mask, x, 0) "
                "and index_add_ into zeros do"
            ) from cause
        raise refusal or AuthoringError(
            "a size, a branch or a Python number depends on a tensor's values, as by .item(): pass "
            "the number as an argument of its own, or compute with the tensor"
        )


def _tried_rooms(rooms: Iterable[Room], say: Say) -> tuple[Room, TaskDraft]:
    """The first room in which cases can be computed, and the draft with them. Where they cannot,
    numbers may be offsets, or point into a dimension that must stay as in the example.

    Raises:
        AuthoringError: There is none; or the first one has no case for another reason.
    """
    refusal: NoCaseError | None = None
    for room in rooms:
        bare, own = _bare(room.trace), room.trace.operation.examples
        for examples in dict.fromkeys((own, with_offsets(bare) or own, with_own_bounds(bare))):
            say("trying cases" if refusal is None else "trying other dimensions")
            tried = replace(room, trace=_redrawn(room.trace, examples))
            try:
                return tried, make_draft(tried)
            except NoCaseError as e:
                if not e.failed:
                    raise refusal or e from None
                refusal = refusal or e
    assert refusal is not None
    raise refusal


def _tied(operation: Operation, names: Mapping[Axis, str], lost: Iterable[str]) -> str:
    """Words for named dimensions that cannot vary, with those that may have to vary with them."""
    text = "the operation takes no other sizes there, or ties it to another dimension"
    sizes = {operation.examples[i].shape[d]: n for (i, d), n in names.items() if n in lost}
    alike = [
        (f"{e.name}:{d}", sizes[size])
        for i, e in enumerate(operation.examples)
        for d, size in enumerate(e.shape)
        if size in sizes and (i, d) not in names
    ]
    if not alike:
        return text
    places = ", ".join(place for place, _ in alike)
    way = "--vary " + "=".join(alike[0])
    return f"{text}. Of the same size: {places}. Let those that go with it vary, too: {way}"


def parse_vary(given: Iterable[str]) -> dict[tuple[str, int], str]:
    """Dimensions that the user named.

    Raises:
        UserError: One is not ARG:DIM=NAME.
    """
    found = {}
    for text in given:
        match = re.fullmatch(r"(\w+):(\d+)=(\w+)", text)
        if match is None:
            raise UserError(f"--vary {text}: expected ARG:DIM=NAME, as in x:0=B")
        found[match[1], int(match[2])] = match[3]
    return found


def _axes_of(operation: Operation, vary: Mapping[tuple[str, int], str]) -> dict[Axis, str]:
    found = {}
    names = [e.name for e in operation.examples]
    for (argument, axis), name in vary.items():
        if argument not in names:
            raise UserError(f"--vary {argument}: no tensor of that name; there are {names}")
        i = names.index(argument)
        shape = operation.examples[i].shape
        if not 0 <= axis < len(shape):
            raise UserError(f"--vary {argument}:{axis}: it has shape {list(shape)}")
        if shape[axis] == 1:
            raise UserError(
                f"--vary {argument}:{axis}: it is 1 in the example: give it a larger one"
            )
        if not name.isidentifier() or name in names:
            what = "an argument's name" if name in names else "no name"
            raise UserError(f"--vary {argument}:{axis}={name}: {name!r} is {what}: take another")
        found[i, axis] = name
    return found


def _freedoms(operation: Operation) -> Iterator[list[Axis]]:
    """Dimensions that may vary: as many as one may hope for, then fewer and fewer."""
    large = [
        (i, d)
        for i, e in enumerate(operation.examples)
        for d, n in enumerate(e.shape)
        if n >= LEAST_SIZE and not (e.parameter and len(e.shape) > 2 and d > 1)
    ]
    inputs = [(i, d) for i, d in large if not operation.examples[i].parameter]
    if len(operation.examples) <= MANY_ARGUMENTS:
        yield large
    yield inputs
    yield [(i, d) for i, d in inputs if d == 0]
    # torch may fix sizes that vary together, which alone it does not.
    for i, d in sorted(inputs, key=lambda axis: -operation.examples[axis[0]].shape[axis[1]]):
        yield [(i, d)]
    yield []


def _room(operation: Operation, axes: Sequence[Axis], names: Mapping[Axis, str]) -> Room | None:
    """The room that some dimensions have; None if it is none."""
    free = list(axes)
    equal: list[tuple[Axis, Axis]] = []
    while True:
        found = trace(operation, free, names, equal)
        require_writable(_bare(found))
        if not found.fits(found.dims) or (axes and not found.dims):
            return None
        room, fixed = explore(found)
        if room is not None:
            more = [] if names else find_equal(room, _check_cost(found), 1.0)
            if not more:
                return _drawable(room)
            equal += [(found.axes(a)[0], found.axes(b)[0]) for a, b in more]
            continue
        if names:
            raise AuthoringError(f"{', '.join(fixed)}: the operation takes no other sizes there")
        gone = {
            (i, d)
            for i, shape in enumerate(found.shapes)
            for d, size in enumerate(shape)
            if isinstance(size, str) and any(re.search(rf"\b{n}\b", size) for n in fixed)
        }
        if not gone & set(free):
            return None
        free = [axis for axis in free if axis not in gone]


def _check_cost(found: TracedOperation) -> Callable[[Sizes], float]:
    """Elements or operations at some sizes, over those of a check case."""

    def cost(sizes: Sizes) -> float:
        return max(found.count(sizes) / CHECK_ELEMENTS, found.work(sizes) / CHECK_WORK)

    return cost


def _drawable(room: Room) -> Room:
    """The room, with tensors that the example's code draws at one size alone drawn as values, and
    those that point into others as such.
    """
    found = room.trace
    found = _redrawn(found, with_pointers(_bare(found)))
    draft, examples = _bare(found), list(found.operation.examples)
    small = _shrunk(room, CHECK_ELEMENTS, CHECK_WORK)
    tried = [room.least, small, room.changed(small, prime) or small]
    for i in found.used:
        varies = any(isinstance(size, str) for size in found.shapes[i])
        if examples[i].drawing.kind != "code" or not varies:
            continue
        if not all(_draws(draft, i, sizes) for sizes in tried):
            examples[i] = replace(examples[i], drawing=by_values(examples[i].drawing))
    return replace(room, trace=_redrawn(found, tuple(examples)))


def _draws(draft: TaskDraft, i: int, sizes: Mapping[str, int]) -> bool:
    """Whether the example's code draws the i-th tensor at other sizes."""
    try:
        drawn = draw_example(draft, i, sizes)
    except Exception:  # noqa: BLE001 - whatever the example's code does at other sizes
        return False
    return tuple(drawn.shape) == tuple(draft.trace.sizes(draft.trace.shapes[i], sizes))


def _redrawn(found: TracedOperation, examples: tuple[Example, ...]) -> TracedOperation:
    return replace(found, operation=replace(found.operation, examples=examples))


def _bare(found: TracedOperation) -> TaskDraft:
    """A draft without cases."""
    return TaskDraft(found, DraftKind((), ()), DraftKind((), ()))


# -- cases -----------------------------------------------------------------------------------------


def make_draft(room: Room) -> TaskDraft:
    """Choose cases and tolerances: what the operation computes well at, of what could be tried."""
    found = room.trace
    dtype = plain(case_dtype(found))
    cpu_dtype = "float32" if case_dtype(found) in HALVES else dtype
    first = DraftCase(_shrunk(room, CHECK_ELEMENTS, CHECK_WORK), cpu_dtype)
    draft = TaskDraft(
        found, DraftKind((first,), (first,)), DraftKind((first,), (first,)), rows=_ROWS
    )
    with written(draft) as folder:
        trials = Trials(draft, folder)
        room, first = _usable(room, trials, first)
        room, needed = _without_few(room, trials, first)
        small = {n: max(s, room.least[n]) for n, s in first.sizes.items()}
        small = small if found.fits(small) else dict(first.sizes)
        first = replace(first, sizes=small)
        rows = _row_kinds(draft, trials, first)
        nonfinite = bool(rows) and not draft.matrix and _takes_nonfinite(room, trials, first)
        draft = draft.with_(rows=rows, nonfinite=nonfinite)
    with written(draft) as folder:
        trials = Trials(draft, folder)
        plans = list(_check_plans(room, draft, small, cpu_dtype))
        pairs = list(accepted(trials, plans))
        check = _distinct([c for c, _ in pairs] or [first])
        bench, words = _cpu_bench(room, trials, cpu_dtype)
        gpu_check = [_with_dtype(c, dtype) for c in check]
        if dtype != cpu_dtype:
            gpu_check = [c for c, _ in accepted(trials, gpu_check)] or gpu_check[:1]
        large = _large_plans(room, draft, dtype)
        gpu_check = _distinct([*gpu_check, *(c for c, _ in accepted(trials, large))])
    scales = sorted({c.scale for c in check})
    kinds = sorted({c.inputs for c in check} & {"mixed", "nonfinite", "normal"})
    padded = sorted({c.noncontiguous for c in check})
    offsets = sorted({c.offset for c in check})
    fields: dict[str, Sequence[Any]] = {
        "inputs": kinds,
        "scale": scales,
        "noncontiguous": padded,
        "offset": offsets,
    }
    given = DraftCase(found.dims, dtype)
    on_cpu = None
    k, floor = _tolerance(found, [t for _, t in pairs], needed)
    if dtype != cpu_dtype:  # what float32 needs, 16 bits do not
        noise = max((t.noise for _, t in pairs), default=0.0)
        of_torch = max((t.noise / t.eager for _, t in pairs if t.eager), default=0.0)
        on_cpu = ResultCalibration(k, floor, of_torch, noise, f"kagent new: {ROUNDED}")
        k, floor = 3.0, 2.0
    return draft.with_(
        k=k,
        floor=floor,
        on_cpu=on_cpu,
        constraints=(*_constraints(room), *constraints_of_draws(draft)),
        gpu=DraftKind(
            tuple(gpu_check),
            (given,),
            *_hidden(room, small, found.dims, 4.0, dtype, fields),
            "The sizes of the example.",
        ),
        cpu=DraftKind(
            tuple(check),
            bench,
            *_hidden(room, small, bench[0].sizes, 2.0, cpu_dtype, fields),
            words,
        ),
    )


def _tolerance(
    found: TracedOperation, tried: Sequence[Tried], needed: float
) -> tuple[float, float]:
    """`k` and `floor` that have room for what rounding was seen to change, as far as a calibration
    goes. What a `floor` may not allow for, times torch's own error does, which is as large there.
    """
    sums = math.sqrt(_summed(found))
    noise = [NOISE_ROOM * t.noise for t in tried]
    floor = max([2.0, needed, min(32.0, 0.25 * sums), *noise])
    above = [(n - MOST_FLOOR) / t.eager for n, t in zip(noise, tried, strict=True) if t.eager]
    k = max([3.0, *above])
    return float(min(MOST_K, math.ceil(k))), float(f"{min(floor, MOST_FLOOR):.2g}")


NOISE_ROOM = 1.5
"""Factor on what rounding at random changes."""
ROUNDED = "every operation rounded at random, and sums in other orders"


def _usable(room: Room, trials: Trials, first: DraftCase) -> tuple[Room, DraftCase]:
    """The smallest case that can be one: `first`, or a larger one where that amplifies rounding, as
    a batch normalisation of few elements does. The room then begins at the larger one's sizes.

    Raises:
        AuthoringError: None of those that were tried can be.
    """
    tried = trials.case(first, "trial")
    refused, grown = [first.sizes], 1.0
    while tried.rounding and grown < MOST_GROWN and dict(first.sizes) != room.trace.dims:
        grown *= 4
        sizes = _shrunk(room, CHECK_ELEMENTS * grown, CHECK_WORK * grown)
        if sizes == first.sizes:
            continue
        first = replace(first, sizes=sizes)
        tried = trials.case(first, f"trial_{grown:g}")
        if not tried.why:
            room = replace(room, least=sizes)
        refused.append(sizes)
    if tried.why:
        texts = (_sizes_text(each) for each in refused)
        of = f" of {'; '.join(texts)}" if first.sizes else ""
        text = f"its example cannot be a case{of}: {tried.why}"
        if tried.rounding and (why := rounded_index(room.trace.graph)):
            text += f"; {why}"
        if tried.failed and first.sizes:
            text += _choose(room.trace)
        raise NoCaseError(text, failed=tried.failed)
    _require_bounds(room, trials, first)
    return room, first


def _require_bounds(room: Room, trials: Trials, first: DraftCase) -> None:
    """Make sure that whole numbers are such at other sizes, too: what they point into may have a
    size of its own that is small, or is equal to a dimension that bounds them by chance.

    Raises:
        NoCaseError: They are not.
    """
    draft = _bare(room.trace)
    if all(e.dtype.is_floating_point for e in draft.arguments):
        return
    plans = [{**first.sizes, n: room.rounded(n, _FEW)} for n in first.sizes]
    for name in bounds_of_draws(draft):
        size = room.rounded(name, room.trace.dims[name] * 3 / 2)
        plans += [{**first.sizes, name: size}, {**room.least, name: size}]
    needed = constraints_of_draws(draft)
    for i, sizes in enumerate(plans):
        fits = room.trace.count(sizes) < MOST_BOUNDED and room.trace.fits(sizes)
        if not fits or not all(evaluate(c, sizes) for c in needed):
            continue
        tried = trials.case(replace(first, sizes=sizes), f"bounds_{i}")
        if tried.failed:
            text = f"its example cannot be a case of {_sizes_text(sizes)}: {tried.why}"
            raise NoCaseError(f"{text}{_choose(room.trace)}", failed=True)


def _sizes_text(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{n} = {s}" for n, s in sizes.items())


class NoCaseError(AuthoringError):
    """The first case cannot be one. `failed`: because it could not be computed."""

    def __init__(self, text: str, *, failed: bool) -> None:
        super().__init__(text)
        self.failed = failed


def _choose(found: TracedOperation) -> str:
    """Words on how to choose the dimensions that vary, with those that do."""
    names = [e.name for e in found.operation.examples]
    places = [f"{names[i]}:{d}={n}" for n in found.dims for i, d in found.axes(n)[:1]]
    way = "Where sizes belong together, name those that may vary: --vary ARG:DIM=NAME"
    return f". {way} ({', '.join(places)})"


def _without_few(room: Room, trials: Trials, first: DraftCase) -> tuple[Room, float]:
    """The room without rows of so few elements that all of a row may cancel by chance: what is left
    is a sum's rounding, and each order of additions has another. And the `floor` that the least
    sizes need.
    """
    if not room.trace.dims or _is_large(room.trace, first.sizes):
        return room, 0.0

    def needed(sizes: Sizes) -> float:
        if not room.trace.fits(sizes):
            return math.inf
        name = "few_" + "x".join(map(str, sizes.values()))
        return trials.floor_needed(replace(first, sizes=sizes), name)

    def raised(name: str, size: int) -> int:
        return max(least[name], -(-size // room.steps[name]) * room.steps[name])

    least = dict(room.least)
    few = [n for n in least if least[n] < min(LEAST_SIZE, room.trace.dims[n])]
    found: list[float] = []
    for names in (*([n] for n in few), few):  # each alone, then all together
        usual = least if names is few else first.sizes
        for size in (0, LEAST_SIZE, 2 * LEAST_SIZE):
            sizes = {n: min(raised(n, size), room.trace.dims[n]) for n in names}
            floor = needed({**usual, **sizes})
            if floor <= MOST_FLOOR:
                least |= sizes
                found.append(floor)
                break
    return replace(room, least=least), max(found, default=0.0)


def _is_large(found: TracedOperation, sizes: Mapping[str, int]) -> bool:
    """Whether few cases of such sizes must do."""
    return found.count(sizes) > MANY_ELEMENTS or found.work(sizes) > MANY_WORK


def _shrunk(room: Room, elements: float, work: float) -> Sizes:
    """The example's sizes, made smaller to about so many elements and operations: to more where the
    sizes that do not vary take most of that, since a model's weights would else leave one token.
    """
    found, least = room.trace, dict(room.least)
    elements = max(elements, 2 * found.count(least))
    work = max(work, min(FIXED_TIMES * found.work(least), MOST_FIXED_WORK))

    def cost(sizes: Sizes) -> float:
        return max(found.count(sizes) / elements, found.work(sizes) / work)

    return _drawn_at(room, room.shrunk(cost, 1.0))


def _drawn_at(room: Room, sizes: Sizes) -> Sizes:
    """The sizes, with fewer numbers where not as many could be drawn."""
    for formula in constraints_of_draws(_bare(room.trace)):
        (name,) = re.findall(r"^\w+(?= <=)", formula) or [""]
        while name in sizes and not evaluate(formula, sizes):
            smaller = {**sizes, name: room.rounded(name, sizes[name] / 2)}
            if smaller == sizes or not room.trace.fits(smaller):
                break
            sizes = smaller
    return sizes


def _summed(found: TracedOperation) -> float:
    """Numbers that are added up, or multiplied, for one of a result, about."""
    dims = found.dims
    results = sum(math.prod(found.sizes(r.shape, dims)) for r in found.results)
    read = found.count(dims) - results
    products = evaluate(found.products, dims) / 2
    return max(1.0, read / max(1, results), products / max(1, results), found.scanned(dims))


def _row_kinds(draft: TaskDraft, trials: Trials, first: DraftCase) -> tuple[str, ...]:
    """Kinds of rows that the operation computes well. Of constant ones a whole row may cancel by
    chance.
    """
    if not draft.varied:
        return ()
    cases = {r: replace(first, inputs=r) for r in _ROWS}
    found = [r for r, c in cases.items() if not trials.case(c, f"rows_{r}").why]
    if "constant" in found and not _is_large(draft.trace, first.sizes):
        usual, constant = (
            trials.floor_needed(c, f"few_{c.inputs}") for c in (first, cases["constant"])
        )
        if usual <= MOST_FLOOR < constant:
            found.remove("constant")
    if trials.case(replace(first, inputs="mixed"), "rows_mixed").tied:  # beside rows of others
        found = [r for r in found if r not in ("constant", "zeros")]
    return tuple(found)


def _takes_nonfinite(room: Room, trials: Trials, first: DraftCase) -> bool:
    """Whether all is right at infinities and NaN, at each scale of hidden cases, in some draws, and
    at other sizes: an infinity may meet a number that is 0 in float32 and not in float64, torch's
    own formula may decide, and sizes may decide which formula that is, as in a Fourier transform.
    """
    scales, name = (1.0, *_SCALES), "rows_nonfinite"
    broken = replace(first, inputs="nonfinite")
    changed = [] if _is_large(room.trace, first.sizes) else [prime, below_power, above_power]
    sizes = [s for how in changed if (s := room.changed(dict(first.sizes), how)) is not None]
    if not all(
        trials.agrees_decomposed(replace(broken, sizes=s), f"{name}_{i}", seed)
        and not trials.case(replace(broken, sizes=s), f"{name}_{i}", seed).why
        for i, s in enumerate(sizes)
        for seed in range(1, NONFINITE_DRAWS + 1)
    ):
        return False
    return all(
        trials.agrees_at_infinities(replace(first, inputs="mixed", scale=scale), "infinities")
        for scale in scales
    ) and all(
        not trials.case(case, name, seed).why and trials.agrees_decomposed(case, name, seed)
        for seed in range(1, NONFINITE_DRAWS + 1)
        for case in (replace(first, inputs="nonfinite", scale=scale) for scale in scales)
    )


def _check_plans(room: Room, draft: TaskDraft, small: Sizes, dtype: str) -> Iterator[DraftCase]:
    """Cases worth trying: odd and prime sizes, one of each, large and tiny magnitudes."""
    primes = room.changed(small, prime) or small
    below = room.changed(small, below_power) or small
    above = room.changed(small, above_power) or small
    yield DraftCase(small, dtype)
    if _is_large(room.trace, small):
        if draft.rows:
            yield DraftCase(small, dtype, inputs="mixed", noncontiguous=True, words="mixed")
        yield DraftCase(dict(room.least), dtype, words="least")
        return
    yield DraftCase(primes, dtype, words="prime")
    yield DraftCase(below, dtype, words="below", noncontiguous=True)
    yield DraftCase(above, dtype, words="above", offset=1)
    for name in dict.fromkeys([*list(small)[:1], *list(small)[-1:]]):
        one = {**small, name: room.least[name]}
        if one != small and room.trace.fits(one):
            yield DraftCase(one, dtype, words=f"least_{name}")
    yield DraftCase(dict(room.least), dtype, words="least")
    if draft.rows:
        for scale in _SCALES:
            yield DraftCase(primes, dtype, scale=scale, words="large" if scale > 1 else "tiny")
        yield DraftCase(small, dtype, inputs="mixed", words="mixed")
        yield DraftCase(above, dtype, inputs="mixed", noncontiguous=True, words="mixed_padded")
        for kind in draft.rows:
            if kind in ("constant", "spiked"):
                yield DraftCase(below, dtype, inputs=kind, words=kind)
    if draft.nonfinite:
        yield DraftCase(primes, dtype, inputs="nonfinite", words="nonfinite")


def _large_plans(room: Room, draft: TaskDraft, dtype: str) -> Iterator[DraftCase]:
    large = _shrunk(room, LARGE_ELEMENTS, LARGE_WORK)
    yield DraftCase(large, dtype, words="large_sizes")
    odd = room.changed(large, prime)
    if odd is not None:
        inputs = "mixed" if draft.rows else "normal"
        yield DraftCase(odd, dtype, inputs=inputs, words="large_prime")


def _with_dtype(case: DraftCase, dtype: str) -> DraftCase:
    return replace(case, dtype=dtype)


def _distinct(cases: Iterable[DraftCase]) -> list[DraftCase]:
    """The first of cases that would have one name, or be equal but for it."""
    found: dict[object, DraftCase] = {}
    for c in cases:
        key = (*c.sizes.values(), c.dtype, c.inputs, c.scale, c.noncontiguous, c.offset)
        found.setdefault(key, c)
    named: dict[str, DraftCase] = {}
    for c in found.values():
        named.setdefault(c.name(""), c)
    return list(named.values())


def _cpu_bench(room: Room, trials: Trials, dtype: str) -> tuple[tuple[DraftCase, ...], str]:
    """The example's own sizes where torch is quick at them, and sizes of about a millisecond: a
    case or two, and what to say of them.
    """
    elements, work = BENCH_ELEMENTS, BENCH_WORK
    own, found = DraftCase(room.trace.dims, dtype), room.trace
    case, tried = own, Tried("not tried")
    likely_s = math.inf  # of the example's sizes: other programs make times longer, never shorter
    for _ in range(6):
        case = DraftCase(_shrunk(room, elements, work), dtype)
        tried = trials.case(case, f"bench_{elements:g}_{work:g}", timed=True)
        if not tried.why:
            larger = found.count(own.sizes) / found.count(case.sizes)
            harder = found.work(own.sizes) / max(1.0, found.work(case.sizes))
            likely_s = min(likely_s, tried.seconds * max(larger, harder))
        small = min(elements / BENCH_ELEMENTS, work / BENCH_WORK) <= LEAST_BENCH
        if tried.why or tried.seconds <= BENCH_S or small:
            break
        share = max(0.2, 0.8 * BENCH_S / tried.seconds)
        elements, work = elements * share, work * share
    if tried.why:  # it rounds badly, or is too large for this machine
        return (case,), "The sizes of the example, scaled down."
    if dict(case.sizes) == dict(own.sizes):
        return (case,), f"The sizes of the example: torch took {_ms(tried.seconds)} here."
    scaled = f"The sizes of the example, scaled down: torch took {_ms(tried.seconds)} here."
    if likely_s > MOST_BENCH_S:
        why = f"torch would take about {_ms(likely_s)}, and {_ms(MOST_BENCH_S)} is the most"
        return (case,), f"{scaled} Its own are no case: {why}."
    if why := trials.case(own, "bench_own").why:
        return (case,), f"{scaled} Its own are no case: {why}."
    words = f"The sizes of the example: torch takes some {_ms(likely_s)} here"
    return (own, case), f"{words}. And scaled down: {_ms(tried.seconds)}."


def _ms(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:.2g} ms" if ms < 100 else f"{ms:.0f} ms"


def _hidden(
    room: Room,
    small: Mapping[str, int],
    bench: Mapping[str, int],
    most: float,
    dtype: str,
    fields: Mapping[str, Sequence[Any]],
) -> tuple[tuple[DraftGenerator, ...], tuple[DraftGenerator, ...]]:
    """Generators of hidden check and benchmark cases.

    Args:
        room: What dimensions may be.
        small: Sizes of a usual check case.
        bench: Sizes of the benchmark.
        most: Elements or operations of a small hidden case, over those of `small`.
        dtype: Of all.
        fields: Distributions and others of the check cases.
    """
    found, steps = room.trace, room.steps
    own = {"dtype": [dtype]}
    if not found.dims:
        return (DraftGenerator(1, {**own, **fields}, {}),), (DraftGenerator(1, own, {}),)
    by_work = found.work(dict(bench)) > 4 * found.count(dict(bench))
    cost = _work(found) if by_work else _elements(found)

    def value(sizes: Mapping[str, int]) -> float:
        return evaluate(cost, sizes)

    usual = value(bench)
    # Around the benchmark, with as much to do.
    near = {n: max(room.least[n], bench[n] // 2 // s * s) for n, s in steps.items()}
    far = _far(room, bench)
    if not boxes(room, near, far):
        near = far = dict(bench)
    timed = DraftGenerator(2, own, _ranges(room, near, far), cost, 0.5 * usual, 1.5 * usual)
    # From the least sizes to those: small cases of every kind, and some in between.
    low = dict(room.least)
    if not boxes(room, low, far):
        low = dict(small)
        far = {n: far[n] if boxes(room, low, {**low, n: far[n]}) else low[n] for n in low}
        if not boxes(room, low, far):
            far = low
    dims = _ranges(room, low, far)
    limit = max(most * value(small), value(low))
    # As many as it has dimensions: each may be small or large beside each other.
    many = max(3, len(dims))
    checks = [DraftGenerator(many, {**own, **fields}, dims, cost, value(low), limit)]
    if usual > 2 * limit and far != low:
        plain_fields = {**own, "inputs": fields["inputs"]}
        checks.append(DraftGenerator(many - 1, plain_fields, dims, cost, limit, usual))
    return tuple(checks), (timed,)


def _far(room: Room, bench: Mapping[str, int]) -> dict[str, int]:
    """The largest size of each dimension in hidden cases around a benchmark."""
    return {n: max(room.least[n], bench[n] * 3 // 2 // s * s) for n, s in room.steps.items()}


def _constraints(room: Room) -> tuple[str, ...]:
    """Constraints that keep arguments and results within 32-bit indices in hidden cases, where
    those of the example are.

    Kernels that Inductor writes for the example have such indices, as those of torch.compile: for
    larger tensors it would compile others.
    """
    found = room.trace
    far = _far(room, found.dims)
    return tuple(
        f"{elements} < 2 ** 31"
        for elements in _elements_of_each(found)
        if evaluate(elements, found.dims) < 2**31 <= evaluate(elements, far)
    )


def _ranges(room: Room, low: Mapping[str, int], high: Mapping[str, int]) -> dict[str, str]:
    found = {}
    for name in room.trace.dims:
        if low[name] == high[name]:
            found[name] = f"[{low[name]}]"
            continue
        step = room.steps[name]
        multiple = f", multiple = {step}" if step > 1 else ""
        found[name] = f"{{ min = {low[name]}, max = {high[name]}{multiple} }}"
    return found


def _elements(found: TracedOperation) -> str:
    """Formula: elements of all arguments and results."""
    parts = _elements_of_each(found)
    total = [p for p in parts if not re.fullmatch(r"[\d* ]+", p)]
    return " + ".join(total or parts)


def _elements_of_each(found: TracedOperation) -> list[str]:
    """Formulas: elements of an argument or result, each formula once."""
    shapes = [found.shapes[i] for i in found.used] + [r.shape for r in found.results]
    products = (
        " * ".join(
            f"({s})" if isinstance(s, str) and not s.isidentifier() else str(s) for s in shape
        )
        or "1"
        for shape in shapes
    )
    return list(dict.fromkeys(products))


def _work(found: TracedOperation) -> str:
    return " + ".join(p for p in (found.products, found.elements) if p != "0")


# -- check of the task -----------------------------------------------------------------------------


def _write(draft: TaskDraft, folder: Path) -> None:
    """Write the task's files: also calibration.json, where CPU cases have a tolerance of their own.

    Raises:
        UserError: The folder cannot be written.
    """
    write(draft, folder)
    if draft.on_cpu is None:
        return
    names = [r.name for r in draft.trace.compared if r.dtype.is_floating_point]
    known = KindCalibration(
        digest=load_task(folder, calibrated=False).digest,
        device=cpu_facts().name,
        torch=str(torch.__version__),
        made=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        cases=len(draft.cpu.check),
        ways=(ROUNDED,),
        results=dict.fromkeys(names, draft.on_cpu),
        left_out={},
    )
    write_calibration(folder, Calibration({"cpu": known}))


def _checked(folder: Path, say: Say) -> tuple[TaskCheck, ...]:
    return tuple(check_kinds(load_task(folder), say=say))


def _without_idle(
    draft: TaskDraft, folder: Path, checks: Sequence[TaskCheck], say: Say
) -> tuple[TaskDraft, tuple[TaskCheck, ...]]:
    """The draft with operations declared that no case sees and that algebra shows to change
    nothing.
    """
    idle = prove_holes(folder, lambda: checks)
    if not idle:
        return draft, tuple(checks)
    draft = draft.with_(idle=tuple(idle))
    _write(draft, folder)
    return draft, _checked(folder, say)


def _mended(
    draft: TaskDraft, folder: Path, checks: Sequence[TaskCheck], say: Say
) -> tuple[TaskDraft, tuple[TaskCheck, ...]]:
    """The draft with further cases, if they close holes: inputs of other magnitudes, and all
    numbers 0, which a limit below a norm of a module's own numbers needs.
    """
    first = draft.cpu.check[0]
    scales = (10.0, 100.0, 1000.0, -1.0, -30.0, 0.05) if draft.rows else ()
    plans = [DraftCase(first.sizes, first.dtype, scale=s, words=f"times_{s:g}") for s in scales]
    if any(e.parameter and e.dtype.is_floating_point for e in draft.arguments):
        plans.append(DraftCase(first.sizes, first.dtype, inputs="blank", words="blank"))
    if not plans:
        return draft, tuple(checks)
    say("some wrong results would pass: trying cases of other magnitudes")
    tried = draft.with_(blank=True)
    with written(tried) as path:
        more = [c for c, _ in accepted(Trials(tried, path), plans)]
    if not more:
        return draft, tuple(checks)
    own = draft.gpu.check[0].dtype
    wider = draft.with_(
        cpu=replace(draft.cpu, check=(*draft.cpu.check, *more)),
        gpu=replace(draft.gpu, check=(*draft.gpu.check, *(_with_dtype(c, own) for c in more))),
        blank=any(c.inputs == "blank" for c in more),
    )
    _write(wider, folder)
    try:
        found = _checked(folder, say)
    except TaskError:
        found = tuple(checks)
    if sum(len(c.holes) for c in found) < sum(len(c.holes) for c in checks):
        return wider, found
    _write(draft, folder)
    return draft, tuple(checks)
