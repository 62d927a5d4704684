"""A node's side of a Ray cluster: a worker of Ray's, with one judge or one builder in it.

The classes are plain. `kagent.fleet.ray_fleet` makes actors of them, `kagent.export.ray_host` of
another one. What crosses is JSON and bytes; errors are answers, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kagent_sandbox.builder.client import Builder
from kagent_sandbox.cache import cache_folder
from kagent_sandbox.confine.policy import ask_for
from kagent_sandbox.data.build import BuildRequest, Built
from kagent_sandbox.data.compiled import Loop, Remark
from kagent_sandbox.data.records import from_json, to_json
from kagent_sandbox.data.task import Task
from kagent_sandbox.errors import KagentError
from kagent_sandbox.judge.judge_process import JudgeProcess
from kagent_sandbox.judge.packing import pack
from kagent_sandbox.judge.protocol import error_answer
from kagent_sandbox.process.isolation_probe import probe

from kagent import resources
from kagent.runs.manifest import versions

Answer = dict[str, Any]
_TASK_FILES = ("task.toml", "reference.py", "calibration.json")


@dataclass(frozen=True)
class BuiltWords:
    """The parts of a `Built` that the judge does not get."""

    work_hash: str
    dropped: tuple[str, ...]
    log: str
    ptx: Mapping[str, str]
    remarks: tuple[Remark, ...]
    loops: tuple[Loop, ...]


def undo_ray() -> None:
    """Undo in this worker what Ray did to it, so that what it starts is as a shell starts it.

    A process without privileges can neither lower its nice value nor its OOM score. Who waits for
    the device is told the name of a command, and Ray's worker has another one.
    """
    sys.argv = ["kagent", "on", "Ray"]
    for name in list(os.environ):
        if name.startswith("RAY_"):
            del os.environ[name]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("0")


class Worker:
    """Base of all: on a node, started by Ray.

    Args:
        isolation: Tier to require, or "auto".
    """

    def __init__(self, isolation: str) -> None:
        undo_ray()
        ask_for(isolation)
        self._said: deque[str] = deque(maxlen=100)

    def describe(self) -> Answer:
        """Versions, the host, and what may disturb here."""
        return {
            "pid": os.getpid(),
            "host": platform.node(),
            "kagent": resources.version(),
            "versions": versions(),
            "nice": os.getpriority(os.PRIO_PROCESS, 0),
        }

    def attack(self) -> Answer:
        """The isolation of children here, and what stopped each attack from inside."""
        try:
            seen = probe()
            seen.require()
        except KagentError as e:
            return error_answer(e)
        return {"ok": {"canaries": {c.name: c.stopped_by for c in seen.canaries}}}

    def said(self) -> list[str]:
        """Messages since the last call: of a judge, or of a wait for the device."""
        lines: list[str] = []
        with contextlib.suppress(IndexError):
            while True:
                lines.append(self._said.popleft())
        return lines


class JudgeWorker(Worker):
    """A judge's process and its turns on the device; the client is elsewhere.

    Args:
        device: Name of the device (`kagent_sandbox.device.table`).
        isolation: Tier to require, or "auto".
    """

    def __init__(self, device: str, isolation: str) -> None:
        super().__init__(isolation)
        self._device = device
        self._process: JudgeProcess | None = None
        self._asking = threading.Lock()

    def open(self, files: Mapping[str, bytes], request: Mapping[str, object]) -> Answer:
        """Start the judge, anew if there is one, and open the device.

        Args:
            files: The task's, by name.
            request: As the judge's "open" takes it; the task's folder is this machine's.
        """
        old, self._process = self._process, None
        if old is not None:
            old.kill()  # whoever waits for it gives up
        with self._asking:
            try:
                if old is not None:
                    old.close()
                self._process = JudgeProcess(self._device, on_wait=self._said.append)
                asked = {**request, "task": str(task_folder(files))}
                facts = self._process.ask("open", asked)
            except KagentError as e:
                return error_answer(e)
        assert isinstance(facts, dict)
        # A GPU has a UUID. A CPU is known by its host.
        facts = {**facts, "unit": facts.get("unit") or platform.node()}
        return {"ok": facts, "pid": self._process.pid}

    def ask(self, verb: str, request: Mapping[str, object], blobs: Sequence[bytes]) -> Answer:
        """The judge's answer, as its process gives it."""
        with self._asking:
            if self._process is None:
                return {"error": "ChildDied", "text": "this judge has not been opened"}
            try:
                answer = self._process.ask(verb, request, blobs, self._said.append)
            except KagentError as e:
                return {**error_answer(e), "said": self.said()}
        return {"ok": answer, "said": self.said()}

    def close(self) -> None:
        """End the judge with all that it started."""
        process, self._process = self._process, None
        if process is not None:
            process.close()


class BuildWorker(Worker):
    """Builds one candidate at a time. It has no key, and no seed of hidden cases."""

    def __init__(self, isolation: str) -> None:
        super().__init__(isolation)
        self._builder = Builder(1)
        self._builder.__enter__()

    def isolation(self) -> Answer:
        """The tier of children."""
        try:
            return {"ok": self._builder.isolation.tier.value}
        except KagentError as e:
            return error_answer(e)

    def build(self, request: Mapping[str, object]) -> Answer:
        """Build a candidate. Its plans are parsed and checked here, and travel as texts."""
        try:
            found = self._builder.build(from_json(BuildRequest, request))
        except KagentError as e:
            return error_answer(e)
        if not isinstance(found, Built):
            return {"rejected": to_json(found)}
        header, blobs = pack(found)
        words = BuiltWords(
            found.work_hash, found.dropped, found.log, found.ptx, found.remarks, found.loops
        )
        return {"header": to_json(header), "words": to_json(words), "blobs": blobs}

    def close(self) -> None:
        """End all that it started."""
        self._builder.__exit__(None, None, None)


def task_files(task: Task) -> dict[str, bytes]:
    """Contents of a task's files, by name: all that a node needs of it."""
    there = (task.folder / name for name in _TASK_FILES)
    return {path.name: path.read_bytes() for path in there if path.is_file()}


def task_folder(files: Mapping[str, bytes]) -> Path:
    """A folder of this machine's cache with a task's files; written once.

    Args:
        files: Contents by name.
    """
    parts = [f"{name} {hashlib.sha256(data).hexdigest()}" for name, data in sorted(files.items())]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
    folder = cache_folder() / "fleet-tasks" / digest
    for name, data in files.items():
        path = folder / Path(name).name
        if not path.exists() or path.read_bytes() != data:
            folder.mkdir(parents=True, exist_ok=True)
            made = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
            made.write_bytes(data)
            made.replace(path)
    return folder
