"""Mutants that are not wrong: a list made by hand, with a reason for each."""

from __future__ import annotations

import tomllib
from pathlib import Path

from pydantic import BaseModel, ConfigDict

LIST = Path(__file__).with_name("equivalent.toml")


class Equivalent(BaseModel):
    """Changes of one file that leave the result within the contract for one reason."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    file: str  # task/name.py
    why: str
    changes: tuple[tuple[str, str], ...]  # (the line as it was, as it is now)


def known_equivalents(path: Path = LIST) -> dict[tuple[str, str, str], str]:
    """Reasons by (file, was, now).

    Raises:
        ValueError: The list is malformed, or names a change twice.
    """
    data = tomllib.loads(path.read_text())
    reasons: dict[tuple[str, str, str], str] = {}
    for entry in data.get("equivalent", ()):
        group = Equivalent(**entry)
        for was, now in group.changes:
            key = (group.file, was, now)
            if key in reasons:
                raise ValueError(f"{path.name}: {key} is there twice")
            reasons[key] = group.why
    return reasons
