"""A judge's process on this machine: its start, its turns on the device, its end."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, cast

from kagent_sandbox.cache import compiled_folder
from kagent_sandbox.confine.policy import ISOLATION, Tier
from kagent_sandbox.device.table import find_device
from kagent_sandbox.errors import ChildDied, DeviceFull, DeviceWedged, KagentError
from kagent_sandbox.judge.protocol import USES, raise_error
from kagent_sandbox.process import process_tree
from kagent_sandbox.process.channel import Channel, ChannelClosed, ChannelError, ChannelTimeout
from kagent_sandbox.process.device_lock import DeviceLock, Mode
from kagent_sandbox.process.environment import for_trusted
from kagent_sandbox.process.temporary_space import temporary_space

_LOG_TAIL = 4000
_LOOK_S = 5.0  # between looks at a judge that says nothing
_MOST_STOPPED = 3  # looks in a row that find it stopped
_KILL_S = 60.0  # the kernel takes a large process apart
_CLOSE_S = 15.0  # longer than it waits for its own fork-server
# Importing torch would collect garbage often, and find next to nothing; later collections, one for
# each race, need not look at what was imported.
_SERVER: tuple[str, ...] = (
    "-c",
    "import gc; gc.disable(); from kagent_sandbox.judge.server import main; "
    "gc.freeze(); gc.enable(); main()",
)


class JudgeProcess:
    """A `Link` to a judge that is a child of this process.

    Args:
        device: Name of the device (`kagent_sandbox.device.table`).
        index: Which of several.
        tier: How launchers are confined: None is as KAGENT_ISOLATION says.
        on_wait: Is told, from the thread of a call, who has the device while this waits for it.
        take_turns: Whether the device is taken for each request. Otherwise the caller has it.
    """

    def __init__(
        self,
        device: str,
        *,
        index: int = 0,
        tier: Tier | None = None,
        on_wait: Callable[[str], None] | None = None,
        take_turns: bool = True,
    ) -> None:
        self._device, entry = device, find_device(device)
        self._lock = DeviceLock(entry.unit_name(index), on_wait) if take_turns else None
        with temporary_space():
            self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as this
        self._log_use = threading.Lock()  # who waits for an answer reads it as it is closed
        self._channel, theirs = Channel.pair()
        compiled = str(compiled_folder())
        environment = {**for_trusted(), "TORCHINDUCTOR_CACHE_DIR": compiled}
        if tier is not None:
            environment[ISOLATION] = tier
        environment |= entry.environment
        if entry.alone is not None:
            environment |= entry.alone(index)
            index = 0
        self._index = index
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *_SERVER, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,  # Ctrl-C is the agent's to handle
            )

    @property
    def pid(self) -> int:
        """Process id of the judge."""
        return self._process.pid

    def ask(
        self,
        verb: str,
        request: Mapping[str, object],
        blobs: Sequence[bytes] = (),
        on_progress: Callable[[str], None] | None = None,
    ) -> object:
        """Send a request and return its answer; the device is this judge's turn meanwhile.

        Raises:
            ChildDied: The process is gone; the text has the end of its log.
            KagentError: What the judge answered.
        """
        if verb == "open":
            self._exchange("load", {"device": self._device})  # needs no turn
            request = {**request, "index": self._index}
        mode = USES.get(verb)
        if self._lock is None or mode is None:
            return self._exchange(verb, request, blobs, on_progress)
        if mode == "work":
            try:
                return self._ask_in_turn(mode, verb, request, blobs, on_progress)
            except DeviceFull:  # what others hold meanwhile decides nothing: once more, alone
                pass
        return self._ask_in_turn("timing", verb, request, blobs, on_progress)

    def _ask_in_turn(
        self,
        mode: Mode,
        verb: str,
        request: Mapping[str, object],
        blobs: Sequence[bytes],
        on_progress: Callable[[str], None] | None,
    ) -> object:
        assert self._lock is not None, "the caller looked"
        asked = {**request, "alone": mode == "timing"}
        with self._lock.turn(mode):
            try:
                answer = self._exchange(verb, asked, blobs, on_progress)
            except ChildDied:
                raise
            except KagentError:
                self._rest()
                raise
            # Whoever is interrupted waits for nothing more: the judge still works on its answer.
            self._rest()
            return answer

    def _rest(self) -> None:
        """Have the judge give back what disturbs others that wait: memory, processes made ahead."""
        if self._lock is not None and self._lock.awaited():
            with contextlib.suppress(ChildDied):
                self._exchange("rest", {})

    def kill(self) -> None:
        """Have whoever waits for an answer or for the device give up. `close` comes after."""
        if self._lock is not None:
            self._lock.close()
        self._end_stopped()
        self._process.kill()

    def close(self) -> None:
        """End the process and all that it started. Whoever waits for the device gives up."""
        if self._lock is not None:
            self._lock.close()
        self._end_stopped()
        self._channel.hang_up()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            try:
                self._process.wait(_KILL_S)
            except subprocess.TimeoutExpired:
                raise DeviceWedged(
                    f"the judge's process {self._process.pid} cannot be ended: it hangs in a "
                    "driver. What is recorded is kept: reset the device or restart the machine, "
                    "then resume"
                ) from None
        with self._log_use:
            self._log.close()

    def _end_stopped(self) -> None:
        """End fork-servers that somebody has stopped: they would not notice that the judge ends."""
        process_tree.end_stopped(process_tree.children(self._process.pid))

    def _exchange(
        self,
        verb: str,
        request: Mapping[str, object],
        blobs: Sequence[bytes] = (),
        on_progress: Callable[[str], None] | None = None,
    ) -> object:
        try:
            self._channel.send({"do": verb, **request}, blobs)
            while True:
                answer = self._receive()
                if "progress" in answer:
                    if on_progress is not None:
                        on_progress(str(answer["progress"]))
                else:
                    raise_error(answer)
                    return answer["ok"]
        except (ChannelClosed, OSError):
            raise ChildDied(f"the judge's process ended{self._how()}") from None
        except ChannelError as e:
            self._process.kill()
            raise ChildDied(f"the judge's process broke the protocol: {e}{self._how()}") from None

    def _receive(self) -> dict[str, Any]:
        """The next message. A judge that somebody has stopped would not send any: it is ended.

        Raises:
            ChannelError: It has ended, or broke the protocol.
        """
        stopped = 0
        while True:
            try:
                return cast("dict[str, Any]", self._channel.recv(_LOOK_S).obj)
            except ChannelTimeout:
                stopped = stopped + 1 if process_tree.is_stopped(self._process.pid) else 0
                if stopped == _MOST_STOPPED:
                    self._process.kill()
                    seconds = _MOST_STOPPED * _LOOK_S
                    raise ChannelClosed(f"stopped for {seconds:.0f} s") from None

    def _how(self) -> str:
        """Exit code, the log's last line (an error's words, where it ends with one), its end."""
        try:
            code = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        tail = self._log_tail()
        text = f" by signal {-code}" if code < 0 else f" with status {code}"
        if not tail:
            return text
        return f"{text}: {tail.splitlines()[-1]}; its log ends:\n{tail}"

    def _log_tail(self) -> str:
        """The end of the log; nothing once this is closed."""
        with self._log_use:
            if self._log.closed:
                return ""
            self._log.seek(0, os.SEEK_END)
            self._log.seek(max(0, self._log.tell() - _LOG_TAIL))
            return self._log.read().decode(errors="replace").strip()
