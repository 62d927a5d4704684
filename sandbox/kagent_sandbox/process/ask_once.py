"""One question to a process of its own that we trust: JSON on its standard input, the answer on its
standard output. What it may take is CPU time, so that a busy machine refuses nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kagent_sandbox.process.log_tail import LOG_TAIL_BYTES, log_tail
from kagent_sandbox.process.process_tree import kill_tree, used_cpu_s
from kagent_sandbox.process.remove_tree import remove_tree
from kagent_sandbox.process.temporary_space import temporary_space

_LOOK_S = 0.5
"""Seconds between looks at its CPU time, and at whether the answer is still wanted."""
_WAITS_S = 600.0
"""Seconds in which it must use `_LEAST_WORK_S` of CPU time. A process that uses less waits for
something that will not come: even a busy machine leaves it more.
"""
_LEAST_WORK_S = 6.0


class TookTooLong(Exception):  # noqa: N818 - the caller has an error with its own words
    """The process was ended at a limit; the text says how long it took."""


class Unwanted(Exception):  # noqa: N818
    """The process was ended since nobody waits for the answer any more."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Output and status of a process that has ended.

    Attributes:
        out: Its standard output.
        status: Its exit status, negative for a signal.
        tail: The end of what it wrote to standard error, in one line.
    """

    out: bytes
    status: int
    tail: str


def ask_once(
    words: Sequence[str],
    request: Mapping[str, object],
    *,
    limit_s: float,
    hint: str = "",
    environment: Mapping[str, str] | None = None,
    unwanted: Callable[[], bool] = lambda: False,
    tail_bytes: int = LOG_TAIL_BYTES,
) -> Ended:
    """Start Python, ask it and wait until it has ended.

    Args:
        words: What Python runs.
        request: What is asked for; "parent" is added, for `end_with_parent`.
        limit_s: CPU time in seconds that it may take with all that it starts.
        hint: What to do where it takes more: the end of that error.
        environment: Of the process, beside that of this one.
        unwanted: Whether nobody waits for the answer any more.
        tail_bytes: Of its standard error that are read.

    Raises:
        TookTooLong: It took more, or waited instead of computing.
        Unwanted: It is.
    """
    with temporary_folder() as folder, tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,  # a Ctrl-C at the terminal is the caller's to handle
            env={**os.environ, "TMPDIR": folder, **(environment or {})},
        )
        question = json.dumps({**request, "parent": os.getpid()}).encode()
        try:
            out = _answer(process, question, limit_s, hint, unwanted)
        except BaseException:
            kill_tree(process.pid)
            process.communicate()
            raise
        return Ended(out, process.returncode, log_tail(log, tail_bytes))


@contextlib.contextmanager
def temporary_folder() -> Iterator[str]:
    """A folder for the temporary files of a process, and of all that it starts. Those are removed
    with it, though the process is killed. At the end nothing may be at work in it.
    """
    with temporary_space():
        folder = Path(tempfile.mkdtemp(prefix="kagent-process-"))
    try:
        folder.chmod(0o711)  # children of another user reach their own folder in it
        yield str(folder)
    finally:
        remove_tree(folder)


def _answer(
    process: subprocess.Popen[bytes],
    question: bytes,
    limit_s: float,
    hint: str,
    unwanted: Callable[[], bool],
) -> bytes:
    given: bytes | None = question
    seen_s = used_s = worked_s = 0.0
    worked_at = time.monotonic()
    while True:
        try:
            return process.communicate(given, timeout=_LOOK_S)[0]
        except subprocess.TimeoutExpired:
            given = None  # the next call goes on with it
        if unwanted():
            raise Unwanted
        before_s, seen_s = seen_s, used_cpu_s(process.pid)
        if seen_s < before_s:  # a process that ended meanwhile may be in no count yet
            seen_s = used_cpu_s(process.pid)
        # It falls for good where a process ends whose parent is gone, or does not ask about it.
        used_s += max(0.0, seen_s - before_s)
        now = time.monotonic()
        if used_s >= limit_s:
            more = f": {hint}" if hint else ""
            raise TookTooLong(f"took longer than {limit_s:g} s of CPU time{more}")
        if used_s - worked_s >= _LEAST_WORK_S:
            worked_s, worked_at = used_s, now
        elif now - worked_at >= _WAITS_S:
            raise TookTooLong(f"waited for {_WAITS_S:g} s instead of computing")
