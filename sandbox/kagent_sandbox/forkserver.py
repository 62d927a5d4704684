"""Client of the fork-server: starts confined children in milliseconds and ends them for certain.

    with ForkServer("package.module:handler", preload=["torch"], confinement=...) as server:
        child = server.spawn(wall_limit_s=60.0)
        child.channel.send({"hello": 1})
        exit = child.wait(10.0)

Processes: client → zygote (imports once) → supervisor per child (subreaper, limits) → child
    (confined). When the client dies, all of them do. Several threads may spawn and wait at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, cast

from kagent_sandbox.channel import Channel, ChannelError
from kagent_sandbox.confine.policy import Confinement, Tier
from kagent_sandbox.errors import ChildDied, ConfinementError

_INHERITED = (
    "PATH",
    "LD_LIBRARY_PATH",
    "CUDA_HOME",
    "CUDA_PATH",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "CPATH",
    "LIBRARY_PATH",
)
_BOOTSTRAP = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[2]); sys.dont_write_bytecode = True; "
    "from kagent_sandbox.zygote import main; main(int(sys.argv[1]))"
)
_START_S = 300.0  # importing torch from a cold network file system


@dataclass(frozen=True)
class Exit:
    """How a child ended, as its supervisor observed it."""

    code: int | None  # exit status, None when a signal ended it
    signal: int | None
    timed_out: bool  # the wall limit ended it
    reason: str | None  # which limit ended it, or "killed" by the client
    max_rss_mib: float
    cpu_s: float
    log_tail: str  # end of stdout and stderr, without control characters

    def describe(self) -> str:
        """One line: what ended the child, naming the signal."""
        if self.reason is not None:
            return f"ended by the {self.reason}" if self.reason != "killed" else "killed"
        if self.signal is not None:
            name = signal.Signals(self.signal).name if self.signal < 32 else str(self.signal)
            return f"died of {name} ({signal.strsignal(self.signal)})"
        return f"exited with status {self.code}"


@dataclass(frozen=True)
class Isolation:
    """What the fork-server observed by trying: printed by `doctor` and in every report."""

    tier: Tier
    landlock_abi: int  # 0: none; signals are scoped from 6, device ioctls from 5, TCP from 4
    seccomp: bool
    drops_uid: bool


class ForkServer:
    """A warm process from which confined children are forked. Use as a context manager."""

    def __init__(
        self,
        handler: str,
        *,
        preload: Sequence[str] = (),
        confinement: Confinement,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._handler = handler
        self._preload = list(preload)
        self._confinement = confinement
        self._env = dict(env or {})
        self._lock = threading.Lock()
        self._children: set[Child] = set()
        self._isolation: Isolation | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the process without waiting for its imports; `spawn` and `isolation` do."""
        self._root = Path(tempfile.mkdtemp(prefix="kagent-"))
        self._root.chmod(0o711)  # children of another user reach their own folder in it
        self._channel, theirs = Channel.pair()
        environment = {k: os.environ[k] for k in _INHERITED if k in os.environ}
        environment |= {"LANG": "C.UTF-8", "HOME": str(self._root), "TMPDIR": str(self._root)}
        # OpenBLAS, which numpy loads, starts threads at once: this process must not have any.
        environment |= {"TRITON_DISABLE_LINE_INFO": "1", "OPENBLAS_NUM_THREADS": "1"} | self._env
        path = json.dumps([os.path.abspath(p) for p in sys.path if p])
        with theirs, open(self._root / "log", "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", _BOOTSTRAP, str(theirs.fileno()), path],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # a Ctrl-C at the terminal is the client's to handle
            )
        self._channel.send(
            {
                "handler": self._handler,
                "preload": self._preload,
                "confinement": dataclasses.asdict(self._confinement),
                "root": str(self._root),
            }
        )

    @property
    def isolation(self) -> Isolation:
        """What was observed at the start; waits for it.

        Raises:
            ConfinementError: The host lacks Landlock or seccomp and `allow_tier0` is not set.
            ChildDied: The process failed to import what it was told to.
        """
        with self._lock:
            return self._wait_ready()

    def _wait_ready(self) -> Isolation:
        if self._isolation is not None:
            return self._isolation
        try:
            answer = cast("dict[str, object]", self._channel.recv(_START_S).obj)
        except ChannelError as e:
            raise self._died(str(e)) from None
        if "error" in answer:
            raise self._died(str(answer["error"]))
        isolation = Isolation(
            Tier(str(answer["tier"])),
            cast("int", answer["landlock_abi"]),
            bool(answer["seccomp"]),
            bool(answer["drops_uid"]),
        )
        if isolation.tier is Tier.T0 and not self._confinement.allow_tier0:
            lacks = [] if isolation.landlock_abi else ["Landlock"]
            lacks += [] if isolation.seccomp else ["seccomp"]
            raise ConfinementError(
                "this host cannot confine untrusted code: "
                f"{' and '.join(lacks) or 'locking a process'} does not work here. Use Linux 5.13 "
                "or newer with Landlock enabled (lsm=landlock,...), or accept weaker isolation "
                "(tier T0) explicitly."
            )
        self._isolation = isolation
        return isolation

    def spawn(
        self, fds: Sequence[int] = (), *, wall_limit_s: float, lock_first: bool = True
    ) -> Child:
        """Fork a child that runs the handler; `fds` stay the caller's, the child gets copies.

        Raises:
            ConfinementError: See `isolation`.
            ChildDied: The fork-server is gone.
        """
        channel, channel_end = Channel.pair()
        control, control_end = Channel.pair()
        exit_, exit_end = Channel.pair()
        child = Child(channel, control, exit_, on_end=self._forget)
        with channel_end, control_end, exit_end, self._lock:
            self._wait_ready()
            passed = [e.fileno() for e in (channel_end, control_end, exit_end)] + list(fds)
            try:
                self._channel.send(
                    {"wall_limit_s": wall_limit_s, "lock_first": lock_first}, fds=passed
                )
            except ChannelError as e:
                raise self._died(str(e)) from None
            self._children.add(child)
        return child

    def _died(self, why: str) -> ChildDied:
        with contextlib.suppress(OSError):
            why += "\n" + printable((self._root / "log").read_text("utf-8", "replace")[-4000:])
        return ChildDied(f"the fork-server for {self._handler} failed: {why.strip()}")

    def _forget(self, child: Child) -> None:
        self._children.discard(child)

    def close(self) -> None:
        """Kill all children, end the process, remove its folder."""
        if self._process is None:
            return
        for child in list(self._children):
            child.close()
        self._channel.close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
        shutil.rmtree(self._root, ignore_errors=True)


class Child:
    """A running confined child.

    Its methods may be called from several threads, `channel` from one.
    """

    def __init__(
        self, channel: Channel, control: Channel, exit_: Channel, *, on_end: Callable[[Child], None]
    ) -> None:
        self.channel = channel
        self._control = control
        self._exit_channel = exit_
        self._on_end = on_end
        self._control_lock = threading.Lock()
        self._exit_lock = threading.Lock()
        self._exit: Exit | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def kill(self) -> Exit:
        """Kill the whole subtree; returns when it is dead and its folder is gone."""
        with self._control_lock, contextlib.suppress(ChannelError):
            if self._exit is None:
                self._control.send("kill", timeout_s=5.0)
        exit_ = self.wait(30.0)
        if exit_ is None:
            raise ChildDied("a supervisor did not end its child within 30 s")
        return exit_

    def stop(self) -> bool:
        """Stop every thread of the subtree; True once all are stopped, False when it ended."""
        return self._ask("stop")

    def cont(self) -> bool:
        """Let a stopped subtree go on. False when it ended."""
        return self._ask("cont")

    def _ask(self, verb: str) -> bool:
        with self._control_lock:
            try:
                self._control.send(verb, timeout_s=5.0)
                return self._control.recv(10.0, max_bytes=256).obj is True
            except ChannelError:
                return False

    def wait(self, timeout_s: float | None) -> Exit | None:
        """How the child ended, or None when it still runs after `timeout_s`."""
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
                "reason": "loss of its supervisor",
            }
        return Exit(
            code=cast("int | None", report["code"]),
            signal=cast("int | None", report["signal"]),
            timed_out=report["reason"] == "wall limit",
            reason=cast("str | None", report["reason"]),
            max_rss_mib=float(cast("float", report.get("max_rss_mib", 0.0))),
            cpu_s=float(cast("float", report.get("cpu_s", 0.0))),
            log_tail=printable(str(report.get("log_tail", ""))),
        )

    def close(self) -> None:
        """Kill it if it still runs, and close the channel."""
        self.kill()
        self.channel.close()


def printable(text: str) -> str:
    """Text without control characters but newline and tab:

    safe to show in a terminal or to quote.
    """
    return "".join(c for c in text if c in "\n\t" or (c.isprintable() and c != "\x7f"))
