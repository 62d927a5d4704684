"""Whole numbers that point to places of another tensor: permutations, and offsets of parts."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from kagent_sandbox.data.formula import evaluate
from torch.fx import GraphModule, Node

from kagent.authoring.draft.draft import TaskDraft
from kagent.authoring.draft.source_lines import tuple_text
from kagent.authoring.tracing.drawing import Drawing, drawn_by
from kagent.authoring.tracing.example_call import Example
from kagent.authoring.tracing.graph import BY_INDEX, ancestors, operation_name

Order: TypeAlias = Literal["distinct", "rising", "sorted"]
_INDEXED = BY_INDEX | {"take"}
_WRITTEN_AT = {
    f"{name}{end}"
    for name in ("index_put", "index_copy", "index_add", "index_fill", "scatter", "scatter_add")
    for end in ("", "_")
}
_WRITTEN_AT |= {"_index_put_impl_", "_unsafe_index_put", "index_reduce", "scatter_reduce"}
"""Operations that write to their first argument by an index."""
_OF_A_CLASS = frozenset({"cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss_forward"})
"""Operations whose second argument has numbers of classes, of the first one's second dimension."""
_COPIES = frozenset({"clone", "to", "_to_copy", "contiguous", "reshape", "repeat", "flatten"})
"""Operations beside views that keep numbers."""
_LEAST = 8
"""Elements and sizes below which numbers are alike by chance."""
_FEWEST = 3
"""Numbers that are offsets, where they rise from 0 to the size of another tensor."""
_BY_CHANCE = math.log(0.003)
"""Logarithm of the probability with which independent numbers may be distinct."""


@dataclass(frozen=True, slots=True)
class Pointing(Drawing):
    """A distribution of whole numbers from `a` to below `b` that do not depend on chance alone.

    Attributes:
        order: "distinct", none twice; "rising", offsets from 0 to the size of another tensor, with
            something between each two; or "sorted", the same with empty parts.
        even: Whether all parts are equal.
    """

    order: Order = "distinct"
    even: bool = False

    def words(self) -> str:
        """The distribution in words."""
        if self.order == "distinct":
            return f"whole numbers from 0 to {self.b - 1:.0f}, none twice"
        parts = "equal parts" if self.even else "parts of any length"
        return f"where {parts} begin, from 0 to {self.b - 1:.0f} in the example"


@dataclass(frozen=True, slots=True)
class Counting(Drawing):
    """A distribution of places that follow each other along one of their own dimensions, as the
    positions of tokens do: there are no more of them than what they point into has.

    Attributes:
        first: The first number.
        axis: The dimension.
        moved: Whether they begin anywhere, where what they point into has room, and leave a gap, in
            each row on its own: a kernel that counts by itself, and does not read them, is wrong.
    """

    first: int = 0
    axis: int = 0
    moved: bool = False

    def words(self) -> str:
        """The distribution in words."""
        if not self.moved:
            return Drawing.words(self)
        return "whole numbers that follow each other from any first one, with a gap, in each row"


@dataclass(frozen=True, slots=True)
class OwnBounds(Drawing):
    """A distribution of whole numbers whose bounds are a dimension's size by chance alone."""


def with_own_bounds(draft: TaskDraft) -> tuple[Example, ...]:
    """The operation's tensors, with the bounds of whole numbers as they are in the example."""
    examples = list(draft.trace.operation.examples)
    for i in draft.trace.used:
        d = examples[i].drawing
        whole = not examples[i].dtype.is_floating_point
        if isinstance(d, Counting):
            examples[i] = replace(examples[i], drawing=replace(d, moved=False))
        elif whole and d.kind in ("integers", "code") and not isinstance(d, Pointing):
            own = OwnBounds(d.kind, d.a, d.b, d.graph, d.node)
            examples[i] = replace(examples[i], drawing=own)
    return tuple(examples)


def rounded_index(graph: GraphModule) -> str:
    """Words on an index that rounding decides, as in a look-up table; "" where there is none."""
    for node in graph.graph.nodes:
        if operation_name(node) not in _INDEXED:
            continue
        table, *places = node.all_input_nodes
        for made in (n for place in places for n in ancestors(place) if n is not table):
            if _is_rounded(made):
                return f"rounding decides an index ({made} of {node}): pass it as an argument"
    return ""


def has_computed_places(draft: TaskDraft) -> bool:
    """Whether the operation reads or writes at an index that it computes itself."""
    for node in draft.trace.graph.graph.nodes:
        if operation_name(node) not in _INDEXED | _WRITTEN_AT:
            continue
        for place in node.all_input_nodes[1:]:
            value = place.meta["val"]
            if not value.is_floating_point() and value.dtype != torch.bool and _is_made(place):
                return True
    return False


def _is_made(node: Node) -> bool:
    """Whether numbers are computed from others that are arguments, and not copies of them."""
    while getattr(node.target, "is_view", False) or operation_name(node) in _COPIES:
        node = node.all_input_nodes[0]
    return node.op == "call_function" and any(n.op == "placeholder" for n in ancestors(node))


def _is_rounded(node: Node) -> bool:
    """Whether an operation makes whole numbers, no flags, of floating-point ones."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.is_floating_point():
        return False
    read = [n.meta.get("val") for n in node.all_input_nodes]
    made = any(isinstance(v, torch.Tensor) and v.is_floating_point() for v in read)
    return made and value.dtype != torch.bool and node.op == "call_function"


def with_pointers(draft: TaskDraft) -> tuple[Example, ...]:
    """The operation's tensors, with those as `Pointing` or `Counting` whose values say so, and
    those that all point to one place anywhere.
    """
    examples = list(draft.trace.operation.examples)
    for i in draft.trace.used:
        found = _pointing(draft, i) or _counting(examples[i]) or _at_one_place(draft, i)
        if isinstance(found, Counting) and not examples[i].parameter:
            wide = examples[i].dtype.itemsize >= 4  # up to twice as many fit
            moved = bool(_places(draft, i)) or (wide and not is_place(draft, i))
            found = replace(found, moved=moved)
        if found is not None:
            examples[i] = replace(examples[i], drawing=found)
    return tuple(examples)


def with_offsets(draft: TaskDraft) -> tuple[Example, ...] | None:
    """The operation's tensors, with vectors of numbers from 0 to another tensor's size as offsets,
    which they may be; None where there are none.
    """
    examples = list(draft.trace.operation.examples)
    for i in draft.trace.used:
        example = examples[i]
        a, b = example.drawing.a, int(example.drawing.b)
        numbers = example.drawing.kind == "integers" and not isinstance(example.drawing, Pointing)
        few = example.drawing.least_step is not None and example.drawing.least_step >= 0
        vector = _is_vector(example, least=_FEWEST if few else _LEAST)
        if numbers and a == 0 and vector and size_of(draft, example, b - 1):
            empty = example.drawing.least_step == 0 or example.shape[0] > b
            order: Order = "sorted" if empty else "rising"
            examples[i] = replace(example, drawing=Pointing("integers", 0, b, order=order))
    return None if tuple(examples) == draft.trace.operation.examples else tuple(examples)


def size_of(draft: TaskDraft, example: Example, size: int) -> str | None:
    """Formula of a dimension of that size, of another tensor; None if there is none."""
    if size < _LEAST:
        return None
    trace = draft.trace
    for i in trace.used:
        other = trace.operation.examples[i]
        if other.name == example.name:
            continue
        for n, formula in zip(other.shape, trace.shapes[i], strict=True):
            if n == size:
                return str(formula)
    return None


def pointing_lines(
    draft: TaskDraft, example: Example, drawing: Pointing, high: str, size: int | str, dtype: str
) -> list[str]:
    """Lines that draw such numbers.

    Args:
        draft: The task.
        example: The tensor.
        drawing: Its distribution.
        high: The end of the range, where that is no size of offsets.
        size: Formula of its number of elements.
        dtype: Text of its dtype.
    """
    name, chance = example.name, "generator=generator, device=device"
    if drawing.order == "distinct":
        return [f"{name} = torch.randperm({high}, {chance})[: {size}].to({dtype})"]
    end, closed = _end(draft, example, drawing)
    if drawing.even:
        parts = f"max(1, {size} - 1)" if closed else f"({size})"
        places = f"torch.arange({size}, device=device)"
        return [f"{name} = ({places} * ({end}) // {parts}).to({dtype})"]
    pad = "torch.nn.functional.pad"
    inner = f"(_at * ({end} + 1)).long().sort().values"
    if drawing.order == "rising":
        inner = f"(_at * ({end} - ({size}) + 2)).long().sort().values"
        inner += f" + torch.arange(1, {size} - 1, device=device)"
    return [
        f"_uneven = 1 + ({size}) * torch.randint(2, (1,), {chance})  # most is in one part, or not",
        f"_at = torch.rand({size} - 2, dtype=torch.float64, {chance}) ** _uneven",
        f"{name} = {inner}",
        f"{name} = {pad}({pad}({name}, (1, 0)), (0, 1), value={end})",
    ] + ([f"{name} = {name}.to({dtype})"] if dtype != "torch.int64" else [])


def needed_sizes(draft: TaskDraft, example: Example, high: str, size: int | str) -> str | None:
    """Formula that holds where such numbers can be drawn; None where they always can."""
    drawing = example.drawing
    if not isinstance(drawing, Pointing) or drawing.order == "sorted":
        return None
    most = high
    if drawing.order == "rising":
        end, closed = _end(draft, example, drawing)
        most = f"{end} + 1" if closed else end
    return f"{size} <= {most}"


def needed_places(draft: TaskDraft, i: int) -> list[str]:
    """Formulas that hold where what the i-th tensor points into has a place for each of its
    numbers, which follow each other.
    """
    drawing = draft.trace.operation.examples[i].drawing
    if not isinstance(drawing, Counting):
        return []
    size = draft.trace.shapes[i][drawing.axis]
    before = f" - {drawing.first}" if drawing.first and not drawing.moved else ""
    return [f"{size} <= {places}{before}" for places in _places(draft, i)]


def moving_lines(draft: TaskDraft, i: int) -> list[str]:
    """Lines that let the i-th tensor's numbers begin anywhere, where they are `moved`: they leave
    out some of the places that they point into, or, where there are no more places, go around. What
    points into nothing may be up to twice as large.
    """
    example, shape = draft.trace.operation.examples[i], draft.trace.shapes[i]
    drawing = example.drawing
    if not isinstance(drawing, Counting) or not drawing.moved:
        return []
    name, size, axis = example.name, shape[drawing.axis], drawing.axis
    places = _places(draft, i)
    rows = [*map(str, shape[:axis]), "1", *map(str, shape[axis + 1 :])]
    of_row = tuple_text(rows)
    chance = "generator=generator, device=device"
    from_0 = f"{name} - {drawing.first}" if drawing.first else name
    if str(size) in places:
        first = f"torch.randint({size}, {of_row}, {chance})"
        return [f"{name} = (({from_0} + {first}) % ({size})).to({example.dtype})"]
    most = places[0] if len(places) == 1 else f"min({', '.join(places)})"
    room = f"{most} - {size}" if places else str(size)
    along = ", ".join("-1" if d == axis else "1" for d in range(len(shape)))
    return [
        f"_gap = torch.randint({size}, {of_row}, {chance})  # is before this one",
        f"_first = torch.randint({room} + 1, {tuple_text(['2', *rows])}, {chance})",
        "_first, _behind = _first.sort(0).values",
        f"_first = torch.where(torch.arange({size}, device=device).reshape({along}) < _gap, "
        "_first, _behind)",
        f"{name} = ({from_0} + _first).to({example.dtype})",
    ]


def _places(draft: TaskDraft, i: int) -> list[str]:
    """Formulas of the sizes of what the i-th tensor points into."""
    graph = draft.trace.graph.graph
    place = [n for n in graph.nodes if n.op == "placeholder"][i]
    found = []
    for node in graph.nodes:
        for table, axis in _pointed_into(node, place):
            found.append(draft.trace.text(table.meta["val"].shape[axis]))
    return list(dict.fromkeys(found))


def count_places(draft: TaskDraft, i: int) -> int | None:
    """Number of the places that the one number of the i-th tensor may point to, in the example;
    None if it is not one number, or points into nothing or to several sizes.
    """
    sizes = {int(evaluate(text, draft.trace.dims)) for text in _places(draft, i)}
    single = math.prod(draft.trace.operation.examples[i].shape) == 1
    return sizes.pop() if single and len(sizes) == 1 else None


def is_place(draft: TaskDraft, i: int) -> bool:
    """Whether an operation may read or write at an index that comes from the i-th tensor."""
    nodes = draft.trace.graph.graph.nodes
    given = [n for n in nodes if n.op == "placeholder"][i]
    by_index = (n for n in nodes if operation_name(n) in _INDEXED | _WRITTEN_AT)
    return any(given in ancestors(each) for n in by_index for each in n.all_input_nodes[1:])


def unordered(draft: TaskDraft) -> list[Example]:
    """Tensors whose numbers follow each other and are nothing but places of other tensors: in any
    order they are as good.
    """
    nodes = [n for n in draft.trace.graph.graph.nodes if n.op == "placeholder"]
    return [
        example
        for i, example in enumerate(draft.trace.operation.examples)
        if i in draft.trace.used
        and isinstance(example.drawing, Counting)
        and example.drawing.moved
        and _only_points(nodes[i], nodes[i])
    ]


def _only_points(node: Node, place: Node) -> bool:
    """Whether an argument's numbers are used as places alone."""
    return all(
        _only_points(user, place)
        if getattr(user.target, "is_view", False) or operation_name(user) in _COPIES
        else bool(_pointed_into(user, place))
        for user in node.users
    )


def _pointed_into(node: Node, place: Node) -> list[tuple[Node, int]]:
    """Tensors that an operation reads or writes at an index of some numbers, and the dimension."""
    name, args = operation_name(node), node.args
    found: list[tuple[Any, Any, Any]] = []  # the table, the dimension, the index
    if name == "index" or "index_put" in name:
        found = [(args[0], d, each) for d, each in enumerate(args[1])]  # type: ignore[arg-type]
    elif name == "embedding":
        found = [(args[0], 0, args[1])]
    elif name in _OF_A_CLASS:
        found = [(args[0], min(1, args[0].meta["val"].dim() - 1), args[1])]  # type: ignore[union-attr]
    elif name in {"gather", "index_select"} | _WRITTEN_AT:
        found = [(args[0], args[1], args[2])]
    return [(table, axis) for table, axis, index in found if _is_view_of(index, place)]


def _is_view_of(node: Any, other: Node) -> bool:
    """Whether a node has another's numbers: itself, its views and its copies."""
    while isinstance(node, Node) and node is not other:
        view = getattr(node.target, "is_view", False)
        if not view and operation_name(node) not in _COPIES:
            return False
        node = node.args[0]
    return node is other


def _counting(example: Example) -> Counting | None:
    drawing, dtype = example.drawing, example.dtype
    whole = not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool
    if drawing.kind not in ("code", "counted") or not whole or not example.shape:
        return None
    values = _values(drawing, example.shape[-1])
    if values is None or not 0 < values.numel() == math.prod(example.shape):
        return None
    values = values.reshape(example.shape)
    first = int(values.min())
    for axis, size in enumerate(example.shape):
        counted = torch.arange(first, first + size).reshape(-1, *[1] * (values.dim() - axis - 1))
        if size >= _LEAST and first >= 0 and bool((values == counted).all()):
            d = drawing
            return Counting(d.kind, d.a, d.b, d.graph, d.node, first=first, axis=axis)
    return None


def _at_one_place(draft: TaskDraft, i: int) -> Drawing | None:
    """Numbers from all places, instead of those of an example that point to one place: a kernel
    that does not read them would be right.
    """
    example = draft.trace.operation.examples[i]
    if example.dtype.is_floating_point or math.prod(example.shape) < 2:
        return None
    if example.drawing.kind == "integers":
        same = example.drawing.b - example.drawing.a == 1
    else:
        values = _values(example.drawing, example.shape[-1])
        same = values is not None and len(set(values.flatten().tolist())) == 1
    sizes = {int(evaluate(text, draft.trace.dims)) for text in _places(draft, i)} if same else ()
    return Drawing("integers", 0, min(sizes)) if sizes and min(sizes) > 1 else None


def _end(draft: TaskDraft, example: Example, drawing: Pointing) -> tuple[str, bool]:
    """Formula of the size that offsets end at, and whether the last one is that size itself."""
    last = int(drawing.b) - 1
    closed = size_of(draft, example, last)
    if closed is not None:
        return closed, True
    step = last // max(1, example.shape[0] - 1)
    return size_of(draft, example, last + step) or str(last + step), False


def _pointing(draft: TaskDraft, i: int) -> Pointing | None:
    example = draft.trace.operation.examples[i]
    if not _is_vector(example, _FEWEST):
        return None
    values = _values(example.drawing, example.shape[0])
    if values is None or tuple(values.shape) != example.shape:
        return None
    first, last, steps = int(values[0]), int(values[-1]), values.diff()
    if last > first and bool((steps >= 0).all()):
        even = bool((steps == steps[0]).all())
        if first or (even and int(steps[0]) == 1):
            return None
        ends = size_of(draft, example, last)
        if ends is None and even:
            ends = size_of(draft, example, last + int(steps[0]))
        order: Order = "rising" if int(steps.min()) > 0 else "sorted"
        return Pointing("integers", 0, last + 1, order=order, even=even) if ends else None
    distinct = example.drawing.kind == "code" and _is_vector(example)
    if distinct and (_permuted(example.drawing, values) or _distinct(values)):
        return Pointing("integers", int(values.min()), int(values.max()) + 1)
    return None


def _is_vector(example: Example, least: int = _LEAST) -> bool:
    dtype = example.dtype
    whole = not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool
    return whole and len(example.shape) == 1 and example.shape[0] >= least


def _permuted(drawing: Drawing, values: torch.Tensor) -> bool:
    """Whether numbers are distinct since they are some of a permutation."""
    assert drawing.node is not None
    node = drawing.node
    while operation_name(node) in _COPIES | {"slice"} and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return operation_name(node) == "randperm" and int(values.min()) >= 0


def _distinct(values: torch.Tensor) -> bool:
    """Whether numbers are distinct, and none below 0, and not by chance."""
    n, high = values.numel(), int(values.max()) + 1
    if int(values.min()) < 0 or bool((values.sort().values.diff() == 0).any()):
        return False
    return sum(math.log1p(-i / high) for i in range(n)) < _BY_CHANCE


@functools.lru_cache(maxsize=64)
def _values(drawing: Drawing, elements: int) -> torch.Tensor | None:
    """The values of the example, where its code or a pattern tells them."""
    if drawing.kind == "counted":
        return (drawing.a + drawing.b * torch.arange(elements)).long()
    if drawing.kind != "code":
        return None
    try:
        return drawn_by(drawing).long().cpu()
    except Exception:  # noqa: BLE001 - whatever the example's code does on real tensors
        return None
