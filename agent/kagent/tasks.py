"""Tasks and their seeds: those that ship with kagent by name, a user's own by path."""

from __future__ import annotations

import contextlib
import difflib
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.language import LANGUAGES, language_of
from kagent_sandbox.data.task import Task, load_task
from kagent_sandbox.errors import MachineError, TaskError, UserError
from kagent_sandbox.judge.task_check import TaskCheck, check_task

from kagent.resources import resource


@dataclass(frozen=True, slots=True)
class Seed:
    """A kernel that a run starts from. `name` is its file's, without the suffix; `language` is the
    name of one.
    """

    name: str
    language: str
    path: Path

    def source(self) -> str:
        """Text of the seed.

        Raises:
            UserError: It cannot be read, or is not UTF-8.
        """
        try:
            return self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise UserError(f"{self.path}: {e}") from None


def task_names() -> list[str]:
    """Names of the tasks that ship with kagent."""
    return sorted(p.parent.name for p in resource("seeds").glob("*/task.toml"))


def find_task(name_or_path: str | Path, *, calibrated: bool = True) -> Task:
    """Find a task by name, or by the path of its folder (or of the task.toml in it).

    `calibrated`: see `load_task`.

    Raises:
        TaskError: There is none, or its files do not make sense; the text says which and why.
    """
    text = str(name_or_path)
    names = task_names()
    if text in names:
        return load_task(resource("seeds") / text, calibrated=calibrated)
    path = Path(text).expanduser()
    if path.name == "task.toml":
        path = path.parent
    if path.is_dir():
        return load_task(path, calibrated=calibrated)
    if path.is_file() and path.suffix == ".py":
        raise TaskError(
            f"{text}: a Python file, where a task was expected: kagent new "
            f"{shlex.quote(text)}:NAME makes one of a function or module in it"
        )
    if path.exists():
        raise TaskError(f"{text}: a file, where a task's folder was expected")
    if len(path.parts) > 1 or text.startswith((".", "~")) or path.suffix == ".py":
        what = "file" if path.suffix else "folder"
        raise TaskError(f"{text}: no such {what}: expected a task's name, or its folder's path")
    hint = meant(text) or f"there are {', '.join(names)}."
    raise TaskError(f"no task {text!r}: {hint} A folder with a task.toml works by its path.")


def meant(text: str) -> str:
    """'did you mean softmax?', where a text is nearly the name of a task; else nothing."""
    close = difflib.get_close_matches(text, task_names(), n=1)
    return f"did you mean {close[0]}?" if close else ""


def ships_with_kagent(task: Task) -> bool:
    """Whether it is one of kagent's own tasks, not in a folder of the user's."""
    with contextlib.suppress(MachineError):  # without them a user's own tasks work all the same
        return task.folder.resolve() == (resource("seeds") / task.name).resolve()
    return False


def command_word(task: Task) -> str:
    """The word by which commands find a task: its name, or the path of a folder of the user's."""
    if ships_with_kagent(task):
        return task.name
    folder, here = task.folder.resolve(), Path.cwd()
    return shlex.quote(f"./{folder.relative_to(here)}" if here in folder.parents else str(folder))


def sound_task(task: Task, kind: Kind, say: Callable[[str], None] = lambda _: None) -> TaskCheck:
    """Make sure that kernels can be held against a task: checked once, then recalled.

    Args:
        task: The task.
        kind: Whose cases.
        say: Is told what the check costs, and that wrong results pass.

    Raises:
        TaskError: It has a fault; one line that names its file and what in it.
    """
    found = check_task(task, kind, say)
    if found.holes:
        ending, them = ("s", "them") if len(found.holes) > 1 else ("", "it")
        count = f"{len(found.holes)} wrong result{ending}"
        say(f"{task.name}: {count} would pass: kagent check {command_word(task)} names {them}")
    return found


def is_task(name_or_path: str) -> bool:
    """Whether it names a task that `find_task` would find: one of kagent's, or a folder's path."""
    path = Path(name_or_path).expanduser()
    return name_or_path in task_names() or any(
        p.name == "task.toml" and p.is_file() for p in (path, path / "task.toml")
    )


def seeds_of(task: Task, language: str | None = None) -> list[Seed]:
    """Return the task's seeds in the order of their names, all or those of one language."""
    seeds = [
        Seed(path.stem, language_of(path.name).name, path)
        for path in sorted(task.folder.glob("*.py"))
        if path.name.startswith(tuple(each.seed_prefix for each in LANGUAGES.values()))
    ]
    return [s for s in seeds if language in (None, s.language)]


def refusal_of(task: Task, kind: Kind) -> str:
    """The reason why no seed could be derived for a kind of device; empty if none is known."""
    file = refusal_file(task.folder, kind)
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip() if file.is_file() else ""
    except OSError as e:
        raise UserError(f"{file}: {e}") from None


def refusal_file(folder: Path, kind: Kind) -> Path:
    """File in a task's folder with the reason why no seed could be derived."""
    return folder / f"no_{kind}_seed.txt"
