"""The text of a drafted task's reference.py: float64 reference, eager, and the rule for indices."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch.fx import Node

from kagent.authoring.draft.code import CodeWriter
from kagent.authoring.draft.draft import HALVES, TaskDraft
from kagent.authoring.draft.inputs import inputs_lines
from kagent.authoring.draft.source_lines import broken, escaped
from kagent.authoring.errors import AuthoringError
from kagent.authoring.tracing.graph import results_of


def reference_py(draft: TaskDraft) -> str:
    """The text of reference.py.

    Raises:
        AuthoringError: The operation cannot be written down.
    """
    arguments = draft.arguments
    numbers = draft.trace.operation.numbers
    names = [e.name for e in arguments]
    typed = [f"{n}: torch.Tensor" for n in names]
    typed += [f"{n}: {type(v).__name__}" for n, v in numbers.items()]
    lines, results = _code(draft)
    _, chosen = _dtype_of_floats(draft)
    default = [f"{chosen}: torch.dtype = {draft.dtype}"] if chosen else []
    written = [draft.trace.operation.examples[i] for i in draft.trace.written]
    wide = [
        f"        {e.name}={e.name}.double(),"
        if e.dtype.is_floating_point and e not in written
        else f"        {e.name}={e.name},"
        for e in arguments
    ]
    wide += [f"        {n}={n}," for n in numbers]
    if chosen:
        wide.append(f"        {chosen}=torch.float64,")
    copies = [
        f"    {e.name} = {e.name}.to(torch.float64, copy=True)"
        if e.dtype.is_floating_point
        else f"    {e.name} = {e.name}.clone()"
        for e in written
    ]
    left = [e.name for e in written]
    returned = [f"result_{i}" for i in range(len(results))] if written else []
    while set(returned) & set(names):
        returned = [f"{r}_" for r in returned]
    call = f"{', '.join(returned)} = " if returned else "" if written else "return "
    tail = [f"    return {', '.join((*returned, *left))}"] if written else []
    rule = _rule(draft, typed, default, wide) if draft.undecided else []
    text = "\n".join(
        [
            f'"""{escaped(draft.trace.operation.summary)}.',
            "",
            f"Made from {escaped(draft.trace.operation.origin)} by running it on",
            "symbolic tensors: inputs, float64 reference, torch's own implementation.",
            '"""',
            "",
            "from __future__ import annotations",
            "",
            "import math  # noqa: F401 - sizes may need it",
            "from collections.abc import Callable, Mapping",
            "from typing import TYPE_CHECKING",
            "",
            "import torch",
            *_helpers(draft),
            "",
            "if TYPE_CHECKING:",
            "    from kagent_sandbox.data.task import Case",
            "",
            "aten = torch.ops.aten",
            "",
            "",
            *inputs_lines(draft),
            "",
            "",
            *broken("def reference(", ["*", *typed], f") -> {_kind(len(draft.trace.compared))}:"),
            '    """The same operations in float64."""',
            *copies,
            f"    {call}eager(",
            *wide,
            "    )",
            *tail,
            "",
            "",
            *broken("def eager(", ["*", *typed, *default], f") -> {_kind(len(results))}:"),
            '    """The operations of torch that the function came down to."""',
            *(f"    {line}" for line in lines),
            *([f"    return {', '.join(results)}"] if results else []),
            "",
            "",
            *rule,
            "def experts() -> Mapping[str, Callable[..., object]]:",
            '    """None. Libraries that compute the same become further baselines here."""',
            "    return {}",
        ]
    )
    return text + "\n"


def _rule(
    draft: TaskDraft, typed: Sequence[str], default: Sequence[str], wide: Sequence[str]
) -> list[str]:
    """Lines of the rules that accept other indices and numbers, and of what they come from.

    Args:
        draft: The task.
        typed: Parameters of `eager`.
        default: One more that it may have, with a default.
        wide: Its arguments in the call by `reference`, a line each.
    """
    names = [t.partition(":")[0] for t in typed]
    lines, values = _code(draft, *(c.values for c in draft.undecided))
    body = [f"    {line}" for line in lines]
    found = {c.result: c.mask(i) for i, c in enumerate(draft.undecided)}
    masks = [found.get(i, "False") for i in range(len(draft.trace.results))]
    rules = dict.fromkeys(c.RULE for c in draft.undecided)
    parameters = ["results: tuple[torch.Tensor, ...]", "expected: tuple[torch.Tensor, ...]"]
    return [
        f"K, FLOOR = {draft.k}, {draft.floor}  # as in task.toml",
        *"\n".join(rules).splitlines(),
        "",
        "",
        *broken("def _decided_by(", ["*", *typed, *default], ") -> tuple[torch.Tensor, ...]:"),
        '    """Values that indices point into, and values that were rounded."""',
        *body,
        f"    return ({', '.join(values)},)",
        "",
        "",
        *broken("def accept(", [*parameters, "*", *typed], ") -> tuple[torch.Tensor | bool, ...]:"),
        '    """Any index of an equal value is right, and near a tie the number beside."""',
        "    exact = _decided_by(",
        *wide,
        "    )",
        *(f"    {x}" for x in broken("rounded = _decided_by(", [f"{n}={n}" for n in names], ")")),
        *(
            f"    {x}"
            for x in broken("return (", masks if len(masks) > 1 else [f"{masks[0]},"], ")")
        ),
        "",
        "",
    ]


def _helpers(draft: TaskDraft) -> list[str]:
    """The import of what draws rows of several kinds."""
    names = ["draw_masks"] * bool(draft.masks) + ["draw_wide"] * bool(draft.wide)
    if draft.varied:
        names += ["draw_around"] * bool(draft.thresholds) + ["draw_kinds", "draw_rows"]
        names += ["round_coarsely"] * draft.coarse + ["draw_weights"] * bool(draft.weights)
    return [f"from kagent_sandbox.draws import {', '.join(sorted(names))}"] if names else []


def _dtype_of_floats(draft: TaskDraft) -> tuple[str, str]:
    """Text of the dtype that tells the reference from torch's own implementation: an argument's,
    or a parameter's where floating-point numbers are made of whole ones alone. That parameter's
    name, which is empty where there is none.
    """
    floats = [e for e in draft.arguments if e.dtype.is_floating_point]
    if floats:
        anchor = next((e for e in floats if e.dtype == draft.dtype), floats[0])
        return f"{anchor.name}.dtype", ""
    values = [n.meta.get("val") for n in draft.trace.graph.graph.nodes]
    if not any(isinstance(v, torch.Tensor) and v.is_floating_point() for v in values):
        return "", ""
    taken = {*draft.trace.dims, *draft.trace.operation.numbers, *(e.name for e in draft.arguments)}
    name = "made"
    while name in taken:
        name += "_"
    return name, name


def _of_8_bits(node: Node) -> bool:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype.is_floating_point and dtype.itemsize == 1


def _promotes(draft: TaskDraft) -> bool:
    """Whether torch promotes the dtype that `_dtype_of_floats` names: none of 8 bits."""
    floats = [e.dtype for e in draft.arguments if e.dtype.is_floating_point]
    return not floats or any(d.itemsize > 1 for d in floats)


def _code(draft: TaskDraft, *wanted: Node) -> tuple[list[str], list[str]]:
    """Lines of the operation, and the names of its results; or of nodes that it computes."""
    trace = draft.trace
    placeholders = [n for n in trace.graph.graph.nodes if n.op == "placeholder"]
    examples = trace.operation.examples
    names = {p.name: e.name for p, e in zip(placeholders, examples, strict=True)}
    own, chosen = _dtype_of_floats(draft)

    def dtype(value: torch.dtype) -> str:
        # In the reference's float64 all others are float64, too.
        if not value.is_floating_point or value.itemsize == 1:
            return str(value)
        if value == draft.dtype and value in HALVES:
            return own
        if own and (value in HALVES or not _promotes(draft)):
            return f"torch.float64 if {own} == torch.float64 else {value}"
        return f"torch.promote_types({own}, {value})"

    writer = CodeWriter(
        trace.graph,
        names=names,
        taken={*trace.dims, *trace.operation.numbers, chosen, "aten", "torch", "math"},
        size=trace.text,
        device=f"{draft.arguments[0].name}.device",
        dtype=dtype,
    )
    lines = list(writer.lines(*wanted))
    returned = results_of(trace.graph)
    results = [writer.name_of(n) for n in wanted or returned]
    if own and not wanted:  # torch computes nothing in 8 bits, nor does a comparison
        results = [
            f"{name}.double() if {own} == torch.float64 else {name}" if _of_8_bits(n) else name
            for n, name in zip(returned, results, strict=True)
        ]
    return [*_sizes_of(draft, lines), *lines], results


def _sizes_of(draft: TaskDraft, lines: Sequence[str]) -> list[str]:
    """Lines that take the dimensions from the arguments' shapes, those that are used."""
    text = " ".join(lines)
    found = []
    for name in draft.trace.dims:
        if re.search(rf"\b{name}\b", text) is None:
            continue
        i, d = next(
            (i, shape.index(name))
            for i, shape in enumerate(draft.trace.shapes)
            if i in draft.trace.used and name in shape
        )
        found.append(f"{name} = {draft.trace.operation.examples[i].name}.shape[{d}]")
    return found


def _kind(results: int) -> str:
    """Type of a function with so many results."""
    return {0: "None", 1: "torch.Tensor"}.get(results, "tuple[torch.Tensor, ...]")


def require_writable(draft: TaskDraft) -> None:
    """Make sure that the operation can be written down.

    Raises:
        AuthoringError: It cannot.
    """
    if not draft.arguments:
        raise AuthoringError("no result depends on a tensor")
    reference_py(draft)
