"""A task as its author wrote it: contract, meaning in torch, tolerance, visible check cases."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from dataclasses import dataclass

from kagent_sandbox.data.arguments import Argument, ResultSpec
from kagent_sandbox.data.case import Case, Size
from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.task import Task
from kagent_sandbox.syntax import parse

from kagent.prompting.cases import SHORT_DTYPES, case_line
from kagent.prompting.hidden_cases import generator_line, strides_text

MEANING_LINES = 30
EPSILON = {
    "float8_e5m2": 2**-2,
    "float8_e4m3fn": 2**-3,
    "bfloat16": 2**-7,
    "float16": 2**-10,
    "float32": 2**-23,
    "float64": 2**-52,
}
"""Machine epsilons of the dtypes that results have. torch itself takes a second to import."""


LAYOUTS = {
    "contiguous": "",
    "transposed": ", with its last two dimensions swapped in memory (the last stride is not 1)",
    "channels_last": ", channels last in memory (the second dimension has stride 1)",
    "strided": ", every other element of its memory (the last stride is 2)",
}


@dataclass(frozen=True, slots=True)
class TaskText:
    """Lines for a prompt."""

    arguments: tuple[str, ...]
    results: tuple[str, ...]
    written: tuple[str, ...]  # names of the arguments that are compared like results
    tolerances: tuple[str, ...]
    meaning: str  # source of torch's own implementation
    inputs: str  # reference.py's text about the distributions
    checks: tuple[str, ...]
    hidden_checks: tuple[str, ...]  # ranges that they are drawn from
    hidden_bench: tuple[str, ...]
    strides: str  # those that occur
    bench_inputs: str  # distributions of the visible benchmark
    allowed: tuple[str, ...]  # torch operations beyond allocation, views, copies and fills


def about_task(task: Task, kind: Kind) -> TaskText:
    """Describe a task to a kernel's author."""
    functions = _functions((task.folder / "reference.py").read_text(encoding="utf-8"))
    eager = functions.get("eager")
    inputs = functions.get("inputs")
    cases = task.cases(kind)
    case = cases.check[0]
    dtypes = {c.dtype: None for c in (*cases.bench, *cases.check)}
    drawn = {c.inputs + (f" times {c.scale:g}" if c.scale != 1 else "") for c in cases.bench}
    return TaskText(
        arguments=tuple(_argument(a, task, case) for a in task.arguments),
        results=tuple(
            f"{r.name}: {_tensor(r.shape, r.dtype)}"
            + ("" if r.valid is None else f" (only the first {r.valid} are compared)")
            for r in task.results
        ),
        written=tuple(a.name for a in task.arguments if a.writes is not None),
        tolerances=tuple(_tolerance(r, tuple(dtypes)) for r in task.calibrated(kind).compared),
        meaning=_cut(eager[0]) if eager is not None else "",
        inputs=" ".join(inputs[1].split()) if inputs is not None else "",
        checks=tuple(case_line(task, c) for c in cases.check),
        hidden_checks=tuple(generator_line(g) for g in cases.hidden_check),
        hidden_bench=tuple(generator_line(g) for g in cases.hidden_bench),
        strides=strides_text(cases, all(a.layout == "contiguous" for a in task.arguments)),
        bench_inputs=" or ".join(sorted(drawn)),
        allowed=tuple(a.replace("aten::", "torch.") for a in task.allow),
    )


@functools.lru_cache(maxsize=16)
def _functions(source: str) -> Mapping[str, tuple[str, str]]:
    """Source without docstring, and docstring, of reference.py's functions."""
    found: dict[str, tuple[str, str]] = {}
    for node in parse(source).body:
        if isinstance(node, ast.FunctionDef):
            text = ast.get_docstring(node) or ""
            if text:
                node.body = node.body[1:] or [ast.Pass()]
            found[node.name] = (ast.unparse(node), text)
    return found


def _cut(text: str) -> str:
    lines = text.splitlines()
    return "\n".join(lines[:MEANING_LINES])


def _argument(argument: Argument, task: Task, case: Case) -> str:
    if argument.shape is None:
        value = task.scalar(argument, case)
        kinds = {bool: "flag", int: "integer", str: "string", tuple: "list of integers"}
        kind = kinds.get(type(value), "number")
        always = f", always {value}" if not isinstance(argument.value, str) else ""
        return f"{argument.name}: a plain Python {kind}{always}"
    text = f"{argument.name}: {_tensor(argument.shape, argument.dtype)}"
    text += LAYOUTS[argument.layout]
    if argument.optional is not None:
        text += f", or None unless {argument.optional}"
    if argument.writes is not None:
        return f"{text} (written in place)"
    return text + (" (may be written)" if argument.mutates else "")


def _tensor(shape: tuple[Size, ...], dtype: str) -> str:
    kind = "the case's dtype" if dtype == "$dtype" else dtype
    return f"[{', '.join(map(str, shape))}] in {kind}" if shape else f"scalar tensor [] in {kind}"


def _tolerance(result: ResultSpec, dtypes: tuple[str, ...]) -> str:
    rows = (
        "the whole tensor is one row"
        if result.row_dims == 0
        else (
            "a row is the last dimension"
            if result.row_dims == 1
            else f"a row is the last {result.row_dims} dimensions"
        )
    )
    of = dtypes if result.dtype == "$dtype" else (result.dtype,)
    floors = ", ".join(
        f"{SHORT_DTYPES.get(d, d)} {result.floor * EPSILON[d]:.2g}" for d in of if d in EPSILON
    )
    return f"{result.name}: k = {result.k:g}, floor = {result.floor:g} eps ({floors}); {rows}"
