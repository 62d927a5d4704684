"""Checksums of a run's events: a bit that flips on a disk is an error, never another value.

Each event is stored with a checksum over its number, its bytes and the checksum before it.
Exchanged and missing events are therefore noticed, too. SQLite itself keeps the number of the last
event, so that a missing end is noticed. Runs of earlier versions have no checksums and get none.

Checksums guard against accidents. Whoever changes a run on purpose can compute them anew.
"""

from __future__ import annotations

import hashlib
import sqlite3
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_LAST = "(SELECT seq FROM sqlite_sequence WHERE name = 'events')"
_OTHER_TYPES = "a row of other types than events have"


@dataclass(frozen=True, slots=True)
class End:
    """The last event of a log, which the next one follows."""

    seq: int = 0  # 0: there is none
    checksum: str = ""


@dataclass(frozen=True, slots=True)
class LogRow:
    """A row of the log as it is stored, and what is wrong with it. No type is certain."""

    seq: object
    at: object
    kind: object
    data: object
    fault: str  # "": its bytes are those that were written, or it has no checksum


def as_text(stored: bytes) -> str:
    """Text of a database. Bytes that are none are kept: their checksum is still to be computed."""
    return stored.decode("utf-8", "surrogateescape")


def has_checksums(db: sqlite3.Connection) -> bool:
    """Whether the log's events have checksums; without them it is an earlier version's."""
    return any(column[1] == "checksum" for column in db.execute("PRAGMA table_info(events)"))


def end_of(db: sqlite3.Connection) -> End:
    """The last event."""
    checksum = "checksum" if has_checksums(db) else "''"
    rows = f"SELECT seq, {checksum} FROM events ORDER BY seq DESC LIMIT 1"  # noqa: S608 - ours
    found = db.execute(rows).fetchone()
    return End(int(found[0]), str(found[1])) if found is not None else End()


def insert(db: sqlite3.Connection, rows: Iterable[tuple[float, str, str]], end: End) -> End:
    """Append events in the transaction that is open, or begins; returns the new end.

    Args:
        db: Of the run.
        rows: Time in seconds since the epoch, kind and JSON of each.
        end: The last event that is stored.
    """
    checked = bool(end.checksum) or has_checksums(db)
    for at, kind, data in rows:
        seq = end.seq + 1
        end = End(seq, _checksum(end.checksum, seq, at, kind, data) if checked else "")
        values = (seq, at, kind, data, end.checksum)[: 5 if checked else 4]
        columns = "seq, at, kind, data, checksum" if checked else "seq, at, kind, data"
        marks = ", ".join("?" * len(values))
        db.execute(f"INSERT INTO events ({columns}) VALUES ({marks})", values)  # noqa: S608 - ours
    return end


def read_rows(db: sqlite3.Connection) -> Iterator[LogRow]:
    """All rows in order, each compared with its checksum. Where the end is missing, a last row
    has that fault and nothing else.
    """
    checked = has_checksums(db)
    checksum = "checksum" if checked else "''"
    # One statement, so that another process's commit does not come between events and their number.
    columns = f"seq, at, kind, data, {checksum}, {_LAST}"
    events = f"SELECT {columns} FROM events ORDER BY seq"  # noqa: S608 - ours
    end, stored = End(), 0
    for seq, at, kind, data, kept, last in db.execute(events):
        stored = last
        fault = _fault(end, seq, at, kind, data, kept) if checked else ""
        yield LogRow(seq, at, kind, data, fault)
        end = End(seq, kept if isinstance(kept, str) else "")
    if end.seq == 0:
        rows = f"SELECT count(*), {_LAST} FROM events"  # noqa: S608 - ours
        count, stored = db.execute(rows).fetchone()
        stored = 0 if count else stored or 0
    if checked and stored != end.seq:
        text = f"{stored} events were written, and the last one here is number {end.seq}"
        yield LogRow(end.seq + 1, 0.0, "", "{}", text)


def _fault(end: End, seq: int, at: object, kind: object, data: object, kept: object) -> str:
    if seq != end.seq + 1:
        return f"it follows event {end.seq}: those between are missing"
    if not (isinstance(at, float) and isinstance(kind, str) and isinstance(data, str)):
        return _OTHER_TYPES
    if kept != _checksum(end.checksum, seq, at, kind, data):
        return "its bytes are not those that were written: its checksum is another one"
    return ""


def _checksum(before: str, seq: int, at: float, kind: str, data: str) -> str:
    """16 hexadecimal digits of a SHA-256."""
    texts = [text.encode("utf-8", "surrogateescape") for text in (before, kind, data)]
    # Adding 0 makes -0 to 0, as SQLite stores it.
    numbers = struct.pack("<qd3q", seq, at + 0.0, *map(len, texts))
    return hashlib.sha256(b"".join([numbers, *texts])).hexdigest()[:16]
