"""The end of what a process wrote, for an error's one line."""

from __future__ import annotations

from typing import IO

from kagent_sandbox.runtime.text import printable

LOG_TAIL_BYTES = 500


def log_tail(log: IO[bytes], most_bytes: int = LOG_TAIL_BYTES) -> str:
    """The end of a log in one line, every character of it visible.

    Args:
        log: The file that the process wrote into, open for reading.
        most_bytes: Bytes of it that are read.
    """
    log.seek(max(0, log.seek(0, 2) - most_bytes))
    return " ".join(printable(log.read().decode(errors="replace")).split())
