"""Changes of a run's log that keep its checksums: as somebody makes them who knows of them."""

import contextlib
import sqlite3

from kagent.runs.checksums import End, has_checksums, insert


def execute(folder, *statements):
    """Run statements with their values on a run's database, then sign its events anew."""
    with contextlib.closing(sqlite3.connect(folder / "lineage.sqlite")) as db, db:
        for sql, *values in statements:
            db.execute(sql, values)
        if has_checksums(db):
            sign(db)


def add(folder, kind, data, at=1.0):
    """Add an event. One of other types than events have cannot be signed."""
    sql = "INSERT INTO events (at, kind, data, checksum) VALUES (?, ?, ?, '')"
    execute(folder, (sql, at, kind, data))


def sign(db):
    """Number and sign all events anew, as far as they are of the types that events have."""
    rows = db.execute("SELECT at, kind, data FROM events ORDER BY seq").fetchall()
    if all(tuple(map(type, row)) == (float, str, str) for row in rows):
        db.execute("DELETE FROM events")
        db.execute("DELETE FROM sqlite_sequence")
        insert(db, rows, End())
