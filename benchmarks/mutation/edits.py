"""A mutant: a candidate's file with one small change."""

from __future__ import annotations

import difflib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Edit:
    """Characters [start, stop) of a file become `text`."""

    start: int
    stop: int
    text: str
    kind: str  # operator, comparison, constant, mask, ...


@dataclass(frozen=True, slots=True)
class Mutant:
    """One edit of one file. `was` and `now` are the lines that it touches, without indentation."""

    file: str  # task/name.py
    kind: str
    line: int
    was: str
    now: str
    source: str

    @property
    def key(self) -> tuple[str, str, str]:
        """What a list of equivalent mutants names it by: line numbers move, lines hardly do."""
        return (self.file, self.was, self.now)


def apply(file: str, source: str, edit: Edit, prelude: str = "", prelude_at: int = 0) -> Mutant:
    """The mutant that an edit makes; `prelude` is put in at `prelude_at`, before the edit."""
    if not 0 <= prelude_at <= edit.start <= edit.stop <= len(source):
        raise ValueError(f"{file}: an edit of [{edit.start}, {edit.stop}) is outside of the file")
    changed = source[: edit.start] + edit.text + source[edit.stop :]
    first = source.rfind("\n", 0, edit.start) + 1
    end = source.find("\n", edit.stop)
    end = len(source) if end < 0 else end
    return Mutant(
        file=file,
        kind=edit.kind,
        line=source.count("\n", 0, edit.start) + 1,
        was=_one_line(source[first:end]),
        now=_one_line(changed[first : end + len(changed) - len(source)]),
        source=changed[:prelude_at] + prelude + changed[prelude_at:],
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())


def diff_of(mutant: Mutant) -> str:
    """Two lines, for a reader."""
    return "\n".join(f"{sign} {text}" for sign, text in (("-", mutant.was), ("+", mutant.now)))


def distance(mutant: Mutant) -> float:
    """Share of the lines' characters that differ; for the tests of the mutator."""
    return 1 - difflib.SequenceMatcher(None, mutant.was, mutant.now, autojunk=False).ratio()
