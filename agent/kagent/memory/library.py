"""The library of runs on disk: a file for each run in the user's data folder.

$XDG_DATA_HOME/kagent/memory/RUN.json    `Remembered`; by default below ~/.local/share
$XDG_DATA_HOME/kagent/memory/forgotten   ids of runs that are not to be used, a line each
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from kagent_sandbox.data.records import RecordError, from_json, to_json
from kagent_sandbox.data.task import Task
from kagent_sandbox.errors import RunError, UserError

from kagent.memory.record import Remembered, remember
from kagent.runs.files import clear_errors, read_regular, write_file
from kagent.runs.history import History
from kagent.runs.manifest import Manifest, identity, list_runs, read_manifest
from kagent.runs.store import read_history

MOST_BYTES = 4 << 20
_ID = re.compile(r"[0-9a-f]{16}")


def memory_folder() -> Path:
    """`$XDG_DATA_HOME/kagent/memory`, by default `~/.local/share/kagent/memory`. It may not
    exist.

    Raises:
        UserError: The variable names a file.
    """
    base = os.environ.get("XDG_DATA_HOME", "")
    if base and any(p.is_file() for p in (Path(base), *Path(base).parents)):
        raise UserError(f"XDG_DATA_HOME={base}: a file, where a folder was expected: set it to one")
    return (Path(base) if base else Path.home() / ".local" / "share") / "kagent" / "memory"


def keep(folder: Path, manifest: Manifest, history: History, task: Task) -> Path | None:
    """Write what is remembered of a run, instead of what was before; None where there is nothing:
    no kernel is better than the task's own, and no technique was tried; or the run is forgotten.

    Raises:
        RunError: The library cannot be written.
    """
    found = remember(folder, manifest, history, task)
    if (not found.kernels and not found.effects) or found.run in forgotten():
        return None
    place = memory_folder()
    with clear_errors(place):
        place.mkdir(parents=True, exist_ok=True)
        path = place / f"{found.run}.json"
        write_file(path, json.dumps(to_json(found), indent=1) + "\n")
    return path


def known(say: Callable[[str], None] = lambda _: None) -> list[Remembered]:
    """All runs in the library, the earliest first, but for forgotten ones.

    Args:
        say: Is told of files that cannot be read; they are left out.
    """
    found, without = [], forgotten()
    for path in sorted(memory_folder().glob("*.json")):
        try:
            record = from_json(Remembered, json.loads(read_regular(path, MOST_BYTES)))
            if not _ID.fullmatch(record.run):
                raise RecordError(f"{record.run!r:.40} is no run's id")
            if record.run not in without:
                found.append(record)
        except (OSError, ValueError, RecursionError, UserError) as e:
            say(f"{path} is left out: {e}")
    return sorted(found, key=lambda r: (r.started, r.run))


def of_task(runs: Path, task: Task, beside: Iterable[Remembered]) -> list[Remembered]:
    """Records of a task's runs in a folder of runs, without those in `beside` and those
    forgotten. Damaged runs are left out.

    Raises:
        UserError: See `forgotten`.
    """
    without = {r.run for r in beside} | forgotten()
    found = []
    for folder in list_runs(runs):
        try:
            manifest = read_manifest(folder)
            if manifest.task == task.name and identity(folder, manifest) not in without:
                store, history = read_history(folder)  # whose manifest has the device
                found.append(remember(folder, store.manifest, history, task))
        except RunError:
            continue
    return found


def forgotten() -> set[str]:
    """Ids of runs that are not to be used.

    Raises:
        UserError: The list of them is there and cannot be read: to go on would use them again.
    """
    path = memory_folder() / "forgotten"
    try:
        text = read_regular(path, MOST_BYTES).decode()
    except FileNotFoundError:
        return set()
    except (OSError, ValueError) as e:
        raise UserError(
            f"{path}: cannot be read ({e}), and lists the runs that are not to be used: mend it, "
            "or remove it to have them used again"
        ) from None
    return {line for line in text.split() if _ID.fullmatch(line)}


def forget(run: str) -> None:
    """Remove a run from the library, and keep its folder, if there is one, from being used.

    Args:
        run: Its id.

    Raises:
        RunError: The library cannot be written.
        UserError: See `forgotten`.
    """
    place = memory_folder()
    with clear_errors(place):
        place.mkdir(parents=True, exist_ok=True)
        write_file(place / "forgotten", "".join(f"{r}\n" for r in sorted({*forgotten(), run})))
        (place / f"{run}.json").unlink(missing_ok=True)
