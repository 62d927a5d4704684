"""Evaluates one candidate of the corpus as a run would: builder, judge, interpreter, baits.

Everything is the real thing, with shorter limits, so that what hangs is over soon.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from kagent_sandbox.build.client import Builder
from kagent_sandbox.build.request import Built
from kagent_sandbox.errors import ChildDied, KagentError
from kagent_sandbox.judge_client import JudgeClient
from kagent_sandbox.task import Kind, Task, draw_hidden
from kagent_sandbox.verdict import Rejected

from kagent.selftest.baits import KEY, Baits
from kagent.selftest.catalogue import Runs, Variant
from kagent.selftest.compare import Seen, escaped, escapes, of_error, of_verdict
from kagent.session import has_gpu, request_maker
from kagent.tasks import find_task
from kagent.workbench import DEFAULT_TARGET, read_candidate

if TYPE_CHECKING:
    from kagent_sandbox.interpret import Interpreter

BUILD_LIMIT_S = 10.0
COMPILE_LIMIT_S = 5.0
SWEEP_S = 0.05


@dataclass(frozen=True, slots=True)
class Job:
    """A candidate's text and what is to be done with it. Equal jobs are done once."""

    text: str
    task: Path
    runs: Runs
    measured: bool

    @property
    def kind(self) -> Kind:
        """The kind of device whose cases it is built for."""
        return "cpu" if self.runs == "cpu" else "gpu"


def job_of(variant: Variant, *, twin: bool = False) -> Job:
    """A variant's job, or its honest twin's.

    Raises:
        UserError: The file cannot be read.
    """
    text = read_candidate(variant.twin if twin else variant.path)
    return Job(text, variant.task, variant.runs, variant.measured)


@dataclass
class Attempt:
    """A job under way: its baits, and the result of building."""

    job: Job
    baits: Baits
    text: str
    built: Built | Rejected | None = None
    error: KagentError | None = None
    seconds: float = 0.0


class Rig:
    """A builder, and a judge or an interpreter per task and kind, started when first needed.

    `build` may be called from several threads, `finish` from one. A context manager.
    """

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self.token = secrets.token_hex(16)
        self._secret = secrets.randbits(62)
        self._stack = contextlib.ExitStack()
        self._judges: dict[tuple[Path, Kind], JudgeClient] = {}
        self._interpreters: dict[Path, Interpreter] = {}
        self._tasks: dict[Path, Task] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        with self._stack:
            os.environ[KEY] = self.token
            self._stack.callback(os.environ.pop, KEY, None)
            self.builder = self._stack.enter_context(Builder(self.jobs))
            self._stack.callback(self._close)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _close(self) -> None:
        for judge in self._judges.values():
            judge.close()
        for interpreter in self._interpreters.values():
            interpreter.close()

    def skips(self, runs: str) -> str:
        """Why a candidate that runs there cannot be evaluated on this machine, or ""."""
        return "no NVIDIA GPU here" if runs == "gpu" and not has_gpu() else ""

    def evaluate(self, job: Job) -> Seen:
        """Build, check and measure, as far as the job goes; what the baits saw outranks it all."""
        return self.finish(self.build(job))

    def build(self, job: Job) -> Attempt:
        """Set baits, and build the candidate for the cases that it will be judged on."""
        baits = Baits(job.text, self.token)
        attempt = Attempt(job, baits, baits.fill())
        try:
            self._build(attempt)
        except BaseException:
            baits.close()
            raise
        return attempt

    def _build(self, attempt: Attempt) -> None:
        job, began = attempt.job, time.monotonic()
        task = self.task(job.task)
        cases = [*task.cases(job.kind).check, *draw_hidden(task, job.kind, "check", self._secret)]
        cases += task.cases(job.kind).bench if job.measured else ()
        target = self._target(job)
        request = dataclasses.replace(
            request_maker(task, target, cases, 4)(attempt.text),
            wall_limit_s=BUILD_LIMIT_S,
            compile_limit_s=COMPILE_LIMIT_S,
        )
        try:
            attempt.built = self.builder.build(request)
        except KagentError as e:
            attempt.error = e
        attempt.seconds += time.monotonic() - began

    def finish(self, attempt: Attempt) -> Seen:
        """Check and measure what was built, say what came of it all, and take the baits away."""
        with contextlib.closing(attempt.baits):
            return self._finish(attempt)

    def _finish(self, attempt: Attempt) -> Seen:
        began = time.monotonic()
        try:
            if attempt.error is not None:
                raise attempt.error
            seen = self._judged(attempt)
        except KagentError as e:
            seen = of_error(e)
            if isinstance(e, ChildDied):
                self._forget(attempt.job)
        seconds = attempt.seconds + time.monotonic() - began
        seen = dataclasses.replace(seen, seconds=seconds)
        return escaped(seen, [*attempt.baits.touched(), *escapes(seen, self.token)])

    def _judged(self, attempt: Attempt) -> Seen:
        job, built = attempt.job, attempt.built
        assert built is not None, "it was built before"
        if isinstance(built, Rejected) or job.runs == "build":
            return of_verdict(built)
        if job.runs == "interpret":
            interpreter = self.interpreter(job.task)
            verdict = interpreter.check(attempt.text)
            return of_verdict(verdict, built.log + interpreter.printed())
        judge = self.judge(job.task, job.kind)
        found = judge.check(built)
        if not isinstance(found, Rejected) and job.measured:
            passed = judge.measure(built, found, sweep_s=SWEEP_S)
            return of_verdict(passed, built.log + judge.printed())
        return of_verdict(found, built.log + judge.printed())

    def task(self, folder: Path) -> Task:
        """A task, read once."""
        if folder not in self._tasks:
            self._tasks[folder] = find_task(folder)
        return self._tasks[folder]

    def judge(self, task: Path, kind: Kind) -> JudgeClient:
        """The judge of a task on a device."""
        with self._lock:
            if (task, kind) not in self._judges:
                self._judges[task, kind] = JudgeClient(task, kind, self._secret)
            return self._judges[task, kind]

    def interpreter(self, task: Path) -> Interpreter:
        """What runs a task's Triton candidates where there is no GPU."""
        from kagent_sandbox.interpret import Interpreter

        if task not in self._interpreters:
            self._interpreters[task] = Interpreter(self.task(task), self._secret)
        return self._interpreters[task]

    def _target(self, job: Job) -> str:
        if job.runs == "gpu":
            return self.judge(job.task, "gpu").facts.target
        return "cpu" if job.runs == "cpu" else DEFAULT_TARGET

    def _forget(self, job: Job) -> None:
        """Close a judge that has died; the next candidate gets a new one."""
        judge = self._judges.pop((job.task, job.kind), None)
        if judge is not None:
            judge.close()
