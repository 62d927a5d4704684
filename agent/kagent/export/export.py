"""Export of winners into a library: verify and measure, merge with an existing library, write."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from kagent_sandbox.builder.identity import source_hash
from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.task import Task, load_task
from kagent_sandbox.data.verdict import SpeedVerdict
from kagent_sandbox.errors import KagentError, UserError

from kagent import resources
from kagent.export.certify import entrant_of
from kagent.export.dispatch_table import best_of
from kagent.export.generic import operator_source, refuse_unsuited
from kagent.export.host import ExportHost
from kagent.export.import_rewrite import as_shipped
from kagent.export.measuring import (
    LibraryEntrant,
    LibraryTimes,
    Measurement,
    Say,
    TimedResult,
)
from kagent.export.merging import merge_library, merge_operator
from kagent.export.own_tests import failure_of
from kagent.export.packaging import refuse_collisions
from kagent.export.reading import PACKAGES, OnDisk, is_library, read_library
from kagent.export.record import (
    DeviceRecord,
    KernelRecord,
    LibraryRecord,
    OperatorRecord,
    valid_name,
)
from kagent.export.references import shipped_reference
from kagent.export.single_file import refuse_others, refuse_single_file, single_files
from kagent.export.winners import Winner
from kagent.export.writing import files_of, refuse_edited, write_library
from kagent.resources import resource
from kagent.runs.files import write_file
from kagent.text import interval_text

Merged: TypeAlias = dict[str, tuple[OperatorRecord, list[str]]]
"""Operators as they are to be, by task, and what changed, in words."""


@dataclass(frozen=True)
class Exported:
    """The outcome of an export."""

    folder: Path
    library: LibraryRecord
    before: str | None  # the version that was there
    notes: tuple[str, ...]  # kernels that were there and are not used here any more, and why


def export(
    winners: Sequence[Winner],
    folder: Path,
    name: str | None,
    host: ExportHost,
    say: Say,
    *,
    allow_slower: bool = False,
    force: bool = False,
) -> Exported:
    """Write winners into a new library, or into one that exists.

    Args:
        winners: Of one run or several, of one task or several, all for devices of the host.
        folder: The library's; made if need be.
        name: The Python package's; that of the library there, if None.
        host: Where they are measured.
        say: Told what happens.
        allow_slower: Whether a kernel may lose to torch on the hidden cases drawn here; one that
            does is used wherever no other kernel is faster.
        force: Whether files of the library that were edited since may be overwritten.

    Raises:
        UserError: A winner is refused, the library's own tests fail, or the folder cannot be taken;
            nothing was written.
        MachineError: The machine failed; nothing was written.
    """
    disk = read_library(folder) if is_library(folder) else None
    name = _name(disk, folder, name)
    if disk is None:
        _refuse_used(folder)
    elif not force:
        refuse_edited(disk)
    merged: Merged = {}
    notes: list[str] = []
    cubins: dict[str, bytes] = {}
    groups = _groups(winners)
    blanks = {task: _blank(group[0].task) for (task, _), group in groups.items()}
    # Refuse kernels that cannot go into a library before anything is measured.
    there = {o.task: o for o in disk.library.operators} if disk is not None else {}
    refuse_collisions({**there, **blanks}.values())
    for winner in winners:
        as_shipped(winner.source)
    beside: dict[tuple[str, Kind], list[KernelRecord]] = {}
    wanted: list[Measurement] = []
    for (task, kind), group in groups.items():
        say(f"{task}: {len(group)} for the {kind.upper()}")
        for winner in group:
            _tell_of_old_task(winner, say)
        old = there.get(task)
        kept = beside[task, kind] = _beside(old, group, kind, folder)
        entrants = [_entrant(w) for w in group] + [entrant_of(old, k, kind) for k in kept if old]
        wanted.append(Measurement(group[0].task, kind, entrants))
    results = host.measure(wanted, say)
    for ((task, kind), group), measured in zip(groups.items(), results, strict=True):
        old, kept = merged[task][0] if task in merged else there.get(task), beside[task, kind]
        _refuse(group, measured.results, allow_slower=allow_slower)
        refused = {k.id: measured.results[k.id].refused for k in kept}
        notes += [
            f"{i} is not used on {measured.device.name}: {w}" for i, w in refused.items() if w
        ]
        cubins |= measured.cubins
        kernels = (*(_kernel(w, measured) for w in group), *kept)
        losers = {w.id for w in group if _loses(measured.results[w.id])}
        device = _asked_for(measured.device, losers) if losers else measured.device
        new = replace(blanks[task], kernels=kernels, devices=(device,))
        _merge(merged, old, new)
    gpu = any(kind == "gpu" for _, kind in groups)
    library = _write(disk, folder, name, merged, cubins, host, say, gpu=gpu)
    return Exported(folder, library, disk.library.version if disk else None, tuple(notes))


@dataclass(frozen=True)
class ExportedFiles:
    """The outcome of an export into single files: by their names, and what they hold."""

    folder: Path
    files: tuple[str, ...]
    operators: tuple[OperatorRecord, ...]


def export_files(
    winners: Sequence[Winner],
    folder: Path,
    host: ExportHost,
    say: Say,
    *,
    allow_slower: bool = False,
    force: bool = False,
) -> ExportedFiles:
    """Write each winner as one Python file, with its test beside it.

    Args:
        winners: One of each task.
        folder: For TASK.py and test_TASK.py; made if need be.
        host: Where they are measured.
        say: Told what happens.
        allow_slower: As for `export`.
        force: Whether such files that are there may be overwritten.

    Raises:
        UserError: A winner is refused, its file's own test fails, or the folder cannot be written;
            nothing was written.
        MachineError: The machine failed; nothing was written.
    """
    groups = _groups(winners)
    tasks = [task for task, _ in groups]
    if len(tasks) < len(winners) or len({*tasks}) < len(tasks):
        raise UserError(
            "a single file has one kernel of a task: name one run of each, or export all of them "
            "into a library, which dispatches among them (omit --single-file)"
        )
    names = [name for task in tasks for name in (f"{task}.py", f"test_{task}.py")]
    refuse_others(folder, names, force=force)
    blanks = [_blank(winner.task) for winner in winners]
    for winner, blank in zip(winners, blanks, strict=True):
        refuse_single_file(blank, winner.id, winner.source)
    files: dict[str, bytes] = {}
    operators = []
    for winner, blank in zip(winners, blanks, strict=True):
        _tell_of_old_task(winner, say)
        kind = winner.manifest.kind
        wanted = [Measurement(winner.task, kind, [_entrant(winner)])]
        (measured,) = host.measure(wanted, say)
        _refuse([winner], measured.results, allow_slower=allow_slower)
        loses = _loses(measured.results[winner.id])
        device = _asked_for(measured.device, {winner.id}) if loses else measured.device
        operator = replace(blank, kernels=(_kernel(winner, measured),), devices=(device,))
        made = {name: text.encode() for name, text in single_files(operator).items()}
        say(f"{winner.id}: its file's own test")
        name = winner.task.name
        tested = host.run_tests(name, made, gpu=kind == "gpu", path="")
        if wrong := failure_of(name, tested):
            raise UserError(f"{folder}: nothing was written: {wrong}")
        files |= made
        operators.append(operator)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            write_file(folder / name, data)
    except OSError as e:
        raise UserError(f"{folder}: cannot be written ({e.strerror}: {e.filename})") from None
    return ExportedFiles(folder, tuple(files), tuple(operators))


def _tell_of_old_task(winner: Winner, say: Say) -> None:
    if not winner.is_of_todays_task:
        name = winner.task.name
        say(f"{winner.folder.name}: of an earlier version of {name}; judged anew by today's")


def update(
    disk: OnDisk,
    sessions: Sequence[tuple[OperatorRecord, LibraryTimes]],
    host: ExportHost,
    say: Say,
) -> LibraryRecord:
    """Put what was just measured on a host into a library.

    Raises:
        UserError: Its own tests fail, or it cannot be written.
    """
    merged: Merged = {}
    cubins: dict[str, bytes] = {}
    for operator, measured in sessions:
        old = merged[operator.task][0] if operator.task in merged else operator
        mine = [k for k in old.kernels if k.id in measured.results]
        kernels = tuple(_certified(k, measured) for k in mine)
        _merge(merged, old, replace(operator, kernels=kernels, devices=(measured.device,)))
        cubins |= measured.cubins
    gpu = any(m.device.kind == "gpu" for _, m in sessions)
    return _write(disk, disk.folder, disk.library.name, merged, cubins, host, say, gpu=gpu)


def _merge(merged: Merged, old: OperatorRecord | None, new: OperatorRecord) -> None:
    """Add what was measured on one device; what changed, in words, adds up."""
    operator, words = merge_operator(old, new)
    before = merged[new.task][1] if new.task in merged else []
    merged[new.task] = operator, before + words


def _write(
    disk: OnDisk | None,
    folder: Path,
    name: str,
    merged: Merged,
    cubins: Mapping[str, bytes],
    host: ExportHost,
    say: Say,
    *,
    gpu: bool,
) -> LibraryRecord:
    """Put a library in its place, once its own tests have passed elsewhere."""
    version = resources.version()
    old = disk.library if disk is not None else None
    library = merge_library(old, name, version, list(merged.values()))
    files = files_of(library, cubins=cubins, old=disk)
    say("running the library's own tests")
    if wrong := failure_of(name, host.run_tests(name, files, gpu=gpu, path=PACKAGES)):
        raise UserError(f"{folder}: nothing was written: {wrong}")
    say(f"writing {folder}")
    write_library(library, files, folder, old=disk)
    return library


def _certified(kernel: KernelRecord, measured: LibraryTimes) -> KernelRecord:
    """Return the record with the kernels that were compiled and checked here as well."""
    known = {c.key: c for c in (*kernel.compiled, *measured.compiled.get(kernel.id, ()))}
    targets = dict.fromkeys([*kernel.targets, measured.target])
    regions = measured.results[kernel.id].regions
    return replace(kernel, compiled=tuple(known.values()), targets=tuple(targets), regions=regions)


def _name(disk: OnDisk | None, folder: Path, name: str | None) -> str:
    there = disk.library.name if disk is not None else None
    if there is not None and name not in (None, there):
        raise UserError(f"{folder}: the library there is called {there}: omit --name {name}")
    chosen = there or name or folder.resolve().name.lower().replace("-", "_")
    if not valid_name(chosen):
        raise UserError(
            f"{chosen!r} cannot be a library's name: 2 to 50 lower-case letters, digits and _, a "
            "letter first and no _ last (--name)"
        )
    return chosen


def _refuse_used(folder: Path) -> None:
    """Only into a new folder, an empty one, or one that holds nothing but a repository's own."""
    inside = [p.name for p in folder.iterdir()] if folder.is_dir() else []
    if odd := sorted(n for n in inside if n not in (".git", ".gitignore", ".gitattributes")):
        raise UserError(
            f"{folder}: holds {', '.join(odd[:3])}{' ...' if len(odd) > 3 else ''} and no library: "
            "name an empty or a new folder"
        )


def _groups(winners: Sequence[Winner]) -> dict[tuple[str, Kind], list[Winner]]:
    found: dict[tuple[str, Kind], list[Winner]] = {}
    for winner in winners:
        group = found.setdefault((winner.task.name, winner.manifest.kind), [])
        if any(w.task.digest != winner.task.digest for w in group):
            raise UserError(
                f"{winner.folder}: another version of task {winner.task.name} than that of "
                f"{group[0].folder}: export them into libraries of their own"
            )
        if all(w.id != winner.id for w in group):
            group.append(winner)
    return found


def _beside(
    old: OperatorRecord | None, group: Sequence[Winner], kind: Kind, folder: Path
) -> list[KernelRecord]:
    """Kernels of the library that new ones are measured beside."""
    if old is None:
        return []
    task = group[0].task
    there = (old.task_toml, old.reference_py)
    ours = ((task.folder / "task.toml").read_text("utf-8"), shipped_reference(task))
    if there != ours:
        raise UserError(
            f"{folder}: its {task.name} is another version of that task than the run's: results do "
            "not compare; export into a new library"
        )
    new = {w.id for w in group}
    same = (k for k in old.kernels if k.written_in.kind == kind)
    return [k for k in same if k.id not in new]


def _entrant(winner: Winner) -> LibraryEntrant:
    return LibraryEntrant(winner.id, winner.source, winner.configs, winner.choice)


def _refuse(
    group: Sequence[Winner], results: Mapping[str, TimedResult], *, allow_slower: bool
) -> None:
    reasons = []
    for winner in group:
        result, who = results[winner.id], f"{winner.folder.name} #{winner.candidate.id}"
        versus = result.versus_torch
        if result.refused:
            reasons.append(f"{who} {result.refused}")
        elif versus is None and not allow_slower:
            reasons.append(
                f"{who} has no verdict beside torch on hidden cases drawn now: no baseline ran on "
                "all of them, or memory of the device was not enough for one. --allow-slower "
                "exports it anyway"
            )
        elif versus is not None and _loses(result) and not allow_slower:
            found = interval_text(versus.ratio, versus.low, versus.high)
            reasons.append(
                f"{who} is not FASTER than torch on hidden cases drawn now: {versus.verdict}, "
                f"{found}. --allow-slower exports it anyway"
            )
    if reasons:
        raise UserError("nothing was exported: " + "; ".join(reasons))


def _loses(result: TimedResult) -> bool:
    versus = result.versus_torch
    return versus is not None and versus.verdict is not SpeedVerdict.FASTER


def _asked_for(device: DeviceRecord, losers: set[str]) -> DeviceRecord:
    """Use kernels where torch is faster, too: they lose to it, and were asked for."""
    points = []
    for point in device.points:
        best = best_of(point.times, point.config, None)
        points.append(replace(point, best=best) if best in losers else point)
    return replace(device, points=tuple(points))


def _blank(task: Task) -> OperatorRecord:
    """An operator without kernels."""
    return OperatorRecord(
        task=task.name,
        entry=task.entry,
        signature=task.signature,
        summary=task.summary,
        dims=tuple(task.dims),
        kernels=(),
        devices=(),
        task_toml=(task.folder / "task.toml").read_text(encoding="utf-8"),
        reference_py=shipped_reference(task),
        operator_py=_operator_text(task),
    )


def _operator_text(task: Task) -> str:
    """operator.py of the task, of kagent's own copy of the same task, or a generic one.

    Raises:
        TaskError: No operator can be made of the task.
    """
    refuse_unsuited(task)
    places = [task.folder]
    with contextlib.suppress(KagentError):
        shipped = load_task(resource("seeds") / task.name)
        places += [shipped.folder] if shipped.digest == task.digest else []
    for place in places:
        if (place / "operator.py").is_file():
            return (place / "operator.py").read_text(encoding="utf-8")
    return operator_source(task)


def _kernel(winner: Winner, measured: LibraryTimes) -> KernelRecord:
    result = measured.results[winner.id]
    return KernelRecord(
        id=winner.id,
        task=winner.task.name,
        language=winner.language.name,
        source=winner.source,
        sha256=source_hash(winner.source),
        targets=(measured.target,),
        configs=result.configs,
        regions=result.regions,
        pitched=result.pitched,
        compiled=tuple(measured.compiled.get(winner.id, ())),
        origin=winner.origin,
    )
