"""The problems of a suite: tasks, and files of other suites that become tasks first."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePosixPath

from kagent_sandbox.errors import UserError

from kagent.tasks import find_task, is_task, task_names


class Form(StrEnum):
    """Form in which a problem is given. Values are the words of `kagent import`."""

    TASK = "task"
    KERNELBENCH = "kernelbench"
    KERNELBENCH_HARD = "kernelbench-hard"
    FLASHINFER = "flashinfer"


def require_inside(name: str) -> None:
    """Make sure that a path below a folder stays there: records are files, of others perhaps, and
    what they name is made, removed and written to.

    Raises:
        ValueError: It leads out.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ValueError(f"{name!r:.80} leads out of its folder")


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of a suite.

    Attributes:
        name: A task's name, or the path below the folder that was given; no two share one.
        form: What it is given as.
        path: A folder (tasks, KernelBench-Hard) or a file.
        workloads: File of a FlashInfer definition's workloads; "" if there is none.
    """

    name: str
    form: Form
    path: str
    workloads: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a problem without a name")
        require_inside(self.name)

    @property
    def group(self) -> str:
        """The folder that its name begins with, such as "level1"; "" if there is none."""
        parent = str(PurePosixPath(self.name).parent)
        return "" if parent == "." else parent


def absolute(source: str) -> str:
    """A source as it is the same from every folder: a task's name, or a path."""
    path = Path(source).expanduser()
    return str(path.resolve()) if source not in task_names() and path.exists() else source


_NONE = (
    "no problem there: expected a task's folder, a file with Model and get_inputs, a problem of "
    "KernelBench-Hard, a definition of FlashInfer-Bench, or a folder of such"
)


def find_problems(sources: Sequence[str], none: str = _NONE) -> list[Problem]:
    """The problems that sources stand for, in the order given; of a folder by number, then letter.

    Args:
        sources: Names of tasks; folders of tasks, or of problems in any form, at any depth; files.
            Names of a single folder's problems are paths below it. With several sources, they
            begin with the folder's own name.
        none: Error where a source has no problem, and what was expected, in words.

    Raises:
        UserError: A source is none of these, or two problems have one name.
    """
    alone = len(sources) == 1
    found = [p for source in sources for p in _problems_of(source, none, alone=alone)]
    twice = [name for name, count in Counter(p.name for p in found).items() if count > 1]
    if twice:
        paths = " and ".join(p.path for p in found if p.name == twice[0])
        raise UserError(f"two problems have the name {twice[0]}: {paths}: leave one out")
    return found


def _problems_of(source: str, none: str, *, alone: bool) -> list[Problem]:
    path = Path(source).expanduser()
    if is_task(source) or not path.exists():
        task = find_task(source)  # its error says what there is
        return [Problem(task.folder.resolve().name, Form.TASK, str(task.folder.resolve()))]
    path = path.resolve()
    root = path if alone and path.is_dir() else path.parent
    found = [Problem(_name(Path(p), root), form, p, more) for form, p, more in _inside(path)]
    if not found:
        raise UserError(f"{source}: {none}")
    return sorted(found, key=lambda p: _by_number(p.name))


def _inside(path: Path) -> Iterator[tuple[Form, str, str]]:
    """Form, path and workloads of all problems below a path."""
    from kagent.authoring.importers.flashinfer.exchange import find_definitions
    from kagent.authoring.importers.kernelbench_files import is_problem

    def below(pattern: str) -> list[Path]:
        found = [path] if path.match(pattern) else path.rglob(pattern)
        return [p for p in found if not _hidden(p.relative_to(path))]

    tasks = [p.parent for p in below("task.toml")]
    hard = [p.parent for p in below("shapes.py") if (p.parent / "reference.py").is_file()]
    yield from ((Form.TASK, str(p), "") for p in tasks)
    yield from ((Form.KERNELBENCH_HARD, str(p), "") for p in hard)
    taken = {*tasks, *hard}
    for file in below("*.py"):
        if not taken.intersection(file.parents) and is_problem(file):
            yield Form.KERNELBENCH, str(file), ""
    definitions: list[tuple[Path, Path | None]] = []
    with contextlib.suppress(UserError):  # JSON of another kind
        definitions = find_definitions([path]) if below("*.json") else []
    for file, workloads in definitions:
        if not taken.intersection(file.parents) and not _hidden(file.relative_to(path)):
            yield Form.FLASHINFER, str(file), str(workloads or "")


def _name(path: Path, root: Path) -> str:
    relative = path.relative_to(root)
    return (
        str(relative.with_suffix("") if path.is_file() else relative)
        if relative.name
        else root.name
    )


def _hidden(relative: Path) -> bool:
    return any(part.startswith((".", "__")) for part in relative.parts)


def _by_number(name: str) -> list[tuple[int, str]]:
    """2_x before 10_x."""
    return [(int(n or 0), text) for n, text in re.findall(r"(\d*)(\D*)", name)]
