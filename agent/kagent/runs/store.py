"""A run's folder: its events, committed as they happen, and its texts.

    run.json         task, configuration, environment (`Manifest`); written once
    lineage.sqlite   append-only events, each with a checksum (`checksums`); write-ahead log: a
                     killed process loses nothing committed
    kernels/ID.py    every proposal's text by its content
    prompts/N.md     the prompt of ask N (N-2.md: asked again, after a duplicate)
    replies/N.md     its reply, word for word (N-2.md: the second one, as for a prompt)
    logs/N.txt       output of building candidate N
    lock             held by the one process that writes

Opening a run changes nothing in its folder, not even a time stamp: the first event or text does.
The folder survives SIGKILL of the process at any moment. A power cut may lose the last events (they
are not synced one by one), but not the order or integrity of those before.
"""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Self, TypeAlias

from kagent_sandbox.data.records import to_json
from kagent_sandbox.errors import RunError

from kagent.runs.analyses import read_analyses
from kagent.runs.ask import AskRecord
from kagent.runs.checksums import End, LogRow, end_of, insert, read_rows
from kagent.runs.cost import ModelCall
from kagent.runs.events import Stop
from kagent.runs.files import (
    clear_errors,
    connect,
    connect_to_read,
    refuse_linked_folders,
    sign_lock,
    take_lock,
    write_file,
)
from kagent.runs.final_race import FinalRace
from kagent.runs.history import History, StoredProposal, StoredVerdict, replay_events
from kagent.runs.kernel_files import kernel_path
from kagent.runs.lineage import (
    Candidate,
    Proposal,
    kernel_id,
)
from kagent.runs.manifest import Manifest, fresh_folder, read_digest, read_manifest
from kagent.runs.recalled import Recalled
from kagent.runs.stored_event import MANIFEST, StoredEvent, checked_event, damaged_event
from kagent.runs.timed_configs import TimedConfigs

Row: TypeAlias = tuple[str, Mapping[str, Any]]
"""Kind and JSON of an event that is to be stored."""


class RunStore:
    """One run's folder, open for reading or for appending."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        db: sqlite3.Connection,
        lock: IO[str] | None,
        *,
        write: bool,
    ) -> None:
        self.folder = folder
        self.manifest = manifest
        self._db = db
        self._lock = lock
        self._may_write = write
        self._writes = False  # once something was to be written
        self._end: End | None = end_of(db)
        self._opened_at, self._opened_s = time.time(), _passed_s()

    @classmethod
    def create(cls, runs: Path, manifest: Manifest) -> RunStore:
        """Make a new folder under `runs`, named by task and time.

        Raises:
            RunError: The folder cannot be written.
        """
        with clear_errors(runs):
            runs.mkdir(parents=True, exist_ok=True)
            folder = fresh_folder(runs, f"{manifest.task}-{time.strftime('%Y%m%d-%H%M%S')}")
            (folder / "kernels").mkdir()
            (folder / "logs").mkdir()
            connect(folder / "lineage.sqlite").close()
            # Last: a folder with a manifest has a database.
            write_file(folder / "run.json", json.dumps(to_json(manifest), indent=2) + "\n")
        store = cls.open(folder)
        store._begin_to_write()  # noqa: SLF001 - of this class
        store.append(MANIFEST, {"digest": read_digest(folder)})
        return store

    @classmethod
    def open(cls, folder: Path, *, write: bool = True) -> RunStore:
        """Open an existing folder; with `write`, take its lock. A folder that never had one gets
        it with what is written first.

        Raises:
            RunError: It is no run, of a newer format, damaged, in use, or not writable.
        """
        manifest = read_manifest(folder)
        path = folder / "lineage.sqlite"
        with clear_errors(folder):
            wanted = [p for p in (folder, path) if write and p.exists()]
            if not all(os.access(p, os.W_OK, effective_ids=True) for p in wanted):
                raise PermissionError(errno.EACCES, "not writable")
            lock = take_lock(folder) if write and (folder / "lock").exists() else None
            db: sqlite3.Connection | None = None
            try:
                refuse_missing(path)
                db = connect_to_read(path, alone=lock is not None)
                manifest = _as_measured(folder, manifest, db)
                return cls(folder, manifest, db, lock, write=write)
            except BaseException:
                if db is not None:
                    db.close()
                if lock is not None:
                    lock.close()
                raise

    def _begin_to_write(self) -> None:
        """Hold the folder, and open its database for appending.

        Raises:
            RunError: Another process works on it, or has since it was opened; or it is not
                writable.
        """
        if self._writes:
            return
        assert self._may_write, "opened for reading"
        with clear_errors(self.folder):
            refuse_linked_folders(self.folder, ("kernels", "prompts", "replies", "logs"))
            if self._lock is None:
                self._lock = take_lock(self.folder)
            sign_lock(self._lock, str(os.getpid()))
            db = connect(self.folder / "lineage.sqlite")
            if end_of(db) != self._end:
                db.close()
                raise RunError(
                    f"{self.folder}: another process has worked on this run meanwhile: try again"
                )
            self._db.close()
            self._db = db
        self._writes = True

    def append(self, kind: str, data: Mapping[str, Any]) -> None:
        """Commit one event.

        Raises:
            RunError: The disk is full, or the folder is not writable.
        """
        self.append_all([(kind, data)])

    def append_all(self, rows: Iterable[Row]) -> None:
        """Commit several events: all of them or, if the process ends, none.

        Raises:
            RunError: The disk is full, or the folder is not writable.
        """
        # The wall clock at the start and what has passed since: differences of one process's events
        # are durations, whatever somebody does to the clock meanwhile.
        now = self._opened_at + _passed_s() - self._opened_s
        self._insert((now, kind, _compact(data)) for kind, data in rows)

    def adopt(self, events: Iterable[StoredEvent]) -> None:
        """Commit events of a copy of this run, as they were when they happened; all or none.

        Raises:
            RunError: The disk is full, or the folder is not writable.
        """
        self._insert((e.at, e.kind, _compact(e.data)) for e in events)

    def _insert(self, rows: Iterable[tuple[float, str, str]]) -> None:
        self._begin_to_write()
        with clear_errors(self.folder):
            before = end_of(self._db) if self._end is None else self._end
            self._end = None  # not known where a signal comes between the commit and the last line
            with self._db:
                end = insert(self._db, rows, before)
        self._end = end

    def begin(self, budget: int) -> None:
        """Note that a session begins, and its budget."""
        self.append("session", {"budget": budget})

    def measured_on(self, environment: Mapping[str, object]) -> None:
        """Keep the device of a run that was made without one: from now on it is the run's own."""
        self.append("machine", {"environment": environment})
        self.manifest = replace(self.manifest, environment=environment)

    def ask(self, ask: AskRecord, *more: Row) -> None:
        """Keep a decision, before anybody is asked, with `more` events that belong to it."""
        self.append_all([("asked", to_json(ask)), *more])

    def drop(self, ask: int) -> None:
        """Note that an ask has no answer and is not to be put again."""
        self.append("dropped", {"ask": ask})

    def call(self, call: ModelCall, prompt: str, reply: str | None) -> None:
        """Keep a model's call: both texts first, so that no event names a missing file."""
        self.write_text("prompts", call.ask, call.attempt, prompt)
        if reply is not None:
            self.write_text("replies", call.ask, call.attempt, reply)
        self.append("call", to_json(call))

    def tried(self, call: ModelCall) -> None:
        """Keep the cost of a trial call, which no ask belongs to."""
        self.append("tried", to_json(call))

    def write_text(self, kind: str, ask: int, attempt: int, text: str) -> Path:
        """Keep a prompt or a reply ("prompts", "replies"); returns where."""
        self._begin_to_write()
        path = self.text_path(kind, ask, attempt)
        with clear_errors(self.folder):
            path.parent.mkdir(exist_ok=True)
            write_file(path, text)
        return path

    def text_path(self, kind: str, ask: int, attempt: int = 0) -> Path:
        """Return the path of a prompt or a reply."""
        again = f"-{attempt + 1}" if attempt else ""
        return self.folder / kind / f"{ask:04}{again}.md"

    def reply_path(self, history: History, proposal: Proposal) -> Path | None:
        """Return the path of the reply that a proposal was read from; None where none is kept.

        An answer from outside is no attempt of a model: the log alone says how many came before it.
        """
        if proposal.ask is None:
            return None
        attempt = history.told.get(proposal.id, proposal.attempt)
        path = self.text_path("replies", proposal.ask, attempt)
        return path if path.is_file() else None

    def propose(self, *proposals: Proposal, more: Iterable[Row] = ()) -> None:
        """Keep accepted proposals, with `more` events that belong to them.

        Their texts come first, so that no event names a missing file.
        """
        self._begin_to_write()
        rows = []
        for proposal in proposals:
            self._write_kernel(proposal.source)
            fields = {n: getattr(proposal, n) for n in StoredProposal.__dataclass_fields__}
            rows.append(("proposed", to_json(StoredProposal(**fields))))
        self.append_all([*rows, *more])

    def _write_kernel(self, source: str) -> None:
        self._begin_to_write()
        path = self.kernel_path(kernel_id(source))
        if not path.exists():
            with clear_errors(self.folder):
                write_file(path, source)

    def record(self, candidate: Candidate) -> None:
        """Keep the verdict of an accepted proposal; its text first, where constants were tuned."""
        tuned = candidate.proposal.kernel if candidate.written else ""
        if tuned:
            self._write_kernel(candidate.proposal.source)
        row = StoredVerdict(
            candidate.id,
            candidate.verdict,
            candidate.facts,
            candidate.withdrawals,
            tuned,
            candidate.unit,
        )
        self.append("recorded", to_json(row))

    def race(self, race: FinalRace) -> None:
        """Keep the final race's result, hidden cases included: from now on they are known."""
        self.append("race", to_json(race))

    def recall(self, recalled: Recalled, sources: Iterable[str]) -> None:
        """Keep what the run takes from memory; its kernels' texts come first."""
        for source in sources:
            self._write_kernel(source)
        self.append("recalled", to_json(recalled))

    def timed(self, configs: TimedConfigs) -> None:
        """Keep what the configurations of a candidate took."""
        self.append("timed", to_json(configs))

    def stop(self, stop: Stop) -> None:
        """Note why a session ended."""
        self.append("stopped", {"stop": stop.value})

    def log(self, proposal_id: int, text: str) -> None:
        """Keep what building a candidate printed."""
        self._begin_to_write()
        with clear_errors(self.folder):
            write_file(self.folder / "logs" / f"{proposal_id}.txt", text)

    def kernel_path(self, kernel: str) -> Path:
        """Return the path of a kernel's text."""
        return kernel_path(self.folder, kernel)

    def events(self) -> Iterator[StoredEvent]:
        """All events in order.

        Raises:
            RunError: The file is damaged.
        """
        with clear_errors(self.folder):
            for row in read_rows(self._db):
                yield checked_event(self.folder, row)

    def history(self) -> History:
        """Everything, replayed into a lineage.

        Raises:
            RunError: The file is damaged.
        """
        return replay_events(self.folder, self.manifest.id, tuple(self.events()))

    def close(self) -> None:
        """Fold the write-ahead log into the one file, where nobody is reading; let the lock go."""
        with suppress(sqlite3.Error):
            if self._writes:
                self._db.execute("PRAGMA journal_mode=DELETE")
        self._db.close()
        if self._lock is not None:
            if self._writes:
                with suppress(OSError):
                    sign_lock(self._lock, "")
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _compact(data: Mapping[str, Any]) -> str:
    return json.dumps(data, separators=(",", ":"), allow_nan=False)


def refuse_missing(path: Path) -> None:
    """Refuse a run without its database.

    Raises:
        RunError: `path` is not there.
    """
    if not path.exists():
        raise RunError(
            f"{path.parent}: lineage.sqlite is missing, and with it all that was measured: put it "
            "back, or start a new run"
        )


def _as_measured(folder: Path, manifest: Manifest, db: sqlite3.Connection) -> Manifest:
    """The manifest; of a run that was made without a device, with the one that judged it first.

    Raises:
        RunError: An event is not what was written.
    """
    first: LogRow | None = None
    for row in read_rows(db):
        if row.fault:
            raise damaged_event(folder, row, row.fault)
        if row.kind == "machine" and first is None:
            first = row
    if first is None:
        return manifest
    try:
        environment = checked_event(folder, first).data["environment"]
        return replace(manifest, environment=dict(environment))
    except (ValueError, KeyError, TypeError) as e:
        raise damaged_event(folder, first, str(e)) from None


def _passed_s() -> float:
    """Seconds on a clock that nobody can set, and that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def last_seq(folder: Path) -> int:
    """Number of a run's last event, as its history has it, without reading those before; 0 where
    there is none.

    Raises:
        RunError: It is no run, or cannot be read.
    """
    manifest = read_manifest(folder)
    path = folder / "lineage.sqlite"
    with clear_errors(folder):
        refuse_missing(path)
        with closing(connect_to_read(path)) as db:
            last = end_of(db).seq
    return last + sum(1 for _ in read_analyses(folder, manifest.id))


def read_history(folder: Path) -> tuple[RunStore, History]:
    """A run, opened for reading only, and its history. The store is closed already."""
    store = RunStore.open(folder, write=False)
    try:
        return store, store.history()
    finally:
        store.close()
