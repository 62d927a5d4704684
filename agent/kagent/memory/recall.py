"""Memory for a new run: seeds of the nearest runs, and the gains of techniques."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.task import Task
from kagent_sandbox.syntax import parse

from kagent.memory.library import known, of_task
from kagent.memory.operation import form_of, operation_of
from kagent.memory.record import Remembered, RememberedKernel
from kagent.runs.ideas import total
from kagent.runs.lineage import kernel_id
from kagent.runs.recalled import Recalled, RecalledSeed
from kagent.runs.source_index import text_identity
from kagent.search.rename import RenameError, module_names, rename
from kagent.search.text_edits import EditableText
from kagent.search.tunables import read_tunables

MOST_SEEDS = 2

SAME = "the same task"
OTHER_CASES = "the same operation with other cases"
EARLIER = "a task of the same name, as it was then"
SAME_FORM = "a task that is called in the same way"
_SEEDS_OF = (SAME, OTHER_CASES, EARLIER)  # the nearest first


@dataclass(frozen=True, slots=True)
class Wanted:
    """Task and device of a run. `device` is empty where none was opened yet."""

    task: Task
    kind: Kind
    target: str
    languages: tuple[str, ...]
    device: str = ""
    own: tuple[str, ...] = ()  # texts of its task's seeds


def relation(record: Remembered, task: Task) -> str:
    """Relation of a run's task to another one; empty if there is none.

    A kernel of another function cannot pass the check, however like it is called. So seeds come
    from tasks with the same operation (see `operation_of`), or of the same name. What techniques
    did is taken from tasks of the same form, too.
    """
    if record.operation and record.operation == operation_of(task):
        return SAME if record.digest == task.digest else OTHER_CASES
    if record.task == task.name:
        return SAME if record.digest == task.digest else EARLIER
    return SAME_FORM if record.form and record.form == form_of(task) else ""


def recall(
    wanted: Wanted, runs: Path, say: Callable[[str], None] = lambda _: None
) -> tuple[Recalled, tuple[str, ...]]:
    """Choose what a run takes from the library, and from its task's runs in a folder of runs.

    Args:
        wanted: What the run is for.
        runs: Folder of runs, which may not exist.
        say: Is told of what cannot be read.

    Returns:
        What is taken, and the texts of its seeds.
    """
    library = known(say)
    all_runs = [*library, *of_task(runs, wanted.task, library)]
    records = [(r, relation(r, wanted.task)) for r in all_runs if r.kind == wanted.kind]
    related = [(r, how) for r, how in records if how]
    left_out: list[str] = []
    chosen: list[tuple[RecalledSeed, str]] = []
    seen = {text_identity(text) for text in wanted.own}
    families: set[str] = set()  # the task's own with other constants are worth a seed
    for record, how, kernel in _nearest_first(related, wanted):
        if len(chosen) == MOST_SEEDS:
            break
        what = f"#{kernel.id} of {record.folder} ({record.task} on {record.device})"
        source = _named(kernel, wanted.task.entry)
        if source is None:
            left_out.append(f"{what}: its {kernel.entry} cannot be renamed {wanted.task.entry}")
            continue
        file = read_tunables(source)
        if text_identity(source) in seen or (file is not None and file.family in families):
            continue  # the task's own, or what a nearer run gave already
        seen.add(text_identity(source))
        if file is not None:
            families.add(file.family)
        chosen.append((_seed(record, how, kernel, source, wanted), source))
    effects = total(e for r, _ in related for e in r.effects)
    used = tuple(r.folder for r, _ in related if r.effects)
    recalled = Recalled(tuple(seed for seed, _ in chosen), effects, used, tuple(left_out))
    return recalled, tuple(source for _, source in chosen)


def _nearest_first(
    related: Sequence[tuple[Remembered, str]], wanted: Wanted
) -> Iterator[tuple[Remembered, str, RememberedKernel]]:
    """Kernels that may be seeds: by the relation of the task, then of the device, then by how much
    they gained. Every run's best comes before any run's second.
    """
    found = [
        (place, _SEEDS_OF.index(how), _distance(record, wanted), -kernel.log_speed_up, order)
        for order, (record, how) in enumerate(related)
        if how in _SEEDS_OF
        for place, kernel in enumerate(_usable(record, wanted))
    ]
    for place, _, _, _, order in sorted(found):
        record, how = related[order]
        yield record, how, _usable(record, wanted)[place]


def _usable(record: Remembered, wanted: Wanted) -> list[RememberedKernel]:
    return [k for k in record.kernels if k.language in wanted.languages]


def _distance(record: Remembered, wanted: Wanted) -> int:
    """0: the same device; 1: the same target; 2: another target of the same kind."""
    if record.target != wanted.target:
        return 2
    return 0 if record.device == wanted.device else 1


def _seed(
    record: Remembered, how: str, kernel: RememberedKernel, source: str, wanted: Wanted
) -> RecalledSeed:
    distance = _distance(record, wanted)
    near = "on another device of this target" if wanted.device else "on a device of this target"
    where = ("on this device", near, "on another target")[distance]
    return RecalledSeed(
        run=record.folder,
        id=kernel.id,
        task=record.task,
        device=record.device,
        name=kernel.name,
        kernel=kernel_id(source),
        why=f"{how}, {where}",
        hypothesis=kernel.hypothesis,
        log_speed_up=kernel.log_speed_up,
        models=kernel.models,
        licences=kernel.licences,
    )


def _named(kernel: RememberedKernel, entry: str) -> str | None:
    """A kernel's text with its function named as a task's; None where that cannot be done."""
    if kernel.entry == entry:
        return kernel.source
    try:
        tree: ast.Module = parse(kernel.source)
        if entry in module_names(tree):
            return None
        text = EditableText(kernel.source)
        return text.apply(rename(text, tree, {kernel.entry: entry}))
    except (RenameError, SyntaxError, ValueError, RecursionError):
        return None
