"""Processes that search, for suites and campaigns: one answer each, and none outlives its command.

In a process of its own, a search sees one choice of devices, and what ends it ends no other one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kagent_sandbox.process.ask_once import temporary_folder
from kagent_sandbox.process.log_tail import log_tail
from kagent_sandbox.process.process_tree import kill_tree

from kagent.llm.chat import ModelError
from kagent.suite.record import FailedStep

Answer = Mapping[str, Any]
Tell = Callable[[Answer], None]
LISTENS: dict[str, object] = {"listens": True}
"""First line of a process: from then on it ends as after Ctrl-C where it is told to."""


class Workers:
    """Starts them, several at once where threads ask; ends all of them as after Ctrl-C."""

    def __init__(self, words: Sequence[str]) -> None:
        """Start nothing yet.

        Args:
            words: What Python runs: a module that ends in `kagent.suite.worker.serve`.
        """
        self._words = tuple(words)
        self._live: set[subprocess.Popen[str]] = set()
        self._listening: set[subprocess.Popen[str]] = set()  # that end as after Ctrl-C
        self._stopping = threading.Event()

    def ask(self, request: Mapping[str, object], tell: Tell) -> Answer:
        """The last line that a process says to a request.

        Args:
            request: What is asked for; "parent" is added.
            tell: Is told every line.

        Returns:
            "stop" or "error", the latter with the "step" that failed.

        Raises:
            KeyboardInterrupt: All are stopped; the process has ended, and kept what it had.
            ModelError: A model cannot be asked.
        """
        answer: Answer = {}
        with temporary_folder() as folder, tempfile.TemporaryFile() as log:
            process = subprocess.Popen(
                [sys.executable, *self._words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # a Ctrl-C at the terminal is the command's to handle
                env={**os.environ, "TMPDIR": folder},
            )
            assert process.stdin is not None
            assert process.stdout is not None
            self._live.add(process)
            if self._stopping.is_set():
                process.kill()
            try:
                with contextlib.suppress(BrokenPipeError), process.stdin:
                    process.stdin.write(json.dumps({**request, "parent": os.getpid()}))
                for line in process.stdout:
                    answer = json.loads(line)
                    self._listening.add(process)
                    if answer != LISTENS:
                        tell(answer)
                process.wait()
            finally:
                self._listening.discard(process)
                kill_tree(process.pid)
                process.wait()
                process.stdout.close()
                self._live.discard(process)
            tail = log_tail(log)
        if self._stopping.is_set():
            raise KeyboardInterrupt
        if answer.get("model"):
            raise ModelError(str(answer["error"]), permanent=True)
        if "stop" not in answer and "error" not in answer:
            text = f"its process ended with status {process.returncode}: {tail}"
            return {"error": text, "step": FailedStep.MACHINE.value}
        return answer

    def stop(self, say: Callable[[str], None]) -> None:
        """Have all end as after Ctrl-C, and wait until they have. A second Ctrl-C kills."""
        self._stopping.set()
        try:
            working = self._listening.copy()
            for process in list(self._live):
                if process in working:
                    process.send_signal(signal.SIGINT)
                else:  # it may not hear that yet, and has nothing to keep
                    kill_tree(process.pid)
            if working:
                say("stopping; a second Ctrl-C kills what still works")
            while self._live:
                time.sleep(0.05)
        except KeyboardInterrupt:
            for process in list(self._live):
                kill_tree(process.pid)
