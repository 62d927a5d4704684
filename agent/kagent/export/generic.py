"""The operator of a task that has no operator.py: its entry's signature, forward only.

Shapes come from task.toml: dimensions are read off the tensors' shapes and the scalars, every
formula is checked, and what does not fit goes to the reference, the task's `eager`. The task's
reference.py is shipped beside the operator, as operators/_TASK_reference.py.
"""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Iterable, Mapping, Sequence

from kagent_sandbox.data.arguments import Argument
from kagent_sandbox.data.case import Case, Size
from kagent_sandbox.data.task import Task
from kagent_sandbox.errors import TaskError
from kagent_sandbox.syntax import parse, parse_expression

from kagent.export.templating import render

_RESERVED = {
    "torch", "nn", "plain", "holds", "found", "fits", "dtype", "dtypes", "itemsize", "cdiv",
}  # fmt: skip


def operator_source(task: Task) -> str:
    """The text of operators/TASK.py.

    Raises:
        TaskError: A dimension cannot be read off the arguments.
    """
    text = render("operator.py.j2", **template_values(task))
    parse(text)
    return text


def template_values(task: Task) -> dict[str, object]:
    """Facts of a task for a template: its parameters, and code for its shapes.

    Raises:
        TaskError: A dimension cannot be read off the arguments.
    """
    refuse_unsuited(task)
    known = _bindings(task)
    tensors = [a for a in task.arguments if a.shape is not None]
    if not tensors:
        raise _needs_own(task, "none of its arguments is a tensor")
    source = dtype_source(task)
    where = task.arguments[source] if isinstance(source, int) else tensors[0]
    dtype = f"{where.name}.dtype" if isinstance(source, int) else f"torch.{source}"
    if missing := sorted(set(task.dims) - set(known)):
        raise _needs_own(task, f"{', '.join(missing)} cannot be read off its arguments")
    names = {a.name for a in task.arguments}
    taken = (names & {a.name for a in tensors} & set(known)) | ((names | set(known)) & _RESERVED)
    if taken or any(n.startswith("_") for n in (*names, task.entry)):
        raise _needs_own(task, f"its names {', '.join(sorted(taken or names))} are taken here")
    shapes = [
        *(s for a in task.arguments for s in a.shape or ()),
        *(s for r in task.compared for s in r.shape),
    ]
    values = (a.value for a in task.arguments)
    formulas = " ".join(map(str, (*shapes, *values, *task.constraints)))
    same_dtype = f"{where.name}.dtype == dtype"
    on_tensors = [c for c in _tensor_checks(task, known) if c != same_dtype]
    dtypes = ", ".join(f"torch.{d}" for d in sorted(_dtypes(task)))
    fitting = [*([f"{dtype} in {{{dtypes}}}"] if isinstance(source, int) else ()), *on_tensors]
    return {
        "task": task,
        "summary": _in_docstring(task.summary),
        "signature": _in_docstring(task.signature),
        "function": task.entry,
        "module": _camel(task.entry),
        "parameters": _parameters(task),
        "tensors": [a.name for a in tensors],
        "ranks": _tuple([f"{a.name}.dim()" for a in tensors]),
        "rank_values": repr(tuple(len(a.shape or ()) for a in tensors)),
        "schema": _schema(task),
        "bindings": known,
        "result_bindings": _used(known, (size for r in task.results for size in r.shape)),
        "checks": [*on_tensors, *_scalar_checks(task, known)],
        "fitting": fitting,
        "fitting_bindings": _used(known, fitting),
        "first": where.name,
        "case_dtype": dtype,
        "results": [
            {
                "name": r.name,
                "shape": _tuple(map(_code, r.shape)),
                "dtype": _dtype(r.dtype),
                "doc": _in_docstring(f"[{', '.join(map(str, r.shape))}]"),
            }
            for r in task.results
        ],
        "returns": _returns(len(task.results)),
        "itemsize": "itemsize" in formulas,
        "cdiv": "cdiv(" in formulas,
        "mutates": bool(task.mutates),
    }


def refuse_unsuited(task: Task) -> None:
    """Refuse tasks whose calls an exported operator could not tell apart, whoever writes it.

    Raises:
        TaskError: It has optional arguments, layouts, lists, dimensions that are texts, results
            of which only a part is valid, or a rule that accepts other results.
    """
    if task.accept:
        raise TaskError(
            f"{task.folder}: the task accepts other results than the reference's, which exported "
            "libraries cannot test"
        )
    for result in task.results:
        if result.valid is not None:
            raise TaskError(
                f"{task.folder}: of result {result.name} only {result.valid} rows are valid, which "
                "exported libraries cannot test"
            )
    if dtype_source(task) is None:
        raise TaskError(
            f"{task.folder}: no tensor among its arguments has the cases' dtype ($dtype), and the "
            "cases have several: exported operators could not tell a call's"
        )
    for argument in task.arguments:
        if argument.layout != "contiguous":
            raise TaskError(
                f"{task.folder}: argument {argument.name} is {argument.layout}: exported operators "
                "pass contiguous tensors to kernels"
            )
        if argument.optional is not None:
            raise TaskError(
                f"{task.folder}: argument {argument.name} is optional, which exported operators' "
                "arguments cannot be: export a task for each of the two"
            )
    cases = [*task.gpu.check, *task.gpu.bench, *task.cpu.check, *task.cpu.bench]
    odd = [n for c in cases for n, v in c.dims.items() if isinstance(v, tuple | str)]
    odd += [a.name for a in task.arguments if isinstance(a.value, tuple)]
    if odd:
        raise TaskError(
            f"{task.folder}: {odd[0]} is a list or a text: exported operators choose kernels by "
            "numbers and flags alone"
        )


def dtype_source(task: Task) -> int | str | None:
    """Position of the argument that gives a call's dtype, in the sense of the task's cases.

    Returns:
        The position of the first argument that has the case's dtype; the dtype itself where no
        tensor has it and all cases are of one; None where the cases are of several.
    """
    for position, argument in enumerate(task.arguments):
        if argument.shape is not None and argument.dtype == "$dtype":
            return position
    found = _dtypes(task)
    return found.pop() if len(found) == 1 else None


def _dtypes(task: Task) -> set[str]:
    """Dtypes of the task's cases."""
    found: set[str] = set()
    for of in (task.gpu, task.cpu):
        found |= {c.dtype for c in (*of.check, *of.bench)}
        found |= {d for g in (*of.hidden_check, *of.hidden_bench) for d in g.dtype}
    return found


def _returns(count: int) -> str:
    """Type of what a function returns that has so many results."""
    if count == 0:
        return "None"
    names = ", ".join(["torch.Tensor"] * count)
    return names if count == 1 else f"tuple[{names}]"


def needs_reference(operator_py: str) -> bool:
    """Whether an operator's text is one of these, and its task's reference.py goes with it."""
    line = r"^from \. import _\w+_reference as _task$"
    return re.search(line, operator_py, re.MULTILINE) is not None


def _bindings(task: Task) -> Mapping[str, str]:
    """Each dimension, and the code that reads it: a tensor's size or a scalar."""
    found: dict[str, str] = {}
    for argument in task.arguments:
        if isinstance(argument.value, str) and argument.value in task.dims:
            found.setdefault(argument.value, argument.name)
        for i, size in enumerate(argument.shape or ()):
            if isinstance(size, str) and size in task.dims:
                found.setdefault(size, f"{argument.name}.shape[{i}]")
    return {n: found[n] for n in task.dims if n in found}


def _used(bindings: Mapping[str, str], texts: Iterable[object]) -> dict[str, str]:
    """The bindings of dimensions that texts name."""
    text = " ".join(map(str, texts))
    return {n: where for n, where in bindings.items() if re.search(rf"\b{n}\b", text)}


def _tensor_checks(task: Task, known: Mapping[str, str]) -> list[str]:
    """Conditions on tensors of the task's ranks under which sizes and dtypes are its, too."""
    found: list[str] = []
    for argument in task.arguments:
        name = argument.name
        if argument.shape is None:
            continue
        for i, size in enumerate(argument.shape):
            if known.get(str(size)) != f"{name}.shape[{i}]":
                found.append(f"{name}.shape[{i}] == {_code(size)}")
        found.append(f"{name}.dtype == {_dtype(argument.dtype)}")
    return found


def _scalar_checks(task: Task, known: Mapping[str, str]) -> list[str]:
    """Conditions on scalars and dimensions under which a call is the task's."""
    found: list[str] = []
    for argument in task.arguments:
        name, value = argument.name, argument.value
        if argument.shape is None and known.get(str(value)) != name:
            found.append(f"{name} == {f'({value})' if isinstance(value, str) else repr(value)}")
    return [*found, *(f"({c})" for c in task.constraints)]


def _parameters(task: Task) -> list[dict[str, object]]:
    """Parameters in order; constants are defaults where nothing after them has none."""
    found = [_parameter(task, a) for a in task.arguments]
    for i, parameter in enumerate(found):
        if any(p["default"] is None for p in found[i:]):
            parameter["default"] = None
    return found


def _parameter(task: Task, argument: Argument) -> dict[str, object]:
    if argument.shape is not None:
        return {
            "name": argument.name,
            "type": "torch.Tensor",
            "default": None,
            "doc": f"[{', '.join(map(str, argument.shape))}]"
            + ("" if argument.dtype == "$dtype" else f", {argument.dtype}")
            + (", written to" if argument.may_change else ""),
        }
    first = next(iter((*task.gpu.check, *task.cpu.check)))
    value = argument.value
    constant = not isinstance(value, str) or value.startswith("'")
    return {
        "name": argument.name,
        "type": _scalar_type(task, argument),
        "default": repr(task.scalar(argument, first)) if constant else None,
        "doc": _in_docstring(
            task.dims.get(str(argument.value), f"kernels were checked with {argument.value} alone")
        ),
    }


def _schema(task: Task) -> str:
    parts = []
    for argument in task.arguments:
        if argument.shape is None:
            parts.append(f"{_scalar_type(task, argument)} {argument.name}")
        else:
            parts.append(
                f"Tensor{f'(a{len(parts)}!)' if argument.may_change else ''} {argument.name}"
            )
    results = ", ".join("Tensor" for _ in task.results)
    return f"({', '.join(parts)}) -> " + (results if len(task.results) == 1 else f"({results})")


def _scalar_type(task: Task, argument: Argument) -> str:
    cases: Sequence[Case] = [*task.gpu.check, *task.gpu.bench, *task.cpu.check, *task.cpu.bench]
    kinds = {type(task.scalar(argument, c)) for c in cases}
    if kinds in ({bool}, {str}):
        return kinds.pop().__name__
    return "int" if kinds == {int} else "float"


def _code(size: Size | float) -> str:
    """A formula of task.toml as Python; sizes are whole numbers."""
    if not isinstance(size, str):
        return repr(size)
    if size.isidentifier():
        return size
    tree = parse_expression(size)
    text = ast.unparse(tree)
    fractions = any(isinstance(n, ast.Div) for n in ast.walk(tree))
    return f"int({text})" if fractions else f"({text})"


def _tuple(parts: Iterable[str]) -> str:
    found = list(parts)
    return f"({', '.join(found)}{',' * (len(found) == 1)})"


def _dtype(declared: str) -> str:
    return "dtype" if declared == "$dtype" else f"torch.{declared}"


def _in_docstring(text: str) -> str:
    """Words of a task's author, as one line that ends no string."""
    return " ".join(text.split()).replace("\\", "/").replace('"', "'").rstrip(".")


def _camel(name: str) -> str:
    words = "".join(w[:1].upper() + w[1:] for w in name.split("_"))
    return words if words.isidentifier() and not keyword.iskeyword(words) else f"{words}Module"


def _needs_own(task: Task, why: str) -> TaskError:
    return TaskError(
        f"{task.folder}: {why}: write an operator.py beside task.toml (docs/tasks.md), or give the "
        "entry an argument that says it"
    )
