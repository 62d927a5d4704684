"""The tunables of a kernel file: read from its syntax tree, changed where they are assigned.

    TUNE = {"BLOCK": [1024, 2048, 4096]}
    BLOCK = 2048        # or tl.constexpr(2048)

`TUNE` names globals and the values they may take; the plain assignment is the current one. Only
values that are listed are ever written: the author of a file knows what it can take.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from kagent_sandbox.syntax import parse

from kagent.search.text_edits import EditableText, TextEdit

Value: TypeAlias = int | float | bool | str


@dataclass(frozen=True, slots=True)
class Tunable:
    """One global of a file. `values` holds the listed ones, and the current one if it is not
    listed.
    """

    name: str
    values: tuple[Value, ...]
    current: Value
    start: int  # where the current value's text is
    stop: int

    @property
    def index(self) -> int:
        """Place of the current value among `values`."""
        return _index(self.values, self.current)


@dataclass(frozen=True, slots=True)
class Tunables:
    """All tunables of a file. Files with one `family` differ in nothing but these values."""

    source: str
    family: str
    items: tuple[Tunable, ...]

    @property
    def current(self) -> tuple[Value, ...]:
        """Current values, in the order of `items`."""
        return tuple(t.current for t in self.items)

    @property
    def size(self) -> int:
        """Number of combinations."""
        size = 1
        for item in self.items:
            size *= len(item.values)
        return size

    def rewrite(self, values: Mapping[str, Value]) -> str:
        """The file with some tunables set to other values, and not another character changed."""
        edits = [
            TextEdit(t.start, t.stop, value_text(values[t.name]))
            for t in self.items
            if t.name in values and not same(values[t.name], t.current)
        ]
        return EditableText(self.source).apply(edits)


@functools.lru_cache(maxsize=4096)
def read_tunables(source: str) -> Tunables | None:
    """The tunables of a file; None where it is not Python. A file without any has an empty list."""
    try:
        tree = parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    text = EditableText(source)
    listed = dict(_listed(tree))
    places = {place.name: place for place in _constants(tree) if place.name in listed}
    items: list[Tunable] = []
    for name, values in listed.items():
        place = places.get(name)
        if place is None:
            continue
        current = place.value
        known = values if any(same(v, current) for v in values) else _insert(values, current)
        items.append(Tunable(name, known, current, *text.span(place.node)))
    for item in items:  # tuned values do not count for the family
        places[item.name].blank()
    family = hashlib.sha256(ast.dump(tree).encode()).hexdigest()
    return Tunables(source, family, tuple(items))


def value_text(value: Value) -> str:
    """A value as Python, strings in double quotes."""
    return json.dumps(value) if isinstance(value, str) and value.isascii() else repr(value)


def same(a: Value, b: Value) -> bool:
    """Equal, and of one type: True is not 1."""
    return type(a) is type(b) and a == b


def _index(values: tuple[Value, ...], value: Value) -> int:
    return next(i for i, v in enumerate(values) if same(v, value))


def _insert(values: tuple[Value, ...], current: Value) -> tuple[Value, ...]:
    """The current value in its place if the list is one of ascending numbers, else in front."""
    numbers = [v for v in (*values, current) if isinstance(v, int | float)]
    ascending = len(numbers) == len(values) + 1 and list(values) == sorted(numbers[:-1])
    at = sum(v < current for v in numbers[:-1]) if ascending else 0  # type: ignore[operator]
    return (*values[:at], current, *values[at:])


def _listed(tree: ast.Module) -> Iterator[tuple[str, tuple[Value, ...]]]:
    """Names and values of the last `TUNE`; entries that are not literal are left out."""
    found: ast.Dict | None = None
    for statement in tree.body:
        target, value = _assignment(statement)
        if target == "TUNE" and isinstance(value, ast.Dict):
            found = value
    if found is None:
        return
    for key, value in zip(found.keys, found.values, strict=True):
        if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
            continue
        try:
            values = ast.literal_eval(value)
        except ValueError:
            continue
        if isinstance(values, list | tuple) and all(isinstance(v, Value) for v in values):
            unique: list[Value] = []
            for v in values:
                if not any(same(v, u) for u in unique):
                    unique.append(v)
            yield key.value, tuple(unique)


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a global's plain value: in an assignment, or in a call in one."""

    name: str
    value: Value
    node: ast.expr
    owner: ast.Assign | ast.AnnAssign | ast.Call

    def blank(self) -> None:
        """Take the value out of the tree."""
        nothing = ast.Constant(None)
        if isinstance(self.owner, ast.Call):
            self.owner.args = [nothing]
        else:
            self.owner.value = nothing


def _constants(tree: ast.Module) -> Iterator[_Place]:
    """Module-level assignments of a plain value, or of `tl.constexpr` of one."""
    for statement in tree.body:
        name, node = _assignment(statement)
        if name is None or node is None or not isinstance(statement, ast.Assign | ast.AnnAssign):
            continue
        owner: ast.Assign | ast.AnnAssign | ast.Call = statement
        if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
            called = node.func
            called_name = getattr(called, "attr", getattr(called, "id", ""))
            if called_name == "constexpr":
                owner, node = node, node.args[0]
        if isinstance(node, ast.Constant | ast.UnaryOp):
            try:
                value = ast.literal_eval(node)
            except ValueError:  # not x, ~x
                continue
            if isinstance(value, Value):
                yield _Place(name, value, node, owner)


def _assignment(statement: ast.stmt) -> tuple[str | None, ast.expr | None]:
    """Name and value of `NAME = value` or `NAME: type = value`."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target: ast.expr = statement.targets[0]
        value: ast.expr | None = statement.value
    elif isinstance(statement, ast.AnnAssign):
        target, value = statement.target, statement.value
    else:
        return None, None
    return (target.id, value) if isinstance(target, ast.Name) else (None, None)
