"""Judging what was told, from the run's folder alone: here, or where the GPU is."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from kagent_sandbox.data.device import DeviceFacts
from kagent_sandbox.data.task import Task
from kagent_sandbox.errors import UserError

from kagent.asktell.refusals import record_refusals
from kagent.config.settings import Config
from kagent.evolve.loop import Evolution, Limits
from kagent.evolve.machine import Machine
from kagent.evolve.open_machine import open_machine
from kagent.evolve.remembering import remember_run
from kagent.evolve.session import note_isolation_change, place_of, same_machine
from kagent.evolve.stored_run import setting_for
from kagent.fleet.fleet import LocalFleet, fleet_of
from kagent.runs.ask import Nobody
from kagent.runs.events import Observer, Phase, PhaseBegan, Stop, progress_to
from kagent.runs.final_race import choose_finalists
from kagent.runs.history import History
from kagent.runs.manifest import Manifest
from kagent.runs.store import RunStore

T = TypeVar("T")

CLOSING_S = 8.0  # of a deadline, for letting go: the judge may be in the middle of a sample


@dataclass(frozen=True)
class Bench:
    """A machine that judges one run, open for several sessions."""

    machine: Machine
    facts: DeviceFacts
    environment: Mapping[str, object]


@dataclass(frozen=True)
class JudgeResult:
    """The end of judging. `recorded` are the candidates that got their verdicts now."""

    folder: Path
    stop: Stop | None  # None: there was nothing to judge
    history: History
    recorded: tuple[int, ...]

    @property
    def left(self) -> int:
        """Candidates that still wait."""
        return len(self.history.pending)


_ELSEWHERE = (
    "queue answers here (kagent tell --queue), judge a copy of the folder where there is one "
    "(kagent judge), and bring the verdicts home (kagent merge)"
)


def can_judge(
    manifest: Manifest, folder: Path, config: Config | None = None, instead: str = _ELSEWHERE
) -> None:
    """Make sure that there is the kind of device that a run is for.

    Args:
        manifest: The run's.
        folder: The run's.
        config: Where it is to be judged; None: on this machine.
        instead: Advice where there is none.

    Raises:
        UserError: There is not.
    """
    fleet = LocalFleet() if config is None else fleet_of(config)
    if not fleet.has(manifest.kind):
        where = "this machine" if config is None else place_of(config)
        raise UserError(
            f"{folder}: judging it needs an NVIDIA GPU ({manifest.target}), and {where} has "
            f"none: {instead}"
        )


def has_work(history: History, *, race: bool) -> bool:
    """Whether anything waits for a verdict, or for the race that was asked for."""
    if history.pending or not race:
        return bool(history.pending)
    finalists = [c.id for c in choose_finalists(history.lineage)]
    return bool(finalists) and (history.race is None or list(history.race.finalists) != finalists)


@contextlib.contextmanager
def open_bench(
    task: Task,
    manifest: Manifest,
    config: Config,
    say: Callable[[str], None],
    continues: Path | None = None,
    judges: int = 1,
) -> Iterator[Bench]:
    """Builder and judge for a run. Baselines are measured once, however many sessions follow.

    Args:
        task: The run's task.
        manifest: The run's.
        config: Jobs and isolation.
        say: Is told what is being done, and who has the device while it is waited for.
        continues: Folder of the run that is continued; None for what measures everything anew.
        judges: How many; a second one repeats the final race.

    Raises:
        RunError: The run to continue belongs to another device; nothing was measured.
        MachineError: This machine cannot judge.
    """
    config = config.model_copy(update={"configs": manifest.configs})

    def accept(environment: Mapping[str, object], facts: DeviceFacts) -> None:
        if continues is not None:
            same_machine(manifest, environment, facts, continues)

    secret = secrets.randbits(62)
    opened = open_machine(task, manifest.kind, config, secret, say, accept, judges)
    with opened as (machine, facts, environment):
        found: list[Mapping[str, object]] = []

        def prepare(say: Callable[[str], None]) -> Mapping[str, object]:
            if not found:
                found.append(machine.prepare(say))
            return found[0]

        yield Bench(replace(machine, prepare=prepare), facts, environment)


def judge(
    store: RunStore,
    task: Task,
    bench: Bench,
    observe: Observer,
    budget: int,
    *,
    deadline_s: float | None = None,
    race: bool = False,
) -> JudgeResult:
    """Judge what waits, in order, each verdict committed as it comes.

    Args:
        store: The run, open for writing.
        task: Its task.
        bench: The machine.
        observe: Is told what happens.
        budget: Of the run before its first session.
        deadline_s: Time on `time.monotonic` at which work in progress is abandoned.
        race: Whether the finalists race on hidden cases once all is judged.

    Raises:
        RunError: The run belongs to another device, or cannot be written.
        MachineError: The machine failed; what was recorded until then is kept.
    """
    same_machine(store.manifest, bench.environment, bench.facts, store.folder)
    note_isolation_change(store, bench.environment, observe)
    if not store.manifest.environment:
        store.measured_on(bench.environment)
    history = store.history()
    setting = setting_for(store, task, history, budget)
    evolution = Evolution(setting, (), store, bench.machine, Nobody(), observe, Limits(race=race))
    try:
        stop = _run(_until(evolution, deadline_s))
    except KeyboardInterrupt:
        stop = Stop.INTERRUPTED
    if stop is Stop.TIME:
        store.stop(stop)  # the search itself only knows that it was interrupted
    after = store.history()
    recorded = range(len(history.lineage), len(after.lineage))
    return JudgeResult(store.folder, stop, after, tuple(recorded))


def judge_all(
    store: RunStore,
    task: Task,
    config: Config,
    observe: Observer,
    *,
    deadline_s: float | None = None,
    race: bool = False,
) -> JudgeResult:
    """Judge waiting candidates, on a machine that is opened only if one passes its build.

    Args:
        store: The run, open for writing.
        task: Its task.
        config: Jobs, isolation, budget and, for the race, judges.
        observe: Receives every event.
        deadline_s: Time on `time.monotonic` at which work in progress is abandoned.
        race: Whether the finalists race on hidden cases at the end.

    Raises:
        UserError: This machine lacks the device.
        RunError, MachineError: As `judge`.
    """
    can_judge(store.manifest, store.folder, config)
    history = store.history()
    if not has_work(history, race=race):
        return JudgeResult(store.folder, None, history, ())
    say = progress_to(observe)
    refused: tuple[int, ...] = ()
    if not race and deadline_s is None:
        refused = record_refusals(store, task, config, observe, say)
    if refused and not (after := store.history()).pending:
        remember_run(store, task, config, say)
        return JudgeResult(store.folder, after.stop, after, refused)
    observe(PhaseBegan(Phase.START))
    judges = config.judges if race else 1
    with open_bench(task, store.manifest, config, say, store.folder, judges) as bench:
        budget = config.budget
        judged = judge(store, task, bench, observe, budget, deadline_s=deadline_s, race=race)
    remember_run(store, task, config, say)
    return replace(judged, recorded=(*refused, *judged.recorded))


async def _until(evolution: Evolution, deadline_s: float | None) -> Stop:
    left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
    limit = asyncio.timeout(left_s)
    try:
        async with limit:
            return await evolution.run()
    except TimeoutError:
        if not limit.expired():
            raise
        return Stop.TIME


def deadline_of(begun_s: float, seconds: float) -> float:
    """Return the time on `time.monotonic` to stop at, so that a command that began at `begun_s`
    ends in time.
    """
    return begun_s + seconds - min(CLOSING_S, seconds / 2)


class _Interrupt:
    """Interrupt of a thread that waits for another one's event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._came = False
        self._cancel: Callable[[], object] | None = None

    def come(self) -> None:
        """Cancel what runs; nothing where nothing does any more."""
        with self._lock:
            self._came = True
            if self._cancel is not None:
                self._cancel()

    def heard_by(self, cancel: Callable[[], object] | None) -> None:
        """Call `cancel` when it comes, or now if it has come."""
        with self._lock:
            self._cancel = cancel
            if self._came and cancel is not None:
                cancel()


_interrupt: ContextVar[_Interrupt | None] = ContextVar("_interrupt", default=None)


def _run(work: Coroutine[Any, Any, T]) -> T:
    """As asyncio.run, also for interrupts of a thread that waits for this one.

    Raises:
        KeyboardInterrupt: There was one.
    """
    interrupt = _interrupt.get()
    if interrupt is None:
        return asyncio.run(work)

    async def interruptible() -> T:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        interrupt.heard_by(lambda: loop.call_soon_threadsafe(task.cancel))
        try:
            return await work
        finally:
            interrupt.heard_by(None)

    try:
        return asyncio.run(interruptible())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def apart_from_loops(work: Callable[[], T]) -> T:
    """Call `work`, which runs an event loop of its own, from where there may be one already, as in
    a notebook. An interrupt there ends it.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    interrupt, context = _Interrupt(), copy_context()
    context.run(_interrupt.set, interrupt)
    with ThreadPoolExecutor(1, "kagent") as threads:
        try:
            return threads.submit(context.run, work).result()
        except BaseException:
            interrupt.come()
            raise
