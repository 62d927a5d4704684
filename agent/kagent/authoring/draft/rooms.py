"""Dimensions of an operation that vary, and its tensors as they are drawn then."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from kagent_sandbox.data.formula import evaluate
from kagent_sandbox.errors import UserError

from kagent.authoring.draft.draft import DraftKind, TaskDraft
from kagent.authoring.draft.inputs import constraints_of_draws, draw_example
from kagent.authoring.draft.pointers import count_places, is_place, with_pointers
from kagent.authoring.draft.reference import require_writable
from kagent.authoring.errors import AuthoringError
from kagent.authoring.tracing.drawing import by_values
from kagent.authoring.tracing.example_call import Example
from kagent.authoring.tracing.operation import Operation
from kagent.authoring.tracing.sizes import Room, Sizes, explore, find_equal, prime
from kagent.authoring.tracing.trace import (
    BY_VALUE,
    Axis,
    TracedOperation,
    results_at,
    trace,
)

LEAST_SIZE = 8
"""Smaller dimensions stay as in the example: channels, kernels' widths, pairs."""
MANY_ARGUMENTS = 12
"""Number of tensors above which the sizes of a module's parameters stay as in the example."""
COUNTED = 100
"""Numbers that a counter is drawn from which a call writes."""
CHECK_ELEMENTS, CHECK_WORK = 6e4, 2e7
"""Elements and operations of a check case, about: a case takes milliseconds on a CPU."""
FIXED_TIMES, MOST_FIXED_WORK = 16, 2.5e8
"""Times as many operations as at the least sizes that each case may take, up to a number of them:
wrong results are tried on cases of not much more."""


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
                " values, as in x[mask], torch.where(mask), torch.nonzero, torch.unique and "
                "torch.bincount: let results have sizes that follow from the arguments', as "
                "torch.where(mask, x, 0) and index_add_ into zeros do"
            ) from cause
        raise refusal or AuthoringError(BY_VALUE)


def narrowed(room: Room, name: str, other: str) -> Room | None:
    """The room in which two dimensions are one; or, without another one, in which a dimension stays
    as in the example. None if there is none.
    """
    found = room.trace
    free = [
        (i, d)
        for i, shape in enumerate(found.shapes)
        for d, size in enumerate(shape)
        if isinstance(size, str) and (other or not re.search(rf"\b{name}\b", size))
    ]
    one = [found.axes(n) for n in found.dims if n not in (name, other)]
    one += [[*found.axes(name), *found.axes(other)]] if other else []
    equal = [pair for axes in one for pair in itertools.pairwise(axes)]
    return _room(found.operation, free, {}, equal) if free else None


def _tied(operation: Operation, names: Mapping[Axis, str], lost: Iterable[str]) -> str:
    """Words for named dimensions that cannot vary, with those that may have to vary with them."""
    if _takes_others(operation, [axis for axis, name in names.items() if name in lost]):
        return (
            "the operation runs at other sizes there, and uses each as a Python number, as a loop "
            "over it does, of which a task would have the example's passes alone, and len(x): "
            "write it as operations on the whole dimension (cumsum, a matrix product, nn.GRU), "
            "and x.shape[0] for len(x), or let it stay"
        )
    text = "the operation takes no other sizes there, or ties it to another dimension"
    sizes = {operation.examples[i].shape[d]: n for (i, d), n in names.items() if n in lost}
    alike = [
        (d, f"{e.name}:{d}", sizes[size])
        for i, e in enumerate(operation.examples)
        for d, size in enumerate(e.shape)
        if size in sizes and (i, d) not in names
    ]
    if not alike:
        return text
    places = ", ".join(place for _, place, _ in alike)
    wheres = {d for (_, d), name in names.items() if name in lost}
    likely = [each for each in alike if each[0] in wheres] or alike[:1]
    ways = " ".join(f"--vary {place}={name}" for _, place, name in likely)
    return f"{text}. Of the same size: {places}. Let those that go with it vary, too: {ways}"


def _takes_others(operation: Operation, axes: Iterable[Axis]) -> bool:
    """Whether an operation runs where dimensions are one larger and nothing else is."""
    shapes = [list(e.shape) for e in operation.examples]
    for i, d in axes:
        shapes[i][d] += 1
    return results_at(operation, shapes) is not None


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
            raise UserError(
                f"--vary {argument}: no tensor of that name: there are {', '.join(names)}"
            )
        i = names.index(argument)
        shape = operation.examples[i].shape
        if not 0 <= axis < len(shape):
            dimensions = (
                f"dimensions 0 to {len(shape) - 1}" if len(shape) > 1 else "dimension 0 alone"
            )
            raise UserError(
                f"--vary {argument}:{axis}: it has shape {list(shape)}: {argument} has "
                + (dimensions if shape else "no dimensions")
            )
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


def _room(
    operation: Operation,
    axes: Sequence[Axis],
    names: Mapping[Axis, str],
    alike: Sequence[tuple[Axis, Axis]] = (),
) -> Room | None:
    """The room that some dimensions have, with pairs of `alike` ones; None if it is none."""
    free, equal = list(axes), list(alike)
    while True:
        found = trace(operation, free, names, equal)
        require_writable(bare(found))
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
        ties = [] if names else _alike(found, fixed)
        if ties and not set(ties) <= set(equal):
            equal += ties
            continue
        gone = {
            (i, d)
            for i, shape in enumerate(found.shapes)
            for d, size in enumerate(shape)
            if isinstance(size, str) and any(re.search(rf"\b{n}\b", size) for n in fixed)
        }
        if not gone & set(free):
            return None
        free = [axis for axis in free if axis not in gone]


def _alike(found: TracedOperation, fixed: Sequence[str]) -> list[tuple[Axis, Axis]]:
    """Pairs of axes of one size in the example that the operation fixes, each for itself: it may
    let them vary together, as one that takes no more places than there are.
    """
    pairs = itertools.pairwise(sorted(fixed, key=lambda n: found.dims[n]))
    same = [(a, b) for a, b in pairs if found.dims[a] == found.dims[b]]
    return [(found.axes(a)[0], found.axes(b)[0]) for a, b in same]


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
    found = redrawn(found, with_pointers(bare(found)))
    draft, examples = bare(found), list(found.operation.examples)
    small = shrunk(room, CHECK_ELEMENTS, CHECK_WORK)
    tried = [room.least, small, room.changed(small, prime) or small]
    for i in found.used:
        drawing = examples[i].drawing
        counter = i in found.written and drawing.kind == "integers" and drawing.b == drawing.a + 1
        if counter:  # a kernel has to read it
            end = count_places(draft, i) if is_place(draft, i) else drawing.a + COUNTED
            if end is not None and end > drawing.b:
                examples[i] = replace(examples[i], drawing=replace(drawing, b=end))
        varies = any(isinstance(size, str) for size in found.shapes[i])
        if examples[i].drawing.kind != "code" or not varies:
            continue
        if not all(_draws(draft, i, sizes) for sizes in tried):
            examples[i] = replace(examples[i], drawing=by_values(examples[i].drawing))
    return replace(room, trace=redrawn(found, tuple(examples)))


def _draws(draft: TaskDraft, i: int, sizes: Mapping[str, int]) -> bool:
    """Whether the example's code draws the i-th tensor at other sizes."""
    try:
        drawn = draw_example(draft, i, sizes)
    except Exception:  # noqa: BLE001 - whatever the example's code does at other sizes
        return False
    return tuple(drawn.shape) == tuple(draft.trace.sizes(draft.trace.shapes[i], sizes))


def redrawn(found: TracedOperation, examples: tuple[Example, ...]) -> TracedOperation:
    """The operation with other tensors."""
    return replace(found, operation=replace(found.operation, examples=examples))


def bare(found: TracedOperation) -> TaskDraft:
    """A draft without cases."""
    return TaskDraft(found, DraftKind((), ()), DraftKind((), ()))


def shrunk(room: Room, elements: float, work: float) -> Sizes:
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
    for formula in constraints_of_draws(bare(room.trace)):
        (name,) = re.findall(r"^\w+(?= <=)", formula) or [""]
        while name in sizes and not evaluate(formula, sizes):
            smaller = {**sizes, name: room.rounded(name, sizes[name] / 2)}
            if smaller == sizes or not room.trace.fits(smaller):
                break
            sizes = smaller
    return sizes
