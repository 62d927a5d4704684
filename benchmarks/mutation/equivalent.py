"""Mutants that are not wrong: a list made by hand, with a reason for each."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from mutation.edits import Mutant

LIST = Path(__file__).with_name("equivalent.toml")
ANY = "*"  # whatever the line becomes, if it passes


class Equivalent(BaseModel):
    """Changes of some files that leave every result within the contract, for one reason."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    files: tuple[str, ...]  # task/name.py
    why: str
    changes: tuple[tuple[str, str], ...]  # (the line as it was, as it is now)


class Equivalents:
    """The list, by what a mutant changes."""

    def __init__(self, path: Path = LIST) -> None:
        """Read the list.

        Raises:
            ValueError: It is malformed, or names a change twice.
        """
        self.reasons: dict[tuple[str, str, str], str] = {}
        for entry in tomllib.loads(path.read_text()).get("equivalent", ()):
            group = Equivalent(**entry)
            for key in ((f, was, now) for f in group.files for was, now in group.changes):
                if key in self.reasons:
                    raise ValueError(f"{path.name}: {key} is there twice")
                self.reasons[key] = group.why

    def reason(self, mutant: Mutant) -> str | None:
        """Why a mutant that passed is right, or None."""
        file, was, now = mutant.key
        return self.reasons.get((file, was, now)) or self.reasons.get((file, was, ANY))
