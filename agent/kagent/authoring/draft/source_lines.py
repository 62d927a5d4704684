"""Lines of the files that are written: quoted, escaped and broken texts."""

from __future__ import annotations

import json
from collections.abc import Sequence

_WIDTH = 96


def quoted(value: str) -> str:
    """A text in double quotes, as TOML and Python have it."""
    return json.dumps(value, ensure_ascii=False)


def escaped(text: str) -> str:
    """A text for a docstring, which it does not end."""
    return text.replace("\\", "\\\\").replace('"""', "'''")


def broken(begin: str, parts: Sequence[str], end: str) -> list[str]:
    """Parts between brackets, one a line where they are too long for one."""
    line = f"{begin}{', '.join(parts)}{end}"
    if len(line) <= _WIDTH:
        return [line]
    return [begin, *(f"    {p}," for p in parts), end]


def tuple_text(items: Sequence[object]) -> str:
    """A tuple in Python's words, of which each item is a formula."""
    return f"({', '.join(map(str, items))}{',' if len(items) == 1 else ''})"
