"""Winners on this machine, before they are exported: built, checked, replayed on real tensors, and
raced against each other and torch, on visible and on fresh hidden cases.

Figures of different runs were not measured side by side; what a library's dispatch is decided by
was. Nothing here believes a run's store but for the texts of its kernels.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, replace
from typing import Any

from kagent_sandbox.builder.binary.linked_libraries import asked_of_surroundings
from kagent_sandbox.data.build import BuildRequest, Built, Contender
from kagent_sandbox.data.case import Case
from kagent_sandbox.data.device import DeviceFacts
from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.race import BEST_OF_TORCH, EAGER, Race, RaceCase
from kagent_sandbox.data.task import Task, draw_hidden
from kagent_sandbox.data.verdict import CaseTiming, Comparison, Rejected, SpeedVerdict
from kagent_sandbox.device.table import own_unit
from kagent_sandbox.judge.client import JudgeClient
from kagent_sandbox.judge.timing.metrics import choice_for
from kagent_sandbox.process.cores import usable_cores
from kagent_sandbox.process.device_lock import DeviceLock
from kagent_sandbox.replay.replayer import Replayer
from kagent_sandbox.runtime.source import Source

from kagent.config.settings import Config
from kagent.evolve.machine import Machine
from kagent.evolve.open_machine import open_machine, search_cases
from kagent.export.dispatch_table import best_of
from kagent.export.library._cpus import this_cpu
from kagent.export.record import (
    TORCH,
    CompiledRecord,
    DeviceRecord,
    PointRecord,
    RegionRecord,
    Timing,
)
from kagent.export.regions import checked_padded, regions_of

Say = Callable[[str], None]

MOST_AT_ONCE = 6
"""Tasks whose kernels are measured side by side: each holds memory of the GPU."""
CORES_EACH = 3
"""Cores of this machine for each of them."""


@dataclass(frozen=True)
class LibraryEntrant:
    """A kernel that is to be measured. `choice`: its configuration by visible benchmark case."""

    id: str
    source: str
    configs: int
    choice: Mapping[str, int]


@dataclass(frozen=True)
class TimedResult:
    """The result of one entrant: refused with the reason, or its facts."""

    id: str
    refused: str = ""
    configs: tuple[Mapping[str, object], ...] = ()
    regions: tuple[RegionRecord, ...] = ()
    versus_torch: Comparison | None = None  # on the hidden cases drawn here
    pitched: bool = False  # checked with rows further apart than they are long


@dataclass(frozen=True)
class LibraryTimes:
    """One task's kernels on the machine that measured them."""

    device: DeviceRecord
    target: str
    results: Mapping[str, TimedResult]
    compiled: Mapping[str, Sequence[CompiledRecord]]  # by kernel: what its host code compiles
    cubins: Mapping[str, bytes]  # by `CompiledRecord.key`


@dataclass(frozen=True)
class Measurement:
    """Kernels of one task that are to be measured on one kind of device, "gpu" or "cpu"."""

    task: Task
    kind: Kind
    entrants: Sequence[LibraryEntrant]


def measure_all(wanted: Sequence[Measurement], config: Config, say: Say) -> list[LibraryTimes]:
    """Measure several tasks' kernels; on a GPU side by side, with turns on it.

    The time goes into builds, torch.compile and processes that start, and the GPU is timed for a
    small part of it. On a CPU, builds would disturb what is timed.

    Args:
        wanted: In the order of the results.
        config: Jobs and isolation.
        say: Function that receives lines of progress, from several threads.

    Raises:
        MachineError, DeviceWedged, ChildDied: As `measure`, for any of them; the others end.
    """
    gpus = [w for w in wanted if w.kind == "gpu"]
    at_once = max(1, min(len(gpus), MOST_AT_ONCE, usable_cores() // CORES_EACH))
    if at_once == 1 or len(gpus) < len(wanted):
        return [measure(w.task, w.kind, w.entrants, config, say) for w in wanted]
    judges: list[JudgeClient] = []
    failed = threading.Event()

    def opened(judge: JudgeClient) -> None:
        judges.append(judge)
        if failed.is_set():
            judge.close()

    def one(w: Measurement) -> LibraryTimes:
        def told(text: str) -> None:
            say(f"{w.task.name}: {text}")

        return measure(w.task, w.kind, w.entrants, config, told, opened)

    with ThreadPoolExecutor(at_once, "export") as threads:
        begun = [threads.submit(one, w) for w in wanted]
        try:
            for each in wait_for(begun, return_when=FIRST_EXCEPTION).done:
                each.result()
        except BaseException:
            for each in begun:
                each.cancel()
            failed.set()
            for judge in judges:  # whoever waits for an answer gives up
                judge.close()
            raise
        return [b.result() for b in begun]


def measure(
    task: Task,
    kind: Kind,
    entrants: Sequence[LibraryEntrant],
    config: Config,
    say: Say,
    on_open: Callable[[JudgeClient], None] = lambda _: None,
) -> LibraryTimes:
    """Verify and time all entrants of a task on this machine.

    Args:
        task: The task.
        kind: "gpu" or "cpu".
        entrants: The kernels.
        config: Jobs and isolation.
        say: Function that receives lines of progress.
        on_open: Is given the judge; closing it ends the call.

    Raises:
        MachineError: The machine failed, or cannot be isolated as asked.
        DeviceWedged, ChildDied: As the judge.
    """
    secret = secrets.randbits(62)
    hidden = draw_hidden(task, kind, "bench", secret)
    checked = [*search_cases(task, kind, secret), *hidden]
    with open_machine(task, kind, config, secret, say) as (machine, facts, environment):
        if isinstance(machine.judge, JudgeClient):
            on_open(machine.judge)
        found = _Verified(machine, task, kind, checked, hidden, say)
        with Replayer() as replayer:
            results = {e.id: found.verify(e, replayer) for e in entrants}
            found.end(replayer)
            observed = replayer.observed
        races = found.race([e for e in entrants if not results[e.id].refused])
        for race in races:
            for name, why in race.failed.items():
                text = f"failed in the race: {why.status}: {why.message}"
                results[name] = replace(results[name], refused=text)
        for name, result in results.items():
            if not result.refused:
                versus = races[-1].versus_torch(name)
                results[name] = replace(result, versus_torch=versus)
        compiled = {k: tuple(map(_compiled, found)) for k, found in observed.sources.items()}
        name, capability = _named(facts)
        device = DeviceRecord(
            name=name,
            kind=kind,
            capability=capability,
            environment=environment,
            date=time.strftime("%Y-%m-%d"),
            points=tuple(found.point(c) for race in races for c in race.cases),
        )
        return LibraryTimes(device, facts.target, results, compiled, observed.cubins)


def _named(facts: DeviceFacts) -> tuple[str, str]:
    """Name and capability, as a library's dispatch will find them; opens no CUDA context here."""
    if facts.kind == "gpu":
        return facts.name, facts.target.rstrip("af")
    return this_cpu()


class _Verified:
    """The state of one session: what was built of whom, and which configuration is for what."""

    def __init__(
        self,
        machine: Machine,
        task: Task,
        kind: Kind,
        checked: Sequence[Case],
        hidden: Sequence[Case],
        say: Say,
    ) -> None:
        self._machine = machine
        self._task = task
        self._kind = kind
        self._checked = checked
        self._hidden = hidden
        self._say = say
        self._lock = DeviceLock(own_unit(kind), say)
        self._built: dict[str, tuple[Built, Built | None]] = {}
        self._choice: dict[str, dict[str, int]] = {}

    def verify(self, entrant: LibraryEntrant, replayer: Replayer) -> TimedResult:
        """Build, check, and compare what its host code does on real tensors with its plans."""
        self._say(f"{entrant.id}: building")
        makers = [self._machine.request]
        if self._machine.race_request is not None:
            makers.append(self._machine.race_request)
        requests = [replace(m(entrant.source), max_configs=entrant.configs) for m in makers]
        built: list[Built] = []
        for request in requests:
            answer = self._machine.builder.build(request)
            if isinstance(answer, Rejected):
                return _refused(entrant, "does not build", answer)
            built.append(answer)
        if (asked := _asked(built)) is not None:
            return TimedResult(
                entrant.id,
                f"asks by {asked} where, when or by whom it is called, which may be answered "
                "otherwise where a library is used",
            )
        self._built[entrant.id] = built[0], built[1] if len(built) > 1 else None
        bench = self._task.cases(self._kind).bench
        choice = choice_for(self._checked, bench, entrant.choice)
        configs = built[0].configs
        self._choice[entrant.id] = {n: i if i < len(configs) else 0 for n, i in choice.items()}
        self._say(f"{entrant.id}: checking")
        errors = self._machine.judge.check(built[0])
        if isinstance(errors, Rejected):
            return _refused(entrant, "is not correct", errors)
        self._say(f"{entrant.id}: its host code on real tensors")
        for request, answer in zip(requests, built, strict=True):
            if (different := self._replay(entrant, request, answer, replayer)) is not None:
                return _refused(entrant, "is not what was measured", different)
        regions = regions_of(self._checked, errors)
        pitched = checked_padded(self._task, self._checked, [*bench, *self._hidden])
        return TimedResult(entrant.id, "", configs, regions, pitched=pitched)

    def _replay(
        self, entrant: LibraryEntrant, request: BuildRequest, built: Built, replayer: Replayer
    ) -> Rejected | None:
        for case in request.cases:
            index = self._choice[entrant.id].get(case.name, 0)
            if (index, case.name) not in built.plans:
                index = 0
            plan, config = built.plans[index, case.name], built.configs[index]
            with self._lock.turn("work"):  # it runs here, on the device that others time
                different = replayer.compare(
                    request.source, request.entry, case, plan, config, kernel=entrant.id
                )
            if different is not None:
                return different
        return None

    def end(self, replayer: Replayer) -> None:
        """End the process of the last host code: that disturbs whoever is timed, as its start."""
        with self._lock.turn("work"):
            replayer.end()

    def race(self, entrants: Sequence[LibraryEntrant]) -> list[Race]:
        """Race on the visible cases, and on hidden ones where the task has any. The last race
        counts.
        """
        if not entrants:
            return [Race((), {})]
        self._say("racing on the visible cases")
        races = [self._machine.judge.race(self._contenders(entrants, 0), hidden=False)]
        left = [e for e in entrants if e.id not in races[0].failed]
        if self._hidden and left:
            self._say("racing on hidden cases")
            races.append(self._machine.judge.race(self._contenders(left, 1), hidden=True))
        return races

    def _contenders(self, entrants: Sequence[LibraryEntrant], which: int) -> list[Contender]:
        found = []
        for entrant in entrants:
            built = self._built[entrant.id][which]
            assert built is not None, "hidden cases were drawn, so they were built"
            found.append(Contender(entrant.id, built, self._choice[entrant.id]))
        return found

    def point(self, case: RaceCase) -> PointRecord:
        """A case of a race, and who is to be used there."""
        times = {n: _timing(t) for n, t in {**case.baselines, **case.candidates}.items()}
        if (fastest := case.fastest_of_torch) is not None:
            times[TORCH] = _timing(case.baselines[fastest])
        best = best_of(times, case.candidates, _verdicts(case, EAGER))
        config = {n: self._choice[n].get(case.case, 0) for n in case.candidates}
        verdicts = _verdicts(case, BEST_OF_TORCH)
        return PointRecord(case.case, case.dtype, dict(case.dims), times, config, best, verdicts)


def _asked(built: Sequence[Built]) -> str | None:
    """The first import by which a C++ kernel can tell a judge from a library's user."""
    for answer in built:
        if answer.target == "cpu":
            for binary in answer.binaries.values():
                if (name := asked_of_surroundings(binary)) is not None:
                    return name
    return None


def _verdicts(case: RaceCase, against: str) -> dict[str, SpeedVerdict]:
    """Return the speed verdicts of the candidates that were timed beside someone."""
    ratios = {n: case.ratio(n, against) for n in case.candidates}
    return {n: r.verdict for n, r in ratios.items() if r is not None}


def _compiled(record: Mapping[str, Any]) -> CompiledRecord:
    source = Source.of(record)
    return CompiledRecord(
        key=record["key"],
        target=record["target"],
        language=source.language,
        name=source.name,
        text=source.text,
        options=source.options,
        defines=tuple((n, v) for n, v in source.defines if isinstance(v, int | float | str)),
    )


def _timing(timing: CaseTiming) -> Timing:
    return Timing(timing.kernel_us, timing.low_us, timing.high_us)


def _refused(entrant: LibraryEntrant, what: str, verdict: Rejected) -> TimedResult:
    where = f" on {verdict.case}" if verdict.case else ""
    return TimedResult(entrant.id, f"{what}{where}: {verdict.status}: {verdict.message}")
