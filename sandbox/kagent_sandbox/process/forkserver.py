"""Client of the fork-server: starts confined children in milliseconds, and ends them.

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
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self, cast

from kagent_sandbox.confine.isolation import Isolation
from kagent_sandbox.confine.policy import Confinement, Tier, asked_for
from kagent_sandbox.data.language import PLUGINS
from kagent_sandbox.errors import ChildDied
from kagent_sandbox.process import process_tree
from kagent_sandbox.process.channel import Channel, ChannelError
from kagent_sandbox.process.child_handle import ChildHandle, Exit
from kagent_sandbox.process.environment import for_confined
from kagent_sandbox.process.remove_tree import remove_tree
from kagent_sandbox.process.temporary_space import require_code, temporary_space
from kagent_sandbox.runtime.text import printable

__all__ = ["ChildHandle", "Exit", "ForkServer", "Isolation", "printable"]

_BOOTSTRAP = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[2]); sys.dont_write_bytecode = True; "
    "from kagent_sandbox.process.zygote import main; main(int(sys.argv[1]))"
)
_MOST_PRINTED = 16  # children
_START_S = 300.0  # importing torch from a cold network file system


class ForkServer:
    """A warm process from which confined children are forked. Use as a context manager."""

    def __init__(
        self,
        handler: str,
        *,
        preload: Sequence[str] = (),
        confinement: Confinement,
        env: Mapping[str, str] | None = None,
        folder_prefix: str = "kagent-",
    ) -> None:
        self._prefix = folder_prefix
        self._handler = handler
        self._preload = list(preload)
        tier = confinement.tier or asked_for()
        self._confinement = dataclasses.replace(confinement, tier=tier)
        self._env = dict(env or {})
        self._lock = threading.Lock()
        self._children: set[ChildHandle] = set()
        self._printed: deque[str] = deque(maxlen=_MOST_PRINTED)
        self._isolation: Isolation | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ending = False
        self._closed = False
        self._use = threading.Lock()  # of `_closed`, and of a restart

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the process without waiting for its imports; `spawn` and `isolation` do."""
        self._isolation = None  # a successor is observed anew
        with temporary_space():
            self._root = Path(tempfile.mkdtemp(prefix=self._prefix)).resolve()
        self._root.chmod(0o711)  # children of another user reach their own folder in it
        self._channel, theirs = Channel.pair()
        environment = for_confined()
        environment |= {"LANG": "C.UTF-8", "HOME": str(self._root), "TMPDIR": str(self._root)}
        # OpenBLAS, which numpy loads, starts threads at once: this process must not have any.
        environment |= {"TRITON_DISABLE_LINE_INFO": "1", "OPENBLAS_NUM_THREADS": "1"} | self._env
        path = json.dumps([os.path.abspath(p) for p in sys.path if p])
        with theirs, temporary_space(), open(self._root / "log", "wb") as log:
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
                "preload": [*PLUGINS, *self._preload],
                "confinement": dataclasses.asdict(self._confinement),
                "root": str(self._root),
            }
        )

    @property
    def isolation(self) -> Isolation:
        """Isolation observed at the start. Waits for it.

        Raises:
            ConfinementError: The host does not give the tier that the confinement asks for.
            ChildDied: The process failed to import what it was told to.
            MachineError: No code can be loaded from its folder.
        """
        with self._lock:
            return self._wait_ready()

    @property
    def folder(self) -> Path:
        """Folder of temporary files; children have theirs inside."""
        return self._root

    @property
    def pid(self) -> int:
        """Process id of the fork-server."""
        assert self._process is not None, "start it first"
        return self._process.pid

    @property
    def alive(self) -> int:
        """Return how many children were started and have not been seen to end."""
        return len(self._children)

    def _wait_ready(self) -> Isolation:
        if self._isolation is not None:
            return self._isolation
        try:
            answer = cast("dict[str, object]", self._channel.recv(_START_S).obj)
        except ChannelError as e:
            raise self._died(str(e)) from None
        if "error" in answer:
            raise self._died(str(answer["error"]))
        fields = {**answer, "tier": Tier(str(answer["tier"]))}
        fields["lacking"] = tuple(cast("list[str]", answer["lacking"]))
        isolation = Isolation(**fields)  # type: ignore[arg-type]
        isolation.require(self._confinement)
        require_code(self._root, isolation.tier)
        self._isolation = isolation
        return isolation

    def spawn(
        self, fds: Sequence[int] = (), *, wall_limit_s: float, lock_first: bool = True
    ) -> ChildHandle:
        """Fork a child that runs the handler; `fds` stay the caller's, the child gets copies.

        Raises:
            ConfinementError: See `isolation`.
            ChildDied: The fork-server is gone.
        """
        channel, channel_end = Channel.pair()
        control, control_end = Channel.pair()
        exit_, exit_end = Channel.pair()
        child = ChildHandle(
            channel, control, exit_, on_end=self._forget, on_silence=self._end_stopped
        )
        with channel_end, control_end, exit_end, self._lock:
            self._wait_ready()
            passed = [e.fileno() for e in (channel_end, control_end, exit_end)] + list(fds)
            self._children.add(child)
            try:
                self._channel.send(
                    {"wall_limit_s": wall_limit_s, "lock_first": lock_first}, fds=passed
                )
            except ChannelError as e:
                self._children.discard(child)
                raise self._died(str(e)) from None
        if self._ending:  # what ends it may have looked for children before this one
            child.close()
            raise self._died("it was closed")
        return child

    def _died(self, why: str) -> ChildDied:
        with contextlib.suppress(OSError):
            why += "\n" + printable((self._root / "log").read_text("utf-8", "replace")[-4000:])
        return ChildDied(f"the fork-server for {self._handler} failed: {why.strip()}")

    def printed(self) -> str:
        """Return the output of children that have ended since the last call, the end of each."""
        texts: list[str] = []
        with contextlib.suppress(IndexError):
            while True:
                texts.append(self._printed.popleft())
        return "".join(texts)

    def _forget(self, child: ChildHandle) -> None:
        self._children.discard(child)
        if (end := child.wait(0.0)) is not None and end.log_tail:
            self._printed.append(end.log_tail)

    def _end_stopped(self) -> None:
        """End the process, and supervisors, that somebody has stopped."""
        process = self._process
        if process is not None:
            process_tree.end_stopped((*process_tree.children(process.pid), process.pid))

    def restart(self) -> None:
        """End the process, if it is there still, and start another one in its place.

        Raises:
            ChildDied: This was closed: whoever did is not to be left with another process.
        """
        with self._use:
            self.require_open()
            self._end()
            self._ending = False
            self.start()

    def require_open(self) -> None:
        """Make sure that nobody has closed this.

        Raises:
            ChildDied: Somebody has.
        """
        if self._closed:
            raise ChildDied(f"the fork-server for {self._handler} was closed before it was done")

    def close(self) -> None:
        """Kill all children, end the process, remove its folder; none is started any more."""
        with self._use:
            self._closed = True
        self._end()

    def _end(self) -> None:
        if self._process is None:
            return
        self._ending = True
        self._end_stopped()
        for child in list(self._children):
            with contextlib.suppress(ChildDied):  # the others and this process are ended anyway
                child.close()
        self._channel.hang_up()  # another thread may wait for the end of its imports
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
        remove_tree(self._root)
