"""Context of a handler that runs in a confined child."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kagent_sandbox.process.channel import Channel


@dataclass(frozen=True)
class Context:
    """The child's connection to its client, its private folder, and the key to lock itself in."""

    channel: Channel
    fds: tuple[int, ...]  # descriptors that the client passed, in order
    tmp: Path  # private folder: working directory, HOME and TMPDIR; removed at the end
    lock: Callable[[], None]
    """Landlock (this thread and what it starts) and seccomp. Does nothing when done already."""
