"""The text of a task.toml from plain data."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

_TABLES = ("arguments", "results")
"""Lists of tables that are written one key a line; cases are written one a line."""


def task_toml(task: Mapping[str, Any]) -> str:
    """Write a task as TOML, in the order in which docs/tasks.md names the keys.

    Args:
        task: Plain values by key, as tomllib gives them: texts, numbers, flags, lists, and mappings
            for `dims`, `gpu` and `cpu`. Keys whose value is None are left out.

    Raises:
        TypeError: A value is of no type that TOML has.
    """
    lines = [
        f"{key} = {_value(value)}"
        for key, value in task.items()
        if value is not None and key not in (*_TABLES, "dims", "gpu", "cpu")
    ]
    lines += ["", "[dims]", *(f"{_key(k)} = {_value(v)}" for k, v in task["dims"].items())]
    for table in _TABLES:
        for each in task[table]:
            lines += ["", f"[[{table}]]"]
            lines += [f"{_key(k)} = {_value(v)}" for k, v in each.items() if v is not None]
    for kind in ("gpu", "cpu"):
        cases: Mapping[str, Sequence[Mapping[str, Any]]] = task[kind]
        lines += ["", f"[{kind}]"]
        for name in ("check", "bench"):
            lines += [f"{name} = [", *(f"  {_value(case)}," for case in cases[name]), "]"]
        for name in ("hidden_check", "hidden_bench"):
            for generator in cases.get(name, ()):
                lines += ["", f"[[{kind}.{name}]]"]
                lines += [f"{_key(k)} = {_value(v)}" for k, v in generator.items()]
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    bare = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
    return name if bare else json.dumps(name)


def _value(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float():
            return repr(value) if math.isfinite(value) else str(value)
        case str():
            # JSON's escapes are TOML's, but for one: TOML wants DEL escaped as well.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case Mapping():
            pairs = (f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None)
            return "{ " + ", ".join(pairs) + " }"
        case Sequence():
            return "[" + ", ".join(map(_value, value)) + "]"
    raise TypeError(f"{value!r} is no value of TOML")
