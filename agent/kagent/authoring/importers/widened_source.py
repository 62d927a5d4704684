"""PyTorch source rewritten to compute in float64, or float32.

A reference of another suite computes in fixed dtypes: `x.to(torch.float32)`. Its float64 twin is
the same text with float64 in their places. It is text, not a mode of torch, so that a task's
reference.py stands by itself, can be read and edited, and each operation has its own line.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping

from kagent.search.text_edits import EditableText, TextEdit

_FLOATS = frozenset({"float16", "bfloat16", "float32", "half", "float", "float64", "double"})
_CASTS = frozenset({"float", "half", "bfloat16"})
_FACTORIES = frozenset({"zeros", "ones", "empty", "eye", "linspace", "logspace", "rand", "randn"})
"""Functions whose result has torch's default dtype, float32, if they are given none."""
_RANDOM = frozenset(
    {
        *("multinomial", "rand", "randn", "randint", "randperm", "rand_like", "randn_like"),
        *("randint_like", "bernoulli", "bernoulli_", "normal_", "uniform_", "random_"),
        *("exponential_", "dropout", "manual_seed"),
    }
)


def widened_source(source: str, renamed: Collection[str], dtype: str = "float64") -> str:
    """Rewrite a module's functions and classes to one dtype, under names that end in it.

    Casts to any other float become casts to it, as do dtypes that are given or implied where
    tensors are made. Reinterpreted bits (`x.view(dtype)`) stay. Statements that are neither
    functions nor classes are left out: the original holds them.

    Args:
        source: Python source.
        renamed: Names that get a suffix: functions and classes of the module.
        dtype: "float64", or "float32" where memory forbids that.

    Raises:
        SyntaxError: It is no Python.
    """
    whole = EditableText(source)
    parts = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            part = source[whole.lines_of(node)[0] : whole.span(node)[1]]
            text = EditableText(part)
            parts.append(text.apply(_edits(ast.parse(part), text, renamed, dtype)))
    return "\n\n\n".join(parts)


def renamed_source(source: str, names: Mapping[str, str]) -> str:
    """Rename functions and classes of a module, wherever it names them.

    Args:
        source: Python source.
        names: New names by the old ones.
    """
    text = EditableText(source)
    return text.apply(_renames(ast.parse(source), text, names))


def definitions(source: str) -> list[str]:
    """Names of the functions and classes that a module defines.

    Raises:
        SyntaxError: It is no Python.
    """
    body = ast.parse(source).body
    return [n.name for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef)]


def random_calls(source: str, entry: str = "run") -> list[str]:
    """Operations that draw random numbers when a function of a module is called, in order, each
    once. Definitions that it does not name, not through others either, are left out: a module may
    have a function that draws inputs. Of a module without it, all count.
    """
    body = ast.parse(source).body
    parts = {n.name: n for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    rest = [n for n in body if n not in parts.values()] if entry in parts else body
    reached: list[ast.AST] = [*rest, *([parts[entry]] if entry in parts else [])]
    seen = {entry}
    for part in reached:  # grows
        for node in ast.walk(part):
            if isinstance(node, ast.Name) and node.id in parts and node.id not in seen:
                seen.add(node.id)
                reached.append(parts[node.id])
    reached.sort(key=lambda n: getattr(n, "lineno", 0))
    names = [
        node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        for part in reached
        for node in ast.walk(part)
        if isinstance(node, ast.Call)
    ]
    return list(dict.fromkeys(n for n in names if n in _RANDOM))


def _renames(root: ast.AST, text: EditableText, names: Mapping[str, str]) -> Iterator[TextEdit]:
    for node in ast.walk(root):
        if isinstance(node, ast.Name) and node.id in names:
            yield TextEdit(*text.span(node), names[node.id])
        elif isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names:
            start = text.source.index(node.name, text.span(node)[0] + len("def"))
            yield TextEdit(start, start + len(node.name), names[node.name])


def _edits(
    root: ast.AST, text: EditableText, renamed: Collection[str], dtype: str
) -> Iterator[TextEdit]:
    yield from _renames(root, text, {n: f"{n}_{dtype}" for n in renamed})
    kept = {
        id(argument)
        for node in ast.walk(root)
        if isinstance(node, ast.Call) and _reinterprets(node)
        for argument in node.args
    }
    for node in ast.walk(root):
        if isinstance(node, ast.Attribute):
            if _is_torch(node) and node.attr in _FLOATS and id(node) not in kept:
                yield TextEdit(*text.span(node), f"torch.{dtype}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield from _call_edits(node, node.func, text, dtype)


def _call_edits(
    call: ast.Call, function: ast.Attribute, text: EditableText, dtype: str
) -> Iterator[TextEdit]:
    name, end = function.attr, text.span(call)[1]
    if name in _CASTS and not _is_torch(function) and not call.args:
        yield TextEdit(text.span(function)[1] - len(name), end, f"to(torch.{dtype})")
        return
    makes = name in _FACTORIES or (name == "full" and _is_float(call))
    if _is_torch(function) and makes and not any(k.arg == "dtype" for k in call.keywords):
        last = text.source[: end - 1].rstrip()[-1]
        separator = "" if last == "(" else " " if last == "," else ", "
        yield TextEdit(end - 1, end, f"{separator}dtype=torch.{dtype})")


def _reinterprets(call: ast.Call) -> bool:
    """Whether a dtype that a call is given names bits, or a range of numbers."""
    return isinstance(call.func, ast.Attribute) and call.func.attr in ("view", "finfo")


def _is_torch(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "torch"


def _is_float(call: ast.Call) -> bool:
    """Whether the value that `torch.full` is given makes a tensor of floats."""
    value = call.args[1] if len(call.args) > 1 else None
    if isinstance(value, ast.UnaryOp):
        value = value.operand
    return not (isinstance(value, ast.Constant) and isinstance(value.value, int))
