"""Facts about an operation from its schema. Needs no torch."""

from __future__ import annotations

from typing import Any


def is_write(parameter: Any) -> bool:
    """Whether a parameter, a `torch.Argument`, is written in place."""
    return parameter.alias_info is not None and parameter.alias_info.is_write
