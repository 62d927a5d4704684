"""The corpus as data: chapters, items, their variants and scenarios. Read strictly.

    corpus/<chapter>/<NN>_<slug>/item.toml      what each file must get, and what stops it
    corpus/<chapter>/<NN>_<slug>/*.py, *.edits  candidates, and honest twins

corpus/README.md describes the format.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pydantic
from kagent_sandbox.data.verdict import Stage, Status
from kagent_sandbox.errors import UserError
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from kagent.resources import corpus_folder, resource
from kagent.selftest.assemble import stored
from kagent.tasks import task_names

CHAPTERS = ("faults", "host", "result", "cheats", "beyond")
PASSED = "passed"
ESCAPED = "escaped"
FOLDER = re.compile(r"(\d{2,3})_[a-z0-9_]+")
Runs = Literal["cpu", "build", "interpret", "gpu"]


def _outcome(text: str) -> str:
    """An outcome that a candidate may have: "passed", or a stage and a status."""
    stage, _, status = text.partition(" ")
    if text != PASSED and not (stage in set(Stage) and status in set(Status)):
        raise ValueError(f"{text!r} is neither {PASSED!r} nor a stage and a status, as in "
                         "'measure INCORRECT_NUMERICAL'")  # fmt: skip
    return text


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as e:
        raise ValueError(f"no regular expression: {e}") from None
    return text


def _tuple(value: object) -> object:
    return (value,) if isinstance(value, str) else value


Outcomes = Annotated[tuple[Annotated[str, AfterValidator(_outcome)], ...],
                     BeforeValidator(_tuple), Field(min_length=1)]  # fmt: skip
Pattern = Annotated[str, AfterValidator(_pattern)]
Line = Annotated[str, Field(min_length=1, pattern=r"^[^\n]+$")]


class _StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class VariantTable(_StrictModel):
    """A `[[variant]]` of item.toml: one candidate file."""

    file: str
    twin: str
    task: str
    runs: Runs
    expect: Outcomes
    says: Pattern = ""
    measure: bool = False  # timed although no expected outcome is one of measuring
    endless: bool = False  # its build reaches whatever limit there is: it gets half of the others'


class ScenarioTable(_StrictModel):
    """A `[[scenario]]` of item.toml: something that no candidate file could do."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    expect: Annotated[tuple[Line, ...], BeforeValidator(_tuple), Field(min_length=1)]
    says: Pattern = ""
    runs: Literal["anywhere", "cpu", "gpu"] = "anywhere"
    measure: bool = False  # its outcome depends on times: nothing else may run
    own_judge: bool = False  # nor on anybody's judge but its own: it may run beside builds


class ItemTable(_StrictModel):
    """item.toml."""

    number: Annotated[int, Field(ge=1)]
    title: Line
    mechanism: Line
    why: Line
    variant: tuple[VariantTable, ...] = ()
    scenario: tuple[ScenarioTable, ...] = ()


@dataclass(frozen=True, slots=True)
class Item:
    """One fault, attack or cheat, and what stops it."""

    number: int
    title: str
    mechanism: str
    why: str
    chapter: str
    folder: Path


@dataclass(frozen=True, slots=True)
class Variant:
    """A candidate file with the outcome that it must have. `expect`: any of these will do."""

    item: Item
    path: Path  # as when it is whole: `assemble` reads it
    twin: Path
    task: Path  # the task's folder
    runs: Runs
    expect: tuple[str, ...]
    says: str
    measured: bool
    endless: bool

    @property
    def id(self) -> str:
        """Name in tests and reports: `66_caching-by_pointer_cpp`."""
        return f"{self.item.folder.name}-{self.path.stem}"


@dataclass(frozen=True, slots=True)
class Scenario:
    """A function of `kagent.selftest.scenarios` with the outcome that it must have."""

    item: Item
    name: str
    expect: tuple[str, ...]
    says: str
    runs: str
    measured: bool
    own_judge: bool

    @property
    def id(self) -> str:
        """Name in tests and reports: `27_judge_killed-judge_killed`."""
        return f"{self.item.folder.name}-{self.name}"


Entry = Variant | Scenario


def load_catalogue(
    corpus: Path | None = None,
    *,
    only: Collection[int] = (),
    chapters: Collection[str] = (),
) -> list[Entry]:
    """List the variants and scenarios of the corpus, by number.

    Args:
        corpus: Folder of the corpus; None: kagent's own.
        only: Numbers of items; empty: all.
        chapters: Names of chapters; empty: all.

    Raises:
        UserError: There is no such item or chapter, or a file of the corpus does not make sense;
            the text names it.
    """
    unknown = sorted(set(chapters) - set(CHAPTERS))
    if unknown:
        raise UserError(
            f"no chapter {unknown[0]!r}: there are {', '.join(CHAPTERS)}, and machine: the checks "
            "of this machine"
        )
    folders = item_folders(corpus or corpus_folder())
    missing = sorted(set(only) - folders.keys())
    if missing:
        raise UserError(f"no item {missing[0]} in the corpus; kagent selftest --list shows all")
    return [
        entry
        for number, folder in sorted(folders.items())
        if not (only or chapters) or number in only or folder.parent.name in chapters
        for entry in load_item(folder)
    ]


def item_folders(corpus: Path) -> dict[int, Path]:
    """Folders of all items by number.

    A folder without item.toml is no item: one that is being written, or what Python left of one.

    Raises:
        UserError: A folder's name has no number, or that of another.
    """
    found: dict[int, Path] = {}
    for path in sorted(p for c in CHAPTERS for p in (corpus / c).glob("*/item.toml")):
        folder = path.parent
        match = FOLDER.fullmatch(folder.name)
        if match is None:
            raise UserError(f"{folder}: expected a name such as 66_some_words")
        number = int(match[1])
        if number in found:
            raise UserError(f"{folder}: number {number} is that of {found[number]}")
        found[number] = folder
    return found


def load_item(folder: Path) -> Sequence[Entry]:
    """The variants and scenarios of one item's folder; at least one.

    Raises:
        UserError: Its item.toml does not make sense, or names a file that is not there.
    """
    path = folder / "item.toml"
    try:
        table = ItemTable(**tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as e:
        raise UserError(f"{path}: {_first_fault(e)}") from None
    if not folder.name.startswith(f"{table.number:02d}_"):
        raise UserError(f"{path}: number = {table.number} in a folder {folder.name!r}")
    if not (table.variant or table.scenario):
        raise UserError(f"{path}: neither a [[variant]] nor a [[scenario]]")
    about = {"number", "title", "mechanism", "why"}
    item = Item(**table.model_dump(include=about), chapter=folder.parent.name, folder=folder)
    entries: list[Entry] = [_variant(item, v) for v in table.variant]
    entries += [
        Scenario(item, s.name, s.expect, s.says, s.runs, s.measure, s.own_judge)
        for s in table.scenario
    ]
    ids = [e.id for e in entries]
    if len(set(ids)) < len(ids):
        raise UserError(f"{path}: {next(i for i in ids if ids.count(i) > 1)} is there twice")
    return entries


def _first_fault(error: Exception) -> str:
    if not isinstance(error, pydantic.ValidationError):
        return str(error)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else str(first["msg"])


def _variant(item: Item, table: VariantTable) -> Variant:
    measured = table.measure or any(e.startswith(Stage.MEASURE) for e in table.expect)
    if measured and table.runs not in ("cpu", "gpu"):
        raise UserError(
            f"{item.folder}/item.toml: {table.file}: runs = {table.runs!r} times nothing"
        )
    return Variant(
        item=item,
        path=_file(item.folder, table.file),
        twin=_file(item.folder, table.twin),
        task=_task(item.folder, table.task),
        runs=table.runs,
        expect=table.expect,
        says=table.says,
        measured=measured,
        endless=table.endless,
    )


def _file(folder: Path, name: str) -> Path:
    path = (folder / name).resolve()
    if not stored(path).is_file():
        raise UserError(f"{folder}/item.toml: no file {path}")
    return path


def _task(folder: Path, name: str) -> Path:
    """A task of the corpus (`rows`, or as a path from the item), or one of kagent's."""
    corpus = folder.parents[1]
    for place in (corpus / name, corpus / "tasks" / name, folder / name):
        if (place / "task.toml").is_file():
            return place.resolve()
    if name in task_names():
        return resource("seeds") / name
    raise UserError(f"{folder}/item.toml: no task {name!r} in corpus/tasks or seeds")
