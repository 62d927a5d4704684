"""Commands that run side by side, each with a limit that ends it and all that it started."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TypeVar

from kagent_sandbox.process import process_tree
from kagent_sandbox.process.cores import usable_cores

Key = TypeVar("Key")
GRACE_S = 10.0
"""Time that a command has to clean up after SIGTERM."""
_TICK_S = 0.1


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a command.

    Attributes:
        status: Its exit status, negative for a signal; None if it ran past the limit.
        out: Its standard output.
        err: Its standard error.
        seconds: Time that it took.
        cpu_s: CPU time of it and of the processes that it waited for.
    """

    status: int | None
    out: str
    err: str
    seconds: float
    cpu_s: float


class _Stopped(BaseException):
    """A signal asks this process to end."""


class Running:
    """A command that runs, in a session of its own."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._out, self._err = _file(), _file()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            env=environment,
            start_new_session=True,
        )
        self.began = time.monotonic()
        self._kill_at = math.inf
        self._ours: dict[int, int | None] = {}

    def ended(self, *, late: bool = False) -> Ended | None:
        """How it ended; None while it runs."""
        pid, status, used = os.wait4(self._process.pid, os.WNOHANG)
        if not pid:
            return None
        code = self._process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - self.began
        cpu_s = used.ru_utime + used.ru_stime
        return Ended(None if late else code, _text(self._out), _text(self._err), seconds, cpu_s)

    def ask(self) -> None:
        """Ask it to end, once: kagent then cleans up."""
        if self._kill_at == math.inf:
            self._kill_at = time.monotonic() + GRACE_S
            self._ours = {p: process_tree.began(p) for p in self._below()}
            self._process.send_signal(signal.SIGTERM)

    def end(self) -> Ended:
        """End it and all below it."""
        self.ask()
        ours, found = self._ours, None
        while found is None:
            ours |= {p: process_tree.began(p) for p in self._below() if p not in ours}
            if time.monotonic() > self._kill_at:
                self._process.send_signal(signal.SIGKILL)
            time.sleep(_TICK_S)
            found = self.ended(late=True)
        for pid, began in ours.items():  # a number may have gone to another process
            if began is not None and process_tree.began(pid) == began:
                process_tree.send(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return found

    def _below(self) -> list[int]:
        return process_tree.descendants(self._process.pid)


def run_all(
    commands: Mapping[Key, Sequence[str]],
    done: Callable[[Key, Ended], None],
    *,
    jobs: int,
    limit_s: float,
) -> str:
    """Run commands, some at once, in sessions of their own.

    Each has an equal share of the cores for torch's threads, unless OMP_NUM_THREADS is set. SIGINT
    and SIGTERM end what runs.

    Args:
        commands: What to run, in this order.
        done: Is told of each end.
        jobs: Number of commands at once.
        limit_s: Seconds after which a command is ended.

    Returns:
        The name of the signal that ended this early, or nothing.
    """
    cores = usable_cores()
    environment = {"OMP_NUM_THREADS": str(max(1, cores // jobs)), **os.environ}
    waiting = list(commands.items())[::-1]
    running: dict[Key, Running] = {}
    with _signals():
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    key, command = waiting.pop()
                    running[key] = Running(command, environment)
                time.sleep(_TICK_S)
                for key, each in list(running.items()):
                    ended = each.ended()
                    if ended is None and time.monotonic() - each.began > limit_s:
                        ended = each.end()
                    if ended is not None:
                        del running[key]
                        done(key, ended)
        except _Stopped as e:
            return str(e)
        finally:
            for each in running.values():
                each.ask()
            for each in running.values():
                each.end()
    return ""


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Raise `_Stopped` once when a signal comes."""

    def stop(number: int, _frame: object) -> None:
        for each in numbers:  # ending what runs takes a moment, which a second one must not cut off
            signal.signal(each, signal.SIG_IGN)
        raise _Stopped(signal.Signals(number).name)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {n: signal.signal(n, stop) for n in numbers}
    try:
        yield
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)


def _file() -> IO[bytes]:
    return tempfile.TemporaryFile()


def _text(file: IO[bytes]) -> str:
    with file:
        file.seek(0)
        return file.read().decode(errors="replace")
