"""A run's folder: its events, committed as they happen, and its texts.

    run.json         task, configuration, environment (`Manifest`); written once
    lineage.sqlite   append-only events, each with a checksum (`checksums`); write-ahead log: a
                     killed process loses nothing committed
    kernels/ID.py    every proposal's text by its content
    prompts/N.md     the prompt of ask N (N-2.md: asked again, after a duplicate)
    replies/N.md     its reply, word for word
    logs/N.txt       output of building candidate N
    lock             held by the one process that writes

Opening a run changes nothing in its folder, not even a time stamp: the first event or text does.
The folder survives SIGKILL of the process at any moment. A power cut may lose the last events (they
are not synced one by one), but not the order or integrity of those before.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, NoReturn, Self, TypeAlias, cast

from kagent_sandbox.data.records import RecordError, from_json, to_json
from kagent_sandbox.data.verdict import Verdict
from kagent_sandbox.errors import RunError

from kagent.runs.analyses import analyses_path, read_analyses
from kagent.runs.ask import AskRecord
from kagent.runs.checksums import LogRow, end_of, insert, read_rows
from kagent.runs.cost import ModelCall, Spent
from kagent.runs.events import Stop
from kagent.runs.files import (
    clear_errors,
    connect,
    connect_to_read,
    read_file,
    sign_lock,
    take_lock,
    write_file,
)
from kagent.runs.final_race import FinalRace
from kagent.runs.lineage import (
    Candidate,
    Facts,
    Lineage,
    Operator,
    Origin,
    Proposal,
    Withdrawal,
    kernel_id,
)
from kagent.runs.manifest import Manifest, fresh_folder, read_digest, read_manifest
from kagent.runs.recalled import Recalled
from kagent.runs.timed_configs import TimedConfig, TimedConfigs

_MOST_EVENT_CHARS = 32 << 20  # a race of many cases has one MiB

_KERNEL = re.compile(r"[0-9a-f]{16}")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

Row: TypeAlias = tuple[str, Mapping[str, Any]]
"""Kind and JSON of an event that is to be stored."""


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """One row of the log. `data` is JSON."""

    seq: int
    at: float  # seconds since the epoch, by the wall clock when its process opened the run
    kind: str
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StoredProposal:
    """A proposal without its text, which is in kernels/."""

    id: int
    parents: tuple[int, ...]
    operator: Operator
    name: str
    kernel: str
    hypothesis: str
    predicted: float | None
    seen: int
    attempt: int
    ask: int | None = None
    origin: Origin | None = None
    fault: str = ""
    configs: int | None = None
    works: float | None = None


MANIFEST = "manifest"
"""Kind of the event with the checksum of run.json."""


@dataclass(frozen=True, slots=True)
class StoredVerdict:
    """The verdict on a proposal, as an event stores it."""

    id: int
    verdict: Verdict
    facts: Facts | None
    withdrawals: tuple[Withdrawal, ...] = ()
    tuned: str = ""  # kernel id of the file with tuned constants, where it is another one
    unit: str = ""  # device that gave it, where the run has several


@dataclass(frozen=True)
class History:
    """A run as read from its log."""

    lineage: Lineage
    pending: tuple[Proposal, ...]  # accepted, without a verdict: the process ended in between
    asks: tuple[AskRecord, ...]  # open: neither answered nor dropped
    answered: Mapping[int, AskRecord]  # by candidate: what proposals without a verdict answer
    asked: int  # asks so far: the number of the next one
    budgets: tuple[int, ...]  # per session
    spent: Spent
    baselines: Mapping[str, Any] | None  # as measured at the last session's start
    race: FinalRace | None  # the last one
    stop: Stop | None  # why the last session ended; None if it was killed or goes on
    elapsed_s: float  # working time over all sessions, without asking and telling
    recalled: Recalled | None = None  # what the run took from memory; None: it was not asked
    timed_configs: Mapping[int, tuple[TimedConfig, ...]] = field(default_factory=dict)
    """Configurations that were timed before a candidate's verdict, by candidate."""
    events: tuple[StoredEvent, ...] = field(default=(), repr=False)  # then the analyses

    @property
    def budget(self) -> int:
        """The budget of the last session, 0 before the first one."""
        return self.budgets[-1] if self.budgets else 0


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
        self._end = end_of(db)
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
        with clear_errors(self.folder), self._db:
            end = insert(self._db, rows, self._end)
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
        return _kernel_path(self.folder, kernel)

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
        events = tuple(self.events())
        proposals: dict[int, Proposal] = {}
        lineage = Lineage()
        asks: dict[int, AskRecord] = {}  # open
        every: dict[int, AskRecord] = {}
        asked = 0
        spent = Spent()
        budgets: list[int] = []
        race: FinalRace | None = None
        recalled: Recalled | None = None
        timed: dict[int, tuple[TimedConfig, ...]] = {}
        baselines: Mapping[str, Any] | None = None
        stop: Stop | None = None
        for event in events:
            try:
                if event.kind == "session":
                    budgets.append(_number(event.data["budget"]))
                    stop = None
                elif event.kind == "proposed":
                    proposal = self._proposal(from_json(StoredProposal, event.data))
                    proposals[proposal.id] = proposal
                    asks.pop(-1 if proposal.ask is None else proposal.ask, None)
                elif event.kind == "asked":
                    ask = from_json(AskRecord, event.data)
                    asks[ask.number] = every[ask.number] = ask
                    asked = max(asked, ask.number + 1)
                elif event.kind == "dropped":
                    asks.pop(_number(event.data["ask"]), None)
                elif event.kind in ("call", "tried"):
                    spent = spent.and_call(from_json(ModelCall, event.data))
                elif event.kind == "recorded":
                    row = from_json(StoredVerdict, event.data)
                    lineage.record(self._candidate(proposals.pop(row.id), row))
                elif event.kind == "baselines":
                    baselines = event.data
                elif event.kind == "race":
                    race = from_json(FinalRace, event.data)
                elif event.kind == "recalled":
                    recalled = from_json(Recalled, event.data)
                elif event.kind == "timed":
                    configs = from_json(TimedConfigs, event.data)
                    timed[configs.id] = configs.configs
                elif event.kind == "stopped":
                    stop = Stop(event.data["stop"])
            except DAMAGE as e:
                raise RunError(f"{self.folder}: event {event.seq} is damaged: {e}") from None
        pending = tuple(proposals[i] for i in sorted(proposals))
        return History(
            lineage=lineage,
            pending=pending,
            asks=tuple(asks.values()),
            answered={p.id: every[p.ask] for p in pending if p.ask in every},
            asked=asked,
            budgets=tuple(budgets),
            spent=spent,
            baselines=baselines,
            race=race,
            stop=stop,
            elapsed_s=_working_s(events),
            recalled=recalled,
            timed_configs=timed,
            events=(*events, *self._analyses(events[-1].seq if events else 0)),
        )

    def _analyses(self, last: int) -> Iterator[StoredEvent]:
        """Analyses, as events that follow the log's last one."""
        rows = read_analyses(self.folder, self.manifest.id)
        for seq, (at, kind, data) in enumerate(rows, last + 1):
            try:
                yield _event(seq, at, kind, data)
            except ValueError as e:
                raise RunError(f"{analyses_path(self.folder)}: damaged: {e}") from None

    def _candidate(self, proposal: Proposal, row: StoredVerdict) -> Candidate:
        written = ""
        if row.tuned:
            written = proposal.kernel
            proposal = replace(proposal, source=read_kernel(self.folder, row.tuned))
        return Candidate(proposal, row.verdict, row.facts, row.withdrawals, written, row.unit)

    def _proposal(self, row: StoredProposal) -> Proposal:
        source = read_kernel(self.folder, row.kernel)
        fields = {n: getattr(row, n) for n in StoredProposal.__dataclass_fields__ if n != "kernel"}
        proposal = Proposal(**fields, source=source)
        if any(not 0 <= parent < row.id for parent in row.parents):
            raise ValueError(f"candidate {row.id} cannot have the parents {row.parents}")
        return proposal

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


DAMAGE = (RecordError, KeyError, ValueError, TypeError, IndexError, AssertionError, OverflowError)
"""Exceptions that reading an event raises if no kagent wrote it: a run's folder may come from
anybody.
"""


def read_kernel(folder: Path, kernel: str) -> str:
    """A kernel's text.

    Args:
        folder: Of the run.
        kernel: Its id.

    Raises:
        RunError: Its file is missing or was changed, or this is no kernel's id.
    """
    if not _KERNEL.fullmatch(kernel):
        raise RunError(f"{folder}: {kernel!r:.40} is no kernel's id")
    path = _kernel_path(folder, kernel)
    source = read_file(path)
    if kernel_id(source) != kernel:
        raise RunError(f"{path}: its text was changed after it was stored")
    return source


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


def _kernel_path(folder: Path, kernel: str) -> Path:
    return folder / "kernels" / f"{kernel}.py"


def checked_event(folder: Path, row: LogRow) -> StoredEvent:
    """A row of the log as an event.

    Raises:
        RunError: It is not what was written, or no kagent wrote it.
    """
    if row.fault:
        raise _damaged(folder, row, row.fault)
    try:
        return _event(row.seq, row.at, row.kind, row.data)
    except (ValueError, RecursionError) as e:
        raise _damaged(folder, row, str(e)) from None


def _damaged(folder: Path, row: LogRow, why: str) -> RunError:
    return RunError(
        f"{folder}: event {row.seq} is damaged: {why}. Put lineage.sqlite back from a copy, or "
        f"start a new run; kagent verify {folder.name} lists all that is damaged"
    )


def _event(seq: object, at: object, kind: object, data: object) -> StoredEvent:
    """A row of the log.

    Raises:
        ValueError: No kagent wrote it.
    """
    if not isinstance(data, str) or len(data) > _MOST_EVENT_CHARS:
        raise ValueError(f"expected at most {_MOST_EVENT_CHARS} characters of JSON")
    data.encode()  # bytes that are no text end here
    value = json.loads(data, parse_constant=_no_constant)
    if _SURROGATE.search(data):
        json.dumps(value, ensure_ascii=False).encode()  # half a character could not be shown
    whole = isinstance(seq, int) and isinstance(kind, str) and isinstance(value, dict)
    if not whole or not isinstance(at, float | int) or not math.isfinite(at):
        raise ValueError("a row of other types than events have")
    return StoredEvent(cast("int", seq), at, cast("str", kind), value)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _number(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"expected a number, got {value!r:.40}")
    return value


def _compact(data: Mapping[str, Any]) -> str:
    return json.dumps(data, separators=(",", ":"), allow_nan=False)


def _as_measured(folder: Path, manifest: Manifest, db: sqlite3.Connection) -> Manifest:
    """The manifest; of a run that was made without a device, with the one that judged it first.

    Raises:
        RunError: An event is not what was written.
    """
    first: LogRow | None = None
    for row in read_rows(db):
        if row.fault:
            raise _damaged(folder, row, row.fault)
        if row.kind == "machine" and first is None:
            first = row
    if first is None:
        return manifest
    try:
        environment = checked_event(folder, first).data["environment"]
        return replace(manifest, environment=dict(environment))
    except (ValueError, KeyError, TypeError) as e:
        raise _damaged(folder, first, str(e)) from None


def _working_s(events: Iterable[StoredEvent]) -> float:
    """Seconds in sessions. Asking and telling (`opened`) are no part of one."""
    total = began = latest = 0.0
    inside = False
    for event in events:
        if event.kind in ("session", "opened", "stopped"):
            end = event.at if event.kind == "stopped" else latest  # a killed one has no end
            # Runs of earlier versions have times of the wall clock, which may have been set back.
            total += max(0.0, end - began) if inside else 0.0
            began, inside = event.at, event.kind == "session"
        latest = event.at
    return total + (max(0.0, latest - began) if inside else 0.0)


def _passed_s() -> float:
    """Seconds on a clock that nobody can set, and that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def read_history(folder: Path) -> tuple[RunStore, History]:
    """A run, opened for reading only, and its history. The store is closed already."""
    store = RunStore.open(folder, write=False)
    try:
        return store, store.history()
    finally:
        store.close()
