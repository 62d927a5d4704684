"""Isolation of this host, observed by attacking it: for `doctor` and for reports."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import kagent_sandbox
from kagent_sandbox.confine.policy import Confinement, Tier
from kagent_sandbox.confine.presets import toolchain
from kagent_sandbox.errors import ConfinementError
from kagent_sandbox.process.canaries import ATTACKS
from kagent_sandbox.process.forkserver import ForkServer, Isolation

_LONGEST = 107 - len("/kagent-bait-12345678/socket")  # bytes of a path: 107 are an address


@dataclass(frozen=True)
class Canary:
    """One attack that was tried inside.

    `stopped_by` is the error that it met, None if it got out.
    """

    name: str
    stopped_by: str | None
    stopped_from: Tier = Tier.T1  # the lowest tier that claims to stop it

    @property
    def escaped(self) -> bool:
        """Whether the attack worked."""
        return self.stopped_by is None


@dataclass(frozen=True)
class Probe:
    """Isolation of children here, and the outcome of attacks from inside."""

    isolation: Isolation
    canaries: tuple[Canary, ...]

    @property
    def escaped(self) -> tuple[str, ...]:
        """Names of the attacks that worked although the tier claims to stop them."""
        tier = self.isolation.tier
        return tuple(c.name for c in self.canaries if c.escaped and c.stopped_from <= tier)

    @property
    def uncovered(self) -> tuple[str, ...]:
        """Names of the attacks that worked and that only a higher tier stops."""
        tier = self.isolation.tier
        return tuple(c.name for c in self.canaries if c.escaped and c.stopped_from > tier)

    def describe(self) -> str:
        """Describe the findings in a line."""
        stopped = sum(not c.escaped for c in self.canaries)
        text = self.isolation.describe()
        text += f"; {stopped} of {len(self.canaries)} attacks from inside stopped"
        if self.escaped:
            text += f"; these got out: {', '.join(self.escaped)}"
        if self.uncovered:
            text += f"; a higher tier would stop: {', '.join(self.uncovered)}"
        for lacking in self.isolation.lacking:
            text += f"; not {lacking}"
        return text

    def require(self) -> None:
        """Refuse to go on where an attack got out.

        Raises:
            ConfinementError: Some did; the text names them.
        """
        if self.escaped:
            raise ConfinementError(
                f"isolation {self.isolation.tier} does not hold on this host: a confined process "
                f"could {', '.join(self.escaped)}. Run as root in a container of your own, or on "
                "Linux 6.12 or newer, or accept weaker isolation explicitly (--isolation T0)"
            )


def _place() -> str | None:
    """Return the folder for bait: /tmp where the folder for temporary files has too long a name for
    the address of a socket in it.
    """
    return "/tmp" if len(os.fsencode(tempfile.gettempdir())) > _LONGEST else None  # noqa: S108


def probe(tier: Tier | None = None) -> Probe:
    """Start a confined child, let it attack bait in this process and its files, and report.

    Takes about 0.2 s.

    Raises:
        ConfinementError: The host does not give the tier that was asked for.
    """
    confinement = Confinement(read=toolchain(), tier=tier, cpu_s=20)
    with contextlib.ExitStack() as stack:
        place = _place()
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory("", "kagent-bait-", place)))
        folder.chmod(0o777)  # closed by the confinement or not at all
        secret = folder / "secret"
        secret.write_text("bait")
        secret.chmod(0o666)
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        local = stack.enter_context(socket.socket(socket.AF_UNIX))
        local.bind(str(folder / "socket"))
        (folder / "socket").chmod(0o777)
        local.listen()
        hidden = stack.enter_context(socket.socket(socket.AF_UNIX))
        abstract = f"kagent-bait-{secrets.token_hex(8)}"
        hidden.bind(f"\0{abstract}")
        hidden.listen()
        memory = ctypes.create_string_buffer(b"bait")
        handler = "kagent_sandbox.process.canaries:run"
        server = stack.enter_context(ForkServer(handler, confinement=confinement))
        child = stack.enter_context(server.spawn(wall_limit_s=30.0))
        child.channel.send(
            {
                "pid": os.getpid(),
                "secret": str(secret),
                "folder": str(folder),
                "socket": str(folder / "socket"),
                "port": tcp.getsockname()[1],
                "package": str(Path(kagent_sandbox.__file__)),
                "abstract": abstract,
                "server": server.pid,
                "address": ctypes.addressof(memory),
            }
        )
        answer = cast("dict[str, str | None]", child.channel.recv(30.0).obj)
        canaries = tuple(
            Canary(name, answer.get(name, "no answer"), attack.stopped_from)
            for name, attack in ATTACKS.items()
        )
        return Probe(server.isolation, canaries)
