"""Evaluation of the corpus's candidates as in a run: builder, judge, interpreter, and baits.

All parts are those of a run, with shorter limits, so that hangs end soon.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeVar

from kagent_sandbox.builder.client import Builder
from kagent_sandbox.cache import compiled_folder
from kagent_sandbox.confine import builder_confinement
from kagent_sandbox.confine.policy import Tier
from kagent_sandbox.data.build import BuildRequest, Built, Contender
from kagent_sandbox.data.device import DeviceFacts
from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.race import Race
from kagent_sandbox.data.target import DEFAULT_TARGET
from kagent_sandbox.data.task import Task, draw_hidden
from kagent_sandbox.data.verdict import CaseError, Passed, Rejected, Status
from kagent_sandbox.device.table import available, device_for
from kagent_sandbox.errors import ChildDied, KagentError, MachineError, UserError
from kagent_sandbox.judge.client import JudgeClient
from kagent_sandbox.judge.judge_process import JudgeProcess
from kagent_sandbox.judge.timing.noise import Noise

from kagent.evolve.open_machine import request_maker
from kagent.resources import corpus_folder
from kagent.selftest.assemble import candidate_text
from kagent.selftest.bait import KEY, Bait
from kagent.selftest.expectations import EntryOutcome, escaped, escapes, of_error, of_verdict
from kagent.selftest.jobs import Attempt, Job
from kagent.tasks import find_task

if TYPE_CHECKING:
    from kagent_sandbox.judge.interpreter import Interpreter

LEAST_TIMEOUT_SCALE = 0.3  # share of a run's limits: 3 s for a kernel that usually has 10
ENDLESS = 0.5  # share of that for a build that reaches whatever limit there is
ENDLESS_COMPILE_S = 1  # for its kernel: CPU time, of which a busy machine takes none away
BUILD_S = 0.35  # of an honest C++ kernel, on a machine that is quick enough for that
SCALE_BUILDS = 3  # the quickest counts: one bad moment would slow down all that follows
MOST_CONFIGS = 4
SWEEP_S = 1.0  # enough for a second configuration of a kernel that takes some milliseconds
PAUSE_S = 2.0
_STARTERS = 8


class SelftestEvaluator:
    """A builder, and a judge or an interpreter per task and kind, started when first needed.

    `build` may be called from several threads, `finish` from one. A context manager; at the end
    everything that was started is gone, also what another thread is still building.

    Args:
        jobs: Candidates that are built at once.
        token: The secret that candidates are after.
        tier: How candidates are confined: None is as in a run.
    """

    def __init__(self, jobs: int, token: str, tier: Tier | None = None) -> None:
        self.token = token
        self._asked_for = tier
        self._jobs = jobs
        self._secret = secrets.randbits(62)
        self._stack = contextlib.ExitStack()
        self._attempts: set[Bait] = set()
        self._opening: set[JudgeProcess] = set()
        self._ending = False
        self._opening_lock = threading.Lock()
        self._judges = _Started(self._new_judge)
        self._interpreters = _Started(self._new_interpreter)
        self._tasks: dict[Path, Task] = {}
        self._timeout_scale: float | None = None
        self._scale_lock = threading.Lock()

    def __enter__(self) -> Self:
        with self._stack:
            self._stack.enter_context(_variable(KEY, self.token))
            # Importing torch's compiler makes a folder: in kagent's cache, as judges have it.
            compiled = str(compiled_folder())
            self._stack.enter_context(_variable("TORCHINDUCTOR_CACHE_DIR", compiled))
            self._stack.callback(self._close)
            # More than are built at once, which is the builder's to see to: some start judges.
            self._threads = ThreadPoolExecutor(self._jobs + _STARTERS, "build")
            self._stack.callback(self._threads.shutdown)
            self._stack.callback(self._stop_opening)
            confinement = builder_confinement(tier=self._asked_for)
            builder = Builder(self._jobs, confinement=confinement, take_turns=False)
            self._builder = self._stack.enter_context(builder)
            self._stack.callback(self._threads.shutdown, wait=False, cancel_futures=True)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()  # threads end when the builder is gone, and their baits after that

    def _close(self) -> None:
        for bait in list(self._attempts):
            bait.close()
        closes: list[Callable[[], None]] = [j.close for j in self._judges.all()]
        closes += [i.close for i in self._interpreters.all()]
        with ThreadPoolExecutor(max(1, len(closes))) as at_once:  # each waits for what it does now
            for future in [at_once.submit(close) for close in closes]:
                future.result()

    def against_itself(self, job: Job) -> Race | Rejected:
        """A candidate raced against itself: both are measured as two candidates are."""
        built = self._build(job, job.text)
        if isinstance(built, Rejected):
            return built
        contenders = [Contender(name, built, {}) for name in ("a", "b")]
        return self.judge(job.task, job.kind).race(contenders, hidden=False, baselines=False)

    @property
    def seed(self) -> int:
        """Draws the hidden cases that candidates are built for, and judged on."""
        return self._secret

    @property
    def devices(self) -> list[DeviceFacts]:
        """Devices that candidates were judged on so far."""
        return list({j.facts.key: j.facts for j in self._judges.all()}.values())

    def noise(self) -> dict[str, Noise]:
        """Results of the A/A tests, by a device's key."""
        judges = {j.facts.key: j for j in self._judges.all()}
        return {key: judge.noise() for key, judge in judges.items()}

    @property
    def builder(self) -> Builder:
        """The builder of candidates."""
        return self._builder

    @property
    def tier(self) -> str:
        """The tier that confines candidates."""
        return self._builder.isolation.tier.value

    @property
    def timeout_scale(self) -> float:
        """Share of a run's limits that candidates get: what hangs is to be over soon.

        More than the least where an honest kernel takes long to build, time and again: the machine
        is slow or busy.
        """
        with self._scale_lock:
            if self._timeout_scale is None:
                task = self.task(corpus_folder() / "tasks" / "rows")
                request = request_maker(task, "cpu", list(task.cases("cpu").check), 1)
                asked = request(candidate_text(corpus_folder() / "honest" / "rows_cpp.py"))
                builds = [self._builder.build(asked) for _ in range(SCALE_BUILDS)]
                took_s = min(b.build_s if isinstance(b, Built) else math.inf for b in builds)
                self._timeout_scale = min(1.0, LEAST_TIMEOUT_SCALE * max(1.0, took_s / BUILD_S))
            return self._timeout_scale

    def skips(self, runs: str) -> str:
        """Return why a candidate that runs there cannot be evaluated on this machine, or ""."""
        return "no GPU here" if runs == "gpu" and not available("gpu") else ""

    def evaluate(self, job: Job) -> EntryOutcome:
        """Build, check and measure, as far as the job goes; what the baits saw outranks it all."""
        return self.finish(self.build(job))

    def built(self, jobs: Iterable[Job]) -> Iterator[Attempt]:
        """Build jobs side by side; each as soon as it is built. What judges them starts
        meanwhile.
        """
        jobs = list(jobs)
        self.timeout_scale  # noqa: B018 - found out before kagent itself keeps the machine busy
        for task, kind in {(j.task, j.kind) for j in jobs if j.runs in ("cpu", "gpu")}:
            self._threads.submit(self.judge, task, kind)
        for task in {j.task for j in jobs if j.runs == "interpret"}:
            self._threads.submit(self.interpreter, task)
        for future in as_completed([self._threads.submit(self.build, job) for job in jobs]):
            yield future.result()

    def build(self, job: Job) -> Attempt:
        """Set baits, and build the candidate for the cases that it will be judged on."""
        bait = Bait(job.text, self.token)
        self._attempts.add(bait)
        attempt = Attempt(job, bait, bait.fill())
        began = time.monotonic()
        try:
            attempt.built = self._build(job, attempt.text)
        except KagentError as e:
            attempt.error = e
        attempt.seconds = time.monotonic() - began
        return attempt

    def _build(self, job: Job, text: str) -> Built | Rejected:
        task = self.task(job.task)
        cases = [*task.cases(job.kind).check, *draw_hidden(task, job.kind, "check", self._secret)]
        cases += task.cases(job.kind).bench if job.measured else ()
        request = request_maker(task, self._device(job), cases, MOST_CONFIGS)(text)
        share = self.timeout_scale
        if job.endless:
            share *= ENDLESS
            request = dataclasses.replace(request, compile_limit_s=ENDLESS_COMPILE_S / share)
        built = self._within(request, share)
        if not job.hangs and isinstance(built, Rejected) and built.status is Status.TIMEOUT:
            built = self._within(request, 1.0)  # a machine may stand still for seconds
        return built

    def _within(self, request: BuildRequest, share: float) -> Built | Rejected:
        """Build within a share of the request's limits."""
        return self._builder.build(
            dataclasses.replace(
                request,
                wall_limit_s=math.ceil(share * request.wall_limit_s),
                compile_limit_s=math.ceil(share * request.compile_limit_s),
                host_limit_s=math.ceil(share * request.host_limit_s),
            )
        )

    def finish(self, attempt: Attempt) -> EntryOutcome:
        """Check and measure what was built, say what came of it all, and take the baits away."""
        began = time.monotonic()
        try:
            seen = self.judged(attempt)
            how = [*attempt.bait.touched(), *escapes(seen, self.token)]
        finally:
            self.drop(attempt)
        seconds = attempt.seconds + time.monotonic() - began
        return escaped(dataclasses.replace(seen, seconds=seconds), how)

    def drop(self, attempt: Attempt) -> None:
        """Take the baits away of what is not judged, or no longer."""
        attempt.bait.close()
        self._attempts.discard(attempt.bait)

    def judged(self, attempt: Attempt) -> EntryOutcome:
        """Check and measure what was built."""
        job, built = attempt.job, attempt.built
        try:
            if attempt.error is not None:
                raise attempt.error
            assert built is not None, "it was built before"
            if isinstance(built, Rejected) or job.runs == "build":
                return of_verdict(built)
            if job.runs == "interpret":
                interpreter = self.interpreter(job.task)
                values = interpreter.check(attempt.text, built)
                if not isinstance(values, Rejected) and not values.errors:
                    raise UserError(f"{job.task}: all its check cases are too large to interpret")
                return of_verdict(values, interpreter.printed())
            judge = self.judge(job.task, job.kind)
            found = judge.check(built)
            if isinstance(found, Rejected) or not job.measured:
                return of_verdict(found, built.log + judge.printed())
            return of_verdict(_measured(judge, built, found), built.log + judge.printed())
        except KagentError as e:
            if isinstance(e, ChildDied) and attempt.error is None:
                self._forget(job)
            return of_error(e)

    def task(self, folder: Path) -> Task:
        """A task, read once."""
        if folder not in self._tasks:
            self._tasks[folder] = find_task(folder)
        return self._tasks[folder]

    def judge(self, task: Path, kind: Kind) -> JudgeClient:
        """The judge of a task on a device."""
        return self._judges.get((task, kind))

    def interpreter(self, task: Path) -> Interpreter:
        """Interpreter for a task's Triton candidates where there is no GPU."""
        return self._interpreters.get(task)

    def _new_judge(self, key: tuple[Path, Kind]) -> JudgeClient:
        (task, kind), timeout_scale = key, self.timeout_scale
        device, opening, opened = device_for(kind), list[JudgeProcess](), threading.Event()

        def connect() -> JudgeProcess:
            with self._opening_lock:
                if self._ending:
                    raise MachineError("the selftest has ended: no judge is started any more")
                link = JudgeProcess(device, tier=self._asked_for, take_turns=False)
                if not opened.is_set():  # one that takes its place later is the client's to close
                    self._opening.add(link)
                    opening.append(link)
            return link

        try:
            return JudgeClient(
                task,
                device,
                self._secret,
                timeout_scale=timeout_scale,
                eager_only=True,
                connect=connect,
            )
        finally:
            with self._opening_lock:
                opened.set()
                self._opening.difference_update(opening)

    def _stop_opening(self) -> None:
        """Have judges that are being started end at once: nobody will ask them."""
        with self._opening_lock:
            self._ending = True
            for link in self._opening:
                link.kill()

    def _new_interpreter(self, task: Path) -> Interpreter:
        from kagent_sandbox.judge.interpreter import Interpreter

        return Interpreter(self.task(task), self._secret, tier=self._asked_for)

    def _device(self, job: Job) -> DeviceFacts | str:
        if job.runs == "gpu":
            return self.judge(job.task, "gpu").facts
        return "cpu" if job.runs == "cpu" else DEFAULT_TARGET

    def _forget(self, job: Job) -> None:
        """Close a judge that has died, or an interpreter: the next candidate gets a new one."""
        if job.runs == "interpret":
            self._interpreters.drop(job.task)
        else:
            self._judges.drop((job.task, job.kind))


class _Process(Protocol):
    def close(self) -> None: ...


K = TypeVar("K")
P = TypeVar("P", bound=_Process)


class _Started(Generic[K, P]):
    """Processes by what they are for: each started once, several side by side."""

    def __init__(self, start: Callable[[K], P]) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._found: dict[K, Future[P]] = {}

    def get(self, key: K) -> P:
        """The one for it, started now if there is none; waits while another thread starts it."""
        with self._lock:
            mine = key not in self._found
            future = self._found.setdefault(key, Future())
        if mine:
            try:
                future.set_result(self._start(key))
            except BaseException as e:  # noqa: BLE001 - whatever it is, others wait for it
                with self._lock:  # the next caller tries again
                    self._found.pop(key, None)
                future.set_exception(e)
        return future.result()

    def all(self) -> list[P]:
        """Return all that are open."""
        with self._lock:
            return [f.result() for f in self._found.values() if f.done()]

    def drop(self, key: K) -> None:
        """Close the one for it: the next to ask gets a new one."""
        with self._lock:
            future = self._found.pop(key, None)
        if future is not None:
            future.result().close()


def _measured(judge: JudgeClient, built: Built, errors: tuple[CaseError, ...]) -> Passed | Rejected:
    """A candidate's times. Once more where a busy machine spoils them: it may be over."""
    try:
        return judge.measure(built, errors, sweep_s=SWEEP_S)
    except MachineError:
        time.sleep(PAUSE_S)
        return judge.measure(built, errors, sweep_s=SWEEP_S)


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable: what is started inherits it."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is not None:
            os.environ[name] = before
        else:
            del os.environ[name]
