"""Turns of the processes that `pytest -n` runs side by side: some tests want the machine alone."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

_GATE = Path(__file__)
_ROOM = Path(__file__).with_name("conftest.py")


_room = contextlib.ExitStack()  # closed by whoever leaves it
_kept = False  # the room, for the next test


@contextlib.contextmanager
def turn(*, alone: bool, again: bool = False) -> Iterator[None]:
    """Wait until a test may run: beside others, or as the only one.

    With `again` the next test of this process is to be alone, too: it finds the room as it is left.
    Else one test of another process would come between, and be waited for, however long it takes.

    All go through a gate one by one, so that who waits to be alone is not passed by for ever. Both
    locks are files of the repository, of which nothing but the lock is used.
    """
    global _kept
    if not _kept:
        with _locked(_GATE, fcntl.LOCK_EX):
            _room.enter_context(_locked(_ROOM, fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
    _kept = alone and again
    try:
        yield
    finally:
        if not _kept:
            _room.close()


@contextlib.contextmanager
def _locked(file: Path, how: int) -> Iterator[None]:
    with open(file) as opened:
        fcntl.flock(opened, how)
        try:
            yield
        finally:
            # said, not left to closing: a process that a test leaves behind has it open, too
            fcntl.flock(opened, fcntl.LOCK_UN)
