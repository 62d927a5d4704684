"""Lines of a drafted task's reference.py that draw inputs, and the draw itself."""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kagent.authoring.draft.code import CodeWriter
from kagent.authoring.draft.draft import (
    ALONE,
    BLANK,
    COARSE,
    FAINT,
    MASKS,
    MIXED,
    NONFINITE,
    NORMAL,
    ROWS,
    THRESHOLDS,
    UNORDERED,
    WEIGHTS,
    WIDE,
    TaskDraft,
)
from kagent.authoring.draft.pointers import (
    OwnBounds,
    Pointing,
    moving_lines,
    needed_places,
    needed_sizes,
    pointing_lines,
    unordered,
)
from kagent.authoring.draft.source_lines import broken, escaped, quoted, tuple_text
from kagent.authoring.tracing.drawing import Drawing
from kagent.authoring.tracing.example_call import Example

_LEAST_BESIDE = 8
"""Size of a dimension below which a number beside it is that by chance."""
_MANY = 16
"""Numbers of a docstring, at most."""
_WIDTH = 92
PART = 64
"""Elements of a vector that are of one kind."""


def inputs_lines(draft: TaskDraft) -> list[str]:
    """Lines of the function `inputs`, and of those that it calls."""
    trace = draft.trace
    lines, words, varied = [], [], []
    in_any_order = unordered(draft)
    for i in trace.used:
        example = trace.operation.examples[i]
        shape = tuple_text(trace.shapes[i])
        drawing = example.drawing
        lines += _draw(draft, example, drawing, shape, trace.shapes[i])
        lines += moving_lines(draft, i)
        if example in in_any_order:
            order = f"torch.randperm({example.name}.numel(), generator=generator, device=device)"
            lines += [
                f"if case.inputs == {quoted(UNORDERED)}:",
                f"    _order = {order}",
                f"    {example.name} = {example.name}.flatten()[_order].reshape({shape})",
            ]
        words.append(f"{example.name} {drawing.words()}")
        if draft.masks and example in draft.masked:
            empty = "" if draft.masks == "any" else ", empty=False"
            lines += [
                f"if case.inputs == {quoted(MASKS)}:",
                f"    {example.name} = draw_masks({example.name}, generator{empty})",
            ]
        if example.name in draft.wide:
            lines += [
                f"if case.inputs == {quoted(WIDE)}:",
                f"    {example.name} = draw_wide({example.name}, generator)",
            ]
        if example in draft.weights:
            lines += [
                f"if case.inputs == {quoted(WEIGHTS)}:",
                f"    {example.name} = draw_weights({example.name}, generator)",
            ]
        if example in draft.varied:
            varied.append(example.name)
            lines += _varied_call(draft, example.name)
    pairs = [f"{json.dumps(e.name)}: {e.name}" for e in draft.arguments]
    doc = [
        "Draw the arguments of a call.",
        "",
        *_wrapped(f"Distributions: `{NORMAL}` draws as the example does: {'; '.join(words)}."),
    ]
    if varied:
        doc += _wrapped(f"The case's scale multiplies {', '.join(varied)}. " + _row_words(draft))
    for name in draft.thresholds:
        for kind, numbers in draft.around(name).items():
            where = " and ".join(f"{n:g}" for n in numbers)
            if len(numbers) > _MANY:
                where = f"{len(numbers)} numbers from {min(numbers):g} to {max(numbers):g}"
            doc += _wrapped(f"In `{kind}` {name} is around {where}, where a branch changes.")
    if draft.coarse:
        doc += _wrapped(
            f"`{COARSE}`: all floating-point numbers, those of the module, too, are rounded to "
            "few, so that many are equal."
        )
    if draft.masks:
        names = " and ".join(e.name for e in draft.masked)
        rows = "at random, all 1, and all 0" if draft.masks == "any" else "at random, and all 1"
        doc += _wrapped(f"In `{MASKS}` rows of {names} are drawn anew: {rows}.")
    if draft.weights:
        names = " and ".join(e.name for e in draft.weights)
        doc += _wrapped(f"In `{WEIGHTS}` elements of {names} are times 1, 0.001, 100 or -1.")
    if draft.wide:
        names = " and ".join(draft.wide)
        doc += _wrapped(f"In `{WIDE}` the numbers of {names} are of either sign and any magnitude.")
    if in_any_order:
        names = " and ".join(e.name for e in in_any_order)
        doc += _wrapped(f"In `{UNORDERED}` the numbers of {names} are in any order.")
    if draft.blank:
        doc += _wrapped(f"`{BLANK}`: all floating-point numbers are 0, those of the module, too.")
    whole = " ".join(lines)
    body = [f'{n} = int(case.dims["{n}"])' for n in trace.dims]
    body += ["dtype = getattr(torch, case.dtype)"] if "dtype" in whole else []
    found = [
        "def inputs(",
        "    case: Case, generator: torch.Generator, device: torch.device",
        ") -> dict[str, torch.Tensor]:",
        f'    """{doc[0]}',
        *(f"    {line}".rstrip() for line in doc[1:]),
        '    """',
        *(f"    {line}" for line in (*body, *lines)),
        *(f"    {line}" for line in _returned(draft, pairs)),
    ]
    if varied:
        found += ["", "", *_varied(draft)]
    return found


def kinds_without_rows(draft: TaskDraft) -> list[str]:
    """Names of the distributions in which something else is changed than rows."""
    known = {
        COARSE: draft.coarse,
        MASKS: draft.masks,
        WEIGHTS: draft.weights,
        UNORDERED: unordered(draft),
        WIDE: draft.wide,
    }
    return [kind for kind, wanted in known.items() if wanted]


def _varied_call(draft: TaskDraft, name: str) -> list[str]:
    """Lines that make rows of several kinds of an argument."""
    around = draft.around(name)
    begin, end = f"{name} = _varied({name}, case, generator", ")"
    if not around:
        return [f"{begin}{end}"]
    if len(draft.kinds_around) > 1:
        begin, end = f"{begin}, {{", "}.get(case.inputs))"
        lines = [
            line
            for kind, numbers in around.items()
            for line in _table(f"{quoted(kind)}: {{", numbers, "},")
        ]
        return [begin, *(f"    {line}" for line in lines), end]
    ((_, numbers),) = around.items()
    return _table(f"{begin}, {{", numbers, f"}}{end}")


def _table(begin: str, numbers: Mapping[float, int], end: str) -> list[str]:
    """Lines of thresholds, several in each."""
    text = ", ".join(f"{n!r}: {d}" for n, d in numbers.items())
    if len(begin + text + end) <= _WIDTH:
        return [f"{begin}{text}{end}"]
    return [begin, *(f"    {line}" for line in textwrap.wrap(f"{text},", _WIDTH - 8)), end]


def _returned(draft: TaskDraft, pairs: Sequence[str]) -> list[str]:
    if not draft.blank and not draft.coarse:
        return broken("return {", pairs, "}")
    lines = broken("drawn = {", pairs, "}")
    for kind, wanted, made, of in (
        (BLANK, draft.blank, "torch.zeros_like(t)", "t.is_floating_point()"),
        (COARSE, draft.coarse, "round_coarsely(t)", "t.is_floating_point() and t.itemsize > 1"),
    ):
        if wanted:
            lines += [
                f'if case.inputs == "{kind}":',
                "    return {",
                f"        n: {made} if {of} else t",
                "        for n, t in drawn.items()",
                "    }",
            ]
    return [*lines, "return drawn"]


def _row_words(draft: TaskDraft) -> str:
    if not draft.rows:
        return ""
    each = "; ".join(f"`{r}` ({ROWS[r]})" for r in draft.rows)
    row = (
        f"each {PART} elements are a row, which" if draft.flat else "each row of the last dimension"
    )
    but = "".join(f", but for `{r}`" for r in draft.rows if r in ALONE)
    text = f"Of these, {row} is {each}; `{MIXED}` has rows of all kinds{but}."
    if draft.nonfinite:
        apart = " and ".join(f"`{r}`" for r in draft.rows if r in (*FAINT, *ALONE))
        but = f" has all but {apart}, and" if apart else ""
        text += f" `{NONFINITE}`{but} has +inf, -inf or NaN in every third row, one at least."
    return text


_BROKEN = (
    f"    if case.inputs == {quoted(NONFINITE)}:",
    "        other = draw_kinds(n, 3, generator, x.device)",
    "        side = draw_kinds(n, 3, generator, x.device)  # also all before it, or all behind it",
    "        place = torch.arange(columns, device=x.device)",
    "        one = one | (side == 1) & (place < at) | (side == 2) & (place > at)",
    "        broken = draw_rows(n, 3, generator, x.device) & one",
    "        alone = torch.randint(4, (1,), generator=generator, device=x.device)",
    "        other = torch.where(alone < 3, alone, other)  # one sum of all rows hides no infinity",
    "        for i, value in enumerate((torch.inf, -torch.inf, torch.nan)):",
    "            changed = given.masked_fill(broken, value)",
    "            rows = torch.where(broken.any(1, keepdim=True) & (other == i), changed, rows)",
)


_NAMES_OF_FAINT = (
    f"    several = {{{quoted(MIXED)}: ROWS + FAINT, {quoted(NONFINITE)}: ROWS}}",
    "    names = several.get(case.inputs, (case.inputs,))",
)
_FAINT_ROWS = (
    '        elif name in ("minute", "subnormal"):',
    "            least = torch.finfo(x.dtype).tiny",
    '            factor = least if name == "subnormal" else max(least, 1e-18)',
    "            changed = rows * (factor / case.scale)",
)


def _varied(draft: TaskDraft) -> list[str]:
    rows = ("given", *(r for r in draft.rows if r not in (*FAINT, *ALONE)))
    faint = [r for r in draft.rows if r in FAINT]
    flat = draft.flat
    whole = "torch.nn.functional.pad(x, (0, -len(x) % PART)).reshape(-1, PART)"
    kinds = [NORMAL] + [BLANK] * draft.blank + kinds_without_rows(draft)
    among = ", ".join(map(quoted, kinds))
    unchanged = f"in ({among})" if len(kinds) > 1 else f"== {among}"
    if not flat and any(len(e.shape) == 1 for e in draft.varied):
        unchanged += " or x.dim() == 1"  # one number for each column: it has no rows
    at = "torch.randint(columns, (n, 1), generator=generator, device=x.device)"
    if flat:  # not where the last part is padding
        at += " % (len(x) - PART * torch.arange(n, device=x.device)).unsqueeze(1)"
    parameters = ["x: torch.Tensor", "case: Case", "generator: torch.Generator"]
    if draft.thresholds:
        parameters.append("thresholds: dict[float, int] | None = None")
    both = ", ".join(map(quoted, (MIXED, NONFINITE)))
    drawn = draft.kinds_around
    among_kinds = f"in {tuple_text([*map(quoted, drawn)])}"
    around = [
        f"    if case.inputs {among_kinds if len(drawn) > 1 else f'== {quoted(THRESHOLDS)}'}:",
        "        return draw_around(x, thresholds, generator) if thresholds else x",
    ]
    return [
        f"ROWS = {tuple_text([*map(quoted, rows)])}",
        *([f"FAINT = {tuple_text([*map(quoted, faint)])}"] if faint else []),
        *([f"PART = {PART}  # elements of a vector that are of one kind"] if flat else []),
        "",
        "",
        *broken("def _varied(", parameters, ") -> torch.Tensor:"),
        '    """Scale a tensor, and make its rows of the case\'s kinds."""',
        "    if case.scale != 1.0:",
        "        x = x * case.scale",
        *(around if draft.thresholds else []),
        f"    if case.inputs {unchanged}:",
        "        return x",
        *([] if faint else [f"    names = ROWS if case.inputs in ({both}) else (case.inputs,)"]),
        *(_NAMES_OF_FAINT if faint else []),
        *broken("    every = {", [*map(quoted, ("given", *ROWS))], "}"),
        "    if not every.issuperset(names):",
        '        raise ValueError(f"no distribution {case.inputs!r} here")',
        f"    rows = {whole if flat else 'x.reshape(-1, x.shape[-1])'}",
        "    given = rows",
        "    n, columns = rows.shape",
        "    kind = draw_kinds(n, len(names), generator, x.device)",
        f"    at = {at}",
        "    one = torch.arange(columns, device=x.device) == at",
        "    for i, name in enumerate(names):",
        '        if name == "constant":',
        "            changed = rows[:, :1].expand_as(rows)",
        '        elif name in ("tiny", "large", "zeros"):',
        '            changed = rows * {"tiny": 1e-3, "large": 8.0, "zeros": 0.0}[name]',
        '        elif name == "spiked":',
        "            changed = torch.where(one, rows * 100.0, rows)",
        '        elif name == "negative":',
        "            changed = -rows",
        '        elif name == "sparse":',
        "            some = torch.rand(rows.shape, generator=generator, device=x.device) < 0.5",
        "            changed = torch.where(some, rows, 0.0)",
        '        elif name in ("shifted", "sunk"):  # zeros stay: matrices may be triangular',
        '            far = 16.0 * case.scale if name == "shifted" else -128.0',
        "            changed = torch.where(rows == 0, rows, rows + far)",
        *(_FAINT_ROWS if faint else []),
        "        else:",
        "            continue",
        "        rows = torch.where(kind == i, changed, rows)",
        *_BROKEN,
        f"    return {'rows.flatten()[: len(x)]' if flat else 'rows.reshape(x.shape)'}",
    ]


def _draw(
    draft: TaskDraft, example: Example, drawing: Drawing, shape: str, formulas: Sequence[int | str]
) -> list[str]:
    """Lines that draw one argument into a variable of its name."""
    name, own = example.name, example.dtype
    dtype = "dtype" if own == draft.dtype else str(own)
    direct = own.is_floating_point and own.itemsize > 1
    made = f"torch.empty({shape}, dtype={dtype if direct else 'torch.float32'}, device=device)"
    a, b = drawing.a, drawing.b
    if isinstance(drawing, Pointing):
        high = _high(draft, example, int(b))
        return pointing_lines(draft, example, drawing, high, formulas[0], dtype)
    if drawing.kind in ("uniform", "normal"):  # in place: every timed execution draws anew
        lines = [f"{name} = {made}"]
        lines.append(f"{name}.{drawing.kind}_({a!r}, {b!r}, generator=generator)")
        return lines if direct else [*lines, f"{name} = {name}.to({dtype})"]
    if drawing.kind == "integers":
        high = _high(draft, example, int(b))
        # The least of few numbers that point into many places is that by chance.
        low = 0 if not high.isdigit() and _LEAST_BESIDE <= a < 0.1 * b else int(a)
        return [
            f"{name} = torch.randint({low}, {high}, {shape}, generator=generator, "
            f"device=device, dtype={dtype})"
        ]
    if drawing.kind == "chance":
        return [
            f"{name} = (torch.rand({shape}, generator=generator, device=device) < {a!r})"
            f".to({dtype})"
        ]
    if drawing.kind in ("lower", "upper"):
        side = "tril" if drawing.kind == "lower" else "triu"
        ones = f"torch.ones({shape}, dtype=torch.bool, device=device).{side}()"
        made = f"torch.where({ones}, {_number(a)}, {_number(b)})"
        return [f"{name} = {made}.to({dtype})"]
    if drawing.kind == "counted":
        size = shape.strip("(),").split(", ")[-1]
        made = f"{a!r} + {b!r} * torch.arange({size}, device=device)"
        return [f"{name} = ({made}).reshape({shape}).to({dtype})"]
    return _recorded(draft, example, drawing, formulas, dtype)


def draw_example(draft: TaskDraft, i: int, sizes: Mapping[str, int]) -> torch.Tensor:
    """Draw the operation's i-th tensor at other sizes, as the task will."""
    example, formulas = draft.trace.operation.examples[i], draft.trace.shapes[i]
    lines = _draw(draft, example, example.drawing, tuple_text(formulas), formulas)
    device = torch.device("cpu")
    space: dict[str, Any] = {"torch": torch, "aten": torch.ops.aten, "math": math, **sizes}
    space |= {"device": device, "dtype": draft.dtype, "generator": torch.Generator(device)}
    exec("\n".join(lines), space)  # noqa: S102 - the code of the user's own example
    drawn: torch.Tensor = space[example.name]
    return drawn


def constraints_of_draws(draft: TaskDraft) -> tuple[str, ...]:
    """Formulas that hold where the arguments can be drawn: of so many places that are distinct
    there must be as many, and so must there be of those that follow each other.
    """
    found: list[str] = []
    for i in draft.trace.used:
        example, (size, *_) = draft.trace.operation.examples[i], (*draft.trace.shapes[i], 1)
        formula = needed_sizes(draft, example, _high(draft, example, int(_end_of(example))), size)
        formulas = [*([] if formula is None else [formula]), *needed_places(draft, i)]
        found += [f for f in formulas if any(c.isalpha() for c in f)]
    return tuple(dict.fromkeys(found))


def bounds_of_draws(draft: TaskDraft) -> list[str]:
    """Dimensions of other tensors that bound an argument's whole numbers."""
    found: set[str] = set()
    for i in draft.trace.used:
        example, formulas = draft.trace.operation.examples[i], draft.trace.shapes[i]
        if example.dtype.is_floating_point or isinstance(example.drawing, Pointing):
            continue
        lines = _draw(draft, example, example.drawing, tuple_text(formulas), formulas)
        found |= set(re.findall(r"\w+", " ".join(lines))) - {str(f) for f in formulas}
    return [n for n in draft.trace.dims if n in found]


def _end_of(example: Example) -> float:
    return example.drawing.b if example.drawing.kind == "integers" else 0.0


def _high(draft: TaskDraft, example: Example, high: int) -> str:
    """The end of a range of integers: a dimension, where it is one's size in the example, or one
    more, or a size that numbers drawn from it come near to.
    """
    found = _dimension(draft, example, high) if _may_point(example) else None
    if found is not None or isinstance(example.drawing, OwnBounds) or not _may_point(example):
        return found or str(high)
    near = [n for n, s in draft.trace.dims.items() if s >= high > 0.9 * s > 1]
    own = _own(draft, example)
    near = [n for n in near if n not in own] or near
    return near[0] if near else str(high)


def _may_point(example: Example) -> bool:
    """Whether numbers may be places of another tensor, which its size bounds: no codes of 8 bits
    are, and no floating-point numbers, such as zero points of weights.
    """
    return not example.dtype.is_floating_point and example.dtype.itemsize > 1


def _own(draft: TaskDraft, example: Example) -> Sequence[int | str]:
    names = [e.name for e in draft.trace.operation.examples]
    return draft.trace.shapes[names.index(example.name)]


def _dimension(draft: TaskDraft, example: Example, value: int) -> str | None:
    """The dimension of that size, or one that is one less or more: another tensor's, if there is
    one. None where there is none.
    """
    if isinstance(example.drawing, OwnBounds):
        return None
    dims, own = draft.trace.dims, _own(draft, example)
    others = {s: n for n, s in dims.items() if n not in own}
    if value in others:
        return others[value]
    for n, s in dims.items():
        if s == value:
            return n
    for beside, sign in ((1, "+"), (-1, "-")):
        if value - beside >= _LEAST_BESIDE and value - beside in others:
            return f"{others[value - beside]} {sign} 1"
    return None


def _recorded(
    draft: TaskDraft, example: Example, drawing: Drawing, formulas: Sequence[int | str], dtype: str
) -> list[str]:
    """Lines of what was recorded, with the case's sizes for the example's."""
    assert drawing.graph is not None
    assert drawing.node is not None
    by_value = {n: f for n, f in zip(example.shape, formulas, strict=True) if n > 1}

    def sizes(values: Sequence[int]) -> str:
        """Write sizes as formulas of the argument's, at the same place or anywhere."""
        same = len(values) == len(example.shape)
        found = [
            formulas[d] if same and v == example.shape[d] else by_value.get(v, v)
            for d, v in enumerate(values)
        ]
        return f"[{', '.join(map(str, found))}]"

    writer = CodeWriter(
        drawing.graph,
        names={},
        taken={*draft.trace.dims, *(e.name for e in draft.trace.operation.examples), "dtype"},
        size=str,
        sizes=sizes,
        count=lambda n: str(by_value.get(n) or _dimension(draft, example, n) or n),
        bound=lambda n: (_may_point(example) and _dimension(draft, example, n)) or str(n),
        device="device",
        dtype=str,
        generator="generator",
    )
    lines = list(writer.lines(drawing.node))
    return [*lines, f"{example.name} = {writer.name_of(drawing.node)}.to({dtype})"]


def _number(value: float) -> str:
    return repr(value) if value == value and abs(value) < float("inf") else f'float("{value}")'


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(escaped(" ".join(text.split())), 96)
