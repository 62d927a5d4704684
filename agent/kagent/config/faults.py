"""Words for what pydantic finds wrong with a value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_BOUNDS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}
"""By the type of the error: the name of the bound, and the words before it."""
_KINDS = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "path_type": "a path, in quotes",
    "string_type": "text, in quotes",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list, in brackets",
    "dict_type": "a table",
}


def problem_of(error: ErrorDetails) -> str:
    """Expectation that a value does not meet, without the value: 'expected at least 0'."""
    kind = error["type"]
    context: dict[str, Any] = error.get("ctx", {})
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return f"expected {words} {context[name]:g}"
    if kind in _KINDS:
        return f"expected {_KINDS[kind]}"
    if kind == "literal_error":
        return f"expected {context['expected']}"
    return error["msg"].removeprefix("Value error, ")


def toml_help(line: str) -> str:
    """The remedy for a file that is no TOML: lines such as this one."""
    return f"expected lines such as {line}, text in quotes, a bracket for each that is opened"


def with_value(problem: str, value: object) -> str:
    """A problem with the value, if it does not begin with it: "expected at least 0, got -5"."""
    return problem if problem.startswith(repr(value)) else f"{problem}, got {value!r}"
