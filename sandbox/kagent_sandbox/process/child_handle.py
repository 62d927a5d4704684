"""The client's end of one confined child: its channel, how it ended, and the means to end it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self, cast

from kagent_sandbox.errors import ChildDied
from kagent_sandbox.process import process_tree
from kagent_sandbox.process.channel import Channel, ChannelError
from kagent_sandbox.process.cpu_clock import cpu_s
from kagent_sandbox.runtime.text import printable

LOST_SUPERVISOR, LOST_SERVER = "loss of its supervisor", "loss of its fork-server"
LOSSES = (LOST_SUPERVISOR, LOST_SERVER)
"""Reasons of an end that no child can give: somebody ended what watches it."""
_LOG_CHARS = 64 << 10
_SILENT_S = 5.0  # of a supervisor that is to end its child; then its fork-server is looked at


@dataclass(frozen=True)
class Exit:
    """The end of a child, as its supervisor observed it."""

    code: int | None  # exit status, None when a signal ended it
    signal: int | None
    timed_out: bool  # the wall limit ended it
    reason: str | None  # the limit that ended it, or "killed" by the client
    max_rss_mib: float
    cpu_s: float
    log_tail: str  # end of stdout and stderr, every character visible

    def describe(self) -> str:
        """One line: what ended the child, naming the signal."""
        if self.reason is not None:
            return f"ended by the {self.reason}" if self.reason != "killed" else "killed"
        if self.signal is not None:
            name = signal.Signals(self.signal).name if self.signal < 32 else str(self.signal)
            return f"died of {name} ({signal.strsignal(self.signal)})"
        return f"exited with status {self.code}"


class ChildHandle:
    """A running confined child.

    Its methods may be called from several threads, `channel` from one.
    """

    def __init__(
        self,
        channel: Channel,
        control: Channel,
        exit_: Channel,
        *,
        on_end: Callable[[ChildHandle], None],
        on_silence: Callable[[], None],
    ) -> None:
        self.channel = channel
        self._control = control
        self._exit_channel = exit_
        self._on_end = on_end
        self._on_silence = on_silence
        self._control_lock = threading.Lock()
        self._exit_lock = threading.Lock()
        self._exit: Exit | None = None
        self._pid: int | None = None
        self._pidfd: int | None = None  # -1: there is none to be had

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def kill(self) -> Exit:
        """Kill the whole subtree; returns when it is dead and its folder is gone."""
        with self._control_lock, contextlib.suppress(ChannelError):
            if self._exit is None:
                self._control.send("kill", timeout_s=5.0)
        exit_ = self.wait(_SILENT_S)
        if exit_ is None:
            self._on_silence()
            exit_ = self.wait(30.0 - _SILENT_S)
        if exit_ is None:
            raise ChildDied("a supervisor did not end its child within 30 s")
        return exit_

    def stop(self) -> bool:
        """Stop every thread of the subtree; True once all are stopped, False when it ended."""
        return self._ask("stop") is True

    def cont(self) -> bool:
        """Let a stopped subtree go on. False when it ended."""
        return self._ask("cont") is True

    def freeze(self) -> bool:
        """Stop every thread of the child itself, which must not have started any process; see
        `stop`, which takes four times as long.
        """
        pid = self._signal(signal.SIGSTOP)
        return self.stop() if pid is None else process_tree.wait_until_stopped(pid)

    def thaw(self) -> None:
        """Let a child that `freeze` has stopped go on."""
        if self._signal(signal.SIGCONT) is None:
            self.cont()

    def _signal(self, number: signal.Signals) -> int | None:
        """Signal the child without asking its supervisor. None where that is not possible."""
        if self._pidfd is None:
            self._pid = self.pid()
            self._pidfd = -1
            if self._pid is not None:
                with contextlib.suppress(OSError):
                    self._pidfd = os.pidfd_open(self._pid)
        if self._pidfd < 0 or self._exit is not None:
            return None
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except OSError:  # it has ended, or is another user's
            return None
        return self._pid

    def pid(self) -> int | None:
        """Process id as seen from here; None after the end."""
        answer = self._ask("pid")
        return answer if isinstance(answer, int) else None

    def cpu_s(self) -> float:
        """CPU time in seconds that the child has used, without processes of its own; 0 after the
        end.
        """
        if self._pid is None:
            self._pid = self.pid()
        return 0.0 if self._pid is None or self._exit is not None else cpu_s(self._pid)

    def _ask(self, verb: str) -> object:
        with self._control_lock:
            try:
                self._control.send(verb, timeout_s=5.0)
                return self._control.recv(10.0, max_bytes=256).obj
            except ChannelError:
                return None

    def wait(self, timeout_s: float | None) -> Exit | None:
        """Return the end of the child, or None when it still runs after `timeout_s`."""
        if self._exit is None:
            poller = select.poll()
            try:
                poller.register(self._exit_channel.fileno(), select.POLLIN)
            except ValueError:  # another thread received it meanwhile
                return self._exit
            if not poller.poll(None if timeout_s is None else max(0.0, timeout_s) * 1e3):
                return None
            with self._exit_lock:
                if self._exit is None:
                    self._exit = self._receive_exit()
                    self._exit_channel.close()
                    self._control.close()
                    self._on_end(self)
        return self._exit

    def _receive_exit(self) -> Exit:
        try:
            report = cast("dict[str, object]", self._exit_channel.recv(5.0, max_bytes=1 << 20).obj)
        except ChannelError:  # the supervisor itself was killed; its child dies with it
            report = {
                "code": None,
                "signal": int(signal.SIGKILL),
                "reason": LOST_SUPERVISOR,
            }
        return Exit(
            code=cast("int | None", report["code"]),
            signal=cast("int | None", report["signal"]),
            timed_out=report["reason"] == "wall limit",
            reason=cast("str | None", report["reason"]),
            max_rss_mib=float(cast("float", report.get("max_rss_mib", 0.0))),
            cpu_s=float(cast("float", report.get("cpu_s", 0.0))),
            log_tail=printable(str(report.get("log_tail", "")))[-_LOG_CHARS:],
        )

    def close(self) -> None:
        """Kill it if it still runs, and close the channel."""
        self.kill()
        self.channel.close()
        if self._pidfd is not None and self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
