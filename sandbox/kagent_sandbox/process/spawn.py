"""A request to fork a child, as the fork-server passes it to a supervisor."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kagent_sandbox.confine.isolation import Isolation
from kagent_sandbox.confine.policy import Confinement
from kagent_sandbox.process.context import Context


@dataclass(frozen=True)
class Spawn:
    """All that a supervisor needs. `fds`: the child's channel, control, exit, then the user's."""

    handler: Callable[[Context], None]
    confinement: Confinement
    isolation: Isolation
    uid: int | None
    lock_first: bool
    wall_limit_s: float
    tmp: Path
    fds: tuple[int, ...]
    server: int = field(default_factory=os.getpid)

    @property
    def name(self) -> str:
        """Unlike that of any other child."""
        return f"{self.server}-{self.tmp.name}"
