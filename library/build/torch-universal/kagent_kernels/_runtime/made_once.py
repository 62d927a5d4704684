"""Kernels by name and source, as host code asks for them, on every call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .source import Source

_made: dict[Any, Any] = {}


def made_once(
    kind: Any,
    language: Any,
    name: str,
    source: str,
    options: Sequence[str],
    defines: Mapping[str, object] | None,
) -> Any:
    """The kernel of these, made once.

    Kept by the texts themselves, whose hashes Python keeps. Types are part of the key: 1, 1.0 and
    True are equal, and different macros.
    """
    macros = defines or {}
    values = macros.values()
    key = (kind, name, source, *options, *macros, *values, *map(type, values))
    try:
        return _made[key]
    except (KeyError, TypeError) as e:
        made = kind(Source(language, name, source, tuple(options), tuple(macros.items())))
        if isinstance(e, KeyError):  # else a define cannot be hashed: compiling it says so
            made = _made.setdefault(key, made)
        return made
