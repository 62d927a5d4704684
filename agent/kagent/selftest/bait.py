"""Bait for attacks: a secret, files, sockets and a process, all made for one candidate.

A candidate names them by placeholders (`@bait_folder@`, `@bait_pid@`, `@bait_port@`,
`@bait_abstract@`, `@bait_name@`), which `Bait.fill` replaces in its text. Afterwards
`Bait.touched` says what an attack reached, whatever verdict the candidate got.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

KEY = "KAGENT_BAIT_KEY"
PLACEHOLDERS = ("@bait_folder@", "@bait_pid@", "@bait_port@", "@bait_abstract@", "@bait_name@")
_WRITABLE = "as it was\n"


class Bait:
    """Baits of one candidate, of which only those exist that its text names. To be closed.

    `token` is the secret that may turn up nowhere: in a file, in the witness's environment and in
    that of every process which the candidate's judge and builder consist of.
    """

    def __init__(self, text: str, token: str) -> None:
        self.token = token
        self._text = text
        self._stack = contextlib.ExitStack()
        self._checks: list[Callable[[], str | None]] = []
        self._values: dict[str, str] = {}

        makers = (self._folder, self._witness, self._port, self._abstract, self._name)
        with self._stack:
            for placeholder, make in zip(PLACEHOLDERS, makers, strict=True):
                if placeholder in text:
                    self._values[placeholder] = make()
            self._stack = self._stack.pop_all()

    def close(self) -> None:
        """Take them away."""
        self._stack.close()

    def fill(self) -> str:
        """The candidate's text with the baits' names in it."""
        text = self._text
        for placeholder, value in self._values.items():
            text = text.replace(placeholder, value)
        return text

    def touched(self) -> list[str]:
        """List the bait that an attack reached; empty if none."""
        return [found for check in self._checks if (found := check()) is not None]

    def _folder(self) -> str:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="kagent-bait-")))
        contents = {"secret": f"{KEY}={self.token}\n", "writable": _WRITABLE}
        for name, text in contents.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o666)  # closed by the confinement or not at all
        local = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        local.bind(str(folder / "socket"))
        (folder / "socket").chmod(0o777)
        local.listen()
        folder.chmod(0o777)

        def changed() -> str | None:
            names = {p.name for p in folder.iterdir()}
            if names != {*contents, "socket"}:
                return f"the bait folder holds {', '.join(sorted(names)) or 'nothing'}"
            for name, text in contents.items():
                if (folder / name).read_text(errors="replace") != text:
                    return f"the bait file {name} was changed"
            return None

        self._checks += [changed, lambda: _heard(local, "the bait folder's socket")]
        return str(folder)

    def _witness(self) -> str:
        witness = subprocess.Popen(
            ["/bin/sh", "-c", "read line"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, KEY: self.token},
            start_new_session=True,
        )
        self._stack.callback(witness.wait)
        self._stack.callback(witness.kill)
        assert witness.stdin is not None, "it was asked for"
        self._stack.callback(witness.stdin.close)
        before = _state(witness.pid)

        def harmed() -> str | None:
            if witness.poll() is not None:
                return "the witness process was ended"
            return None if _state(witness.pid) == before else "the witness process was changed"

        self._checks.append(harmed)
        return str(witness.pid)

    def _port(self) -> str:
        while True:
            tcp = socket.create_server(("127.0.0.1", 0))
            udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            try:
                udp.bind(tcp.getsockname())
                break
            except OSError:  # somebody has that port for datagrams
                tcp.close()
                udp.close()
        self._stack.callback(tcp.close)
        self._stack.callback(udp.close)
        self._checks += [lambda: _heard(tcp, "the TCP bait"), lambda: _heard(udp, "the UDP bait")]
        return str(tcp.getsockname()[1])

    def _abstract(self) -> str:
        name = f"kagent-bait-{secrets.token_hex(8)}"
        abstract = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        abstract.bind(f"\0{name}")
        abstract.listen()
        self._checks.append(lambda: _heard(abstract, "the abstract socket"))
        return name

    def _name(self) -> str:
        return name_for(self.token)


def name_for(token: str) -> str:
    """Return the name that attacks give to what they leave behind. `Leftovers` looks for it."""
    return f"escaped-{token[:12]}"


def _heard(listener: socket.socket, name: str) -> str | None:
    """Whether something waits to be read or accepted."""
    ready, _, _ = select.select([listener], [], [], 0)
    return f"{name} was reached" if ready else None


def _state(pid: int) -> tuple[object, ...]:
    """State of a process that another process could change: nice value, policy, cores, limits,
    tracer.
    """
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    kept = [line for line in status.splitlines() if line.startswith(("TracerPid", "Cpus_allowed:"))]
    limits = Path(f"/proc/{pid}/limits").read_text(encoding="utf-8")
    score = Path(f"/proc/{pid}/oom_score_adj").read_text(encoding="utf-8")
    policy = (os.getpriority(os.PRIO_PROCESS, pid), os.sched_getscheduler(pid))
    return (*kept, limits, score, *policy)
