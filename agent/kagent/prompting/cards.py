"""Technique cards: read from prompts/cards/*.md, and which of them apply.

    +++
    title = "A row spread over a cluster of blocks"
    bound = ["memory"]
    languages = ["cuda"]
    tasks = "any except gelu"
    capability = 90
    +++
    ## When it pays
    ...

Front matter is TOML; prompts/README.md lists its keys. Sections of the languages that a prompt does
not need are left out of it.
"""

from __future__ import annotations

import fnmatch
import functools
import importlib.metadata
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pydantic
from kagent_sandbox.data.language import LANGUAGES, language
from kagent_sandbox.errors import UserError
from pydantic import BaseModel, ConfigDict, Field

Bound = Literal["memory", "compute", "latency"]
Need = Literal["several_launches", "narrow_loads", "spills", "short_rows", "long_rows"]

WHEN, WRONG = "When it pays", "What goes wrong"
_SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
_LATER = re.compile(r"^From sm_(\d+) on: .*\n\n", re.MULTILINE)  # a paragraph for some only
_EXCEPT = re.compile(r"any except ([\w*, ]+)")


Tasks = str | tuple[str, ...]
"""Tasks that a card is for: "any", "any except A, B", or a list of names; "A*" is a pattern."""
LanguageName = Annotated[str, pydantic.AfterValidator(lambda name: language(name).name)]


class Priority(BaseModel):
    """Tasks, targets and bounds for which a card is decisive: it then comes first while the task is
    far from its ceiling.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    tasks: Tasks = "any"
    targets: tuple[str, ...] = ()  # only these: "sm_90a"; empty: all
    bound: tuple[Bound, ...] = ()  # one of which must limit the task; empty: whatever does


class FrontMatter(BaseModel):
    """The front matter of a card."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    bound: tuple[Bound, ...] = Field(min_length=1)
    languages: tuple[LanguageName, ...] = Field(min_length=1)
    tasks: Tasks = "any"
    capability: int = 0  # least compute capability: 90; 0: any
    targets: tuple[str, ...] = ()  # only these: "sm_90a"; empty: all
    needs: tuple[Need, ...] = ()  # facts of the parent, one of which must hold or be unknown
    packages: tuple[str, ...] = ()  # that must be installed: "nvidia-cutlass"
    unless: str = ""  # a regular expression: a parent whose text has it uses the technique already
    priority: tuple[Priority, ...] = ()  # where it is decisive

    @pydantic.field_validator("unless")
    @classmethod
    def _is_an_expression(cls, text: str) -> str:
        try:
            re.compile(text)
        except re.error as e:
            raise ValueError(f"no regular expression: {e}") from None
        return text


@dataclass(frozen=True, slots=True)
class Card:
    """One technique. `sections` are Markdown by heading."""

    name: str  # of its file, without the suffix
    front: FrontMatter
    sections: Mapping[str, str]

    @property
    def title(self) -> str:
        """Name of the technique."""
        return self.front.title

    def is_for_task(self, name: str) -> bool:
        """Whether the technique makes sense for a task."""
        return _is_among(name, self.front.tasks)

    def text(self, languages: Collection[str], capability: int) -> str:
        """Text of the card: its use, its form in these languages, and its pitfalls, without
        paragraphs for later architectures.
        """
        kept = [WHEN, *_headings(languages), WRONG]
        whole = "\n\n".join(f"**{h}**\n\n{self.sections[h]}" for h in kept if h in self.sections)
        return _LATER.sub(lambda m: m[0] if int(m[1]) <= capability else "", whole)

    def is_used_in(self, source: str) -> bool:
        """Whether a file shows that it uses the technique already."""
        return bool(self.front.unless and re.search(self.front.unless, source))

    def written_in(self, languages: Collection[str]) -> tuple[str, ...]:
        """Return those of these languages that the card has a section for."""
        return tuple(n for n in self.front.languages if n in languages)


@dataclass(frozen=True, slots=True)
class Place:
    """Facts that all prompts of a run share: the task, the target, the languages."""

    task: str
    target: str
    capability: int  # 0: a CPU
    languages: tuple[str, ...]  # that a candidate may be written in


def suits(card: Card, place: Place) -> bool:
    """Whether a card can be used in a run at all."""
    front = card.front
    return (
        bool(card.written_in(place.languages))
        and card.is_for_task(place.task)
        and place.capability >= front.capability
        and (not front.targets or place.target in front.targets)
        and all(map(is_installed, front.packages))
    )


def is_installed(package: str) -> bool:
    """Whether a package is installed, by the name that pip knows."""
    return bool([*importlib.metadata.distributions(name=package)])


def is_decisive(card: Card, place: Place, bounds: Collection[str]) -> bool:
    """Whether a card comes first in a run while its task is far from the ceiling."""
    return any(
        _is_among(place.task, each.tasks)
        and (not each.targets or place.target in each.targets)
        and (not each.bound or not set(each.bound).isdisjoint(bounds))
        for each in card.front.priority
    )


def helps(card: Card, bounds: Collection[str], facts: Collection[str]) -> bool:
    """Whether it can help a parent: what limits it, and what is known or possible about it."""
    front = card.front
    return not set(front.bound).isdisjoint(bounds) and (
        not front.needs or not set(front.needs).isdisjoint(facts)
    )


def _is_among(name: str, tasks: Tasks) -> bool:
    if not isinstance(tasks, str):
        return any(fnmatch.fnmatchcase(name, t) for t in tasks)
    found = _EXCEPT.fullmatch(tasks)
    return found is None or not _is_among(name, tuple(re.split(r", *", found[1])))


def load_cards(folders: Sequence[Path]) -> dict[str, Card]:
    """All cards by name, those of later folders instead of earlier ones of the same name.

    Raises:
        UserError: A card is malformed; the text names file and key.
    """
    found: dict[str, Card] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.md")):
            found[path.stem] = read_card(path)
    return dict(sorted(found.items()))


def read_card(path: Path) -> Card:
    """One card.

    Raises:
        UserError: It is malformed.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"{path}: {e}") from None
    return _parsed(path, text)


@functools.lru_cache(maxsize=1024)
def _parsed(path: Path, text: str) -> Card:
    """A card of this text: each search of a process has the same ones.

    Raises:
        UserError: It is malformed.
    """
    parts = text.split("+++\n", 2)
    if len(parts) != 3 or parts[0].strip():
        raise UserError(f"{path}:1: a card begins with its front matter between two lines of +++")
    try:
        front = FrontMatter(**tomllib.loads(parts[1]))
    except tomllib.TOMLDecodeError as e:
        raise UserError(f"{path}: front matter: {e}") from None
    except pydantic.ValidationError as e:
        first = e.errors()[0]
        key = ".".join(str(p) for p in first["loc"][:1])
        raise UserError(f"{path}: front matter: {key}: {first['msg']}") from None
    return Card(path.stem, front, _sections(path, parts[2], front))


def _headings(languages: Collection[str]) -> list[str]:
    """Headings of the sections with a technique's form in each language."""
    return [each.title for each in LANGUAGES.values() if each.name in languages]


def _sections(path: Path, text: str, front: FrontMatter) -> dict[str, str]:
    pieces = _SECTION.split(text)
    sections = {h.strip(): body.strip() for h, body in zip(pieces[1::2], pieces[2::2], strict=True)}
    wanted = [WHEN, *_headings(front.languages), WRONG]
    if missing := [h for h in wanted if not sections.get(h)]:
        raise UserError(f"{path}: lacks a section {', '.join('## ' + h for h in missing)}")
    if odd := sections.keys() - set(wanted):
        raise UserError(f"{path}: section ## {min(odd)} is none of {', '.join(wanted)}")
    return sections
