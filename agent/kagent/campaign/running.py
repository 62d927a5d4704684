"""A campaign's slices and final races: on each device one after the other, on several at once.
Whatever one run does, the next slice follows.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from kagent_sandbox.data.records import to_json
from kagent_sandbox.errors import MachineError, RunError
from kagent_sandbox.runtime.text import printable

from kagent.campaign.budget import BudgetUsed, Next, gain_since, limit_of, next_slice
from kagent.campaign.exchange import Migrant, finalists_of, offered
from kagent.campaign.record import Campaign, CampaignRun, Slice
from kagent.runs.events import Stop
from kagent.runs.history import History
from kagent.runs.store import read_history
from kagent.suite.problems import Problem
from kagent.suite.record import RUNS, FailedStep, ProblemState, write_record
from kagent.suite.workers import Answer, Tell, Workers
from kagent.text import plural, short
from kagent.ui.end_of_run import NO_FINALIST

MACHINE_FAILURES = 2
"""Slices in a row that the machine fails at, and that end the campaign: the next would, too."""
_WORKER = ("-m", "kagent.campaign.worker")
_MOST_REASON = 300  # characters
_ENDED = (Stop.EXHAUSTED, Stop.SETTLED, Stop.GOAL)
"""Ends of a slice after which another one of the same run would find nothing."""


@dataclass
class CampaignRunner:
    """Spends a campaign's budget, and keeps its record.

    Attributes:
        folder: The campaign's folder.
        campaign: The campaign, as it is in the folder.
        options: Options of this session that all runs have: `jobs`, `isolation`.
        say: Is told of a run, or a final race, what is being done for it; "" when that is over.
        changed: Is called with what happened when a slice or a race is over, and with "" when
            anything else is new.
        places: Slices of each device that are spent at once; one of each if it is empty.
    """

    folder: Path
    campaign: Campaign
    options: Mapping[str, object]
    say: Callable[[str, str], None]
    changed: Callable[[str], None]
    places: Mapping[str, int] = field(default_factory=dict)
    _noted_s: float = field(default_factory=time.monotonic)
    _lock: threading.RLock = field(default_factory=threading.RLock)  # of the record
    _workers: Workers = field(default_factory=lambda: Workers(_WORKER))

    def run(self) -> None:
        """Spend what is left of the budget, then race the finalists of each task and device.

        Raises:
            KeyboardInterrupt: Ctrl-C; all verdicts are kept, and the campaign can go on.
            MachineError: This machine failed at several slices in a row.
            ModelError: A model cannot be asked.
            RunError: The campaign's folder cannot be written.
        """
        pools = {d: ThreadPoolExecutor(room, d) for d, room in self._room.items()}
        races = {
            d: ThreadPoolExecutor(room // self._race_judges(d), f"race on {d}")
            for d, room in self._room.items()
        }
        try:
            self._spend(pools)
            left = [p for p in self.campaign.problems if not self.campaign.of(p).finished]
            _finish([races[self._device(p)].submit(self._race, p) for p in left])
        except BaseException:
            self._workers.stop(partial(self.say, ""))
            raise
        finally:
            for pool in (*pools.values(), *races.values()):
                pool.shutdown(wait=False, cancel_futures=True)
            for pool in (*pools.values(), *races.values()):
                pool.shutdown()

    @property
    def seconds(self) -> float:
        """Working time until now."""
        with self._lock:
            return self.campaign.seconds + time.monotonic() - self._noted_s

    @property
    def _room(self) -> dict[str, int]:
        return {d: self.places.get(d, 1) for d in self.campaign.devices}

    def _race_judges(self, device: str) -> int:
        """Judges of a final race: a second one repeats it, if there are two such devices."""
        return min(2, self._room[device])

    def _device(self, problem: Problem) -> str:
        """The device that a problem's finalists race on."""
        return self.campaign.runs_of(problem)[0].device

    def _spend(self, pools: Mapping[str, ThreadPoolExecutor]) -> None:
        """Spend slices until nothing is left to spend, those of a device in its pool."""
        failures, busy = 0, dict[Future[FailedStep | None], Next]()
        while True:
            while (
                found := next_slice(self.campaign, self.spent(), self._room, busy.values())
            ) is not None:
                busy[pools[found.run.device].submit(self._slice, found)] = found
            if not busy:
                self._close()
                return
            for future in wait(busy, return_when=FIRST_COMPLETED).done:
                run = busy.pop(future).run
                failures = failures + 1 if future.result() is FailedStep.MACHINE else 0
                if failures == MACHINE_FAILURES:
                    reason = self.campaign.run(run.name).reason
                    raise MachineError(
                        f"{failures} slices in a row failed on this machine, the last one with: "
                        f"{reason}"
                    )

    def _close(self) -> None:
        """Note of each run that nothing is left to spend on it, and for which limit."""
        limit = limit_of(self.campaign, self.spent())
        for run in self.campaign.runs:
            if not run.over:
                self._change(run, over=limit.value)

    def spent(self) -> Mapping[str, BudgetUsed]:
        """Budget that each run has used, by name."""
        return {
            r.name: BudgetUsed.of(h) if (h := self._read(r)) else BudgetUsed()
            for r in self.campaign.runs
        }

    # -- slices ------------------------------------------------------------------------------------

    def _slice(self, found: Next) -> FailedStep | None:
        """Spend a slice; the step that failed, None if none did."""
        run = found.run
        before = self._read(run)
        records = len(before.lineage) if before is not None else 0
        spent = BudgetUsed.of(before) if before is not None else BudgetUsed()
        elites: list[Migrant] = []
        if before is not None and found.budget - spent.evaluations > 1:
            elites = offered(before, self._others(run))
        problem = next(p for p in self.campaign.problems if p.name == run.target)
        self._keep(lambda c: c.race_again(problem))  # what it found before is not all any more
        began = time.monotonic()

        def tell(line: Answer) -> None:
            if "run" in line:
                self._change(run, run=line["run"])
            if "doing" in line:
                self.say(run.name, f"up to {plural(found.budget, 'evaluation')}, {line['doing']}")
            self._keep(lambda c: c)  # with its time
            if "recorded" in line:
                self.changed("")

        self.say(run.name, "starting")
        limits = {
            "budget": found.budget,
            "max_time": found.max_time,
            "max_cost": found.max_cost,
            "seed": run.seed,
        }
        answer = self._ask(run, limits, run.run, elites, "", tell)
        self.say(run.name, "")
        seconds = time.monotonic() - began
        after = self._read(self.campaign.run(run.name))
        if "error" in answer or after is None:
            unread = self.campaign.run(run.name).reason or "it has no folder"
            reason = short(printable(str(answer.get("error", unread))), _MOST_REASON)
            step = FailedStep(answer.get("step", FailedStep.SEARCH.value))
            self._change(run, over="failed", step=step, reason=reason)
            self.changed(f"{run.name}: failed: {step}: {reason}")
            return step
        now, stop = BudgetUsed.of(after), Stop(answer["stop"])
        used = Slice(
            now.judged - spent.judged,
            seconds,
            now.dollars - spent.dollars,
            gain_since(after, records),
        )
        if stop is Stop.INTERRUPTED:
            raise KeyboardInterrupt
        if stop is Stop.NO_SEED:
            self._change(
                run, last=used, over=stop.value, step=FailedStep.SEED, reason="no seed passed"
            )
            self.changed(f"{run.name}: failed: seed: no seed passed")
            return FailedStep.SEED
        # Its first share of the time or money may have been too small for any evaluation.
        first_share = found.shared and run.last is None and stop in (Stop.TIME, Stop.COST)
        may_go_on = used.evaluations or first_share
        ended = stop.value if stop in _ENDED or not may_go_on else ""
        self._change(run, last=used, over=ended)
        ended = f"; it ended: {ended}" if ended else ""
        cost = f" for ${used.dollars:.2f}" if used.dollars else ""
        self.changed(
            f"{run.name}: {plural(used.evaluations, 'evaluation')} in {used.seconds:.0f} s{cost}, "
            f"gain {100 * math.expm1(used.gain):+.1f} %{ended}"
        )
        return None

    def _others(self, run: CampaignRun) -> list[tuple[str, History]]:
        """The other runs of its task whose kernels fit its device."""
        kind = run.device == "cpu"
        found = [
            (r.run, self._read(r))
            for r in self.campaign.runs
            if r.name != run.name and r.task == run.task and (r.device == "cpu") is kind
        ]
        return [(name, history) for name, history in found if history is not None]

    # -- final races -------------------------------------------------------------------------------

    def _race(self, problem: Problem) -> None:
        runs = self.campaign.runs_of(problem)
        if not any(r.run or r.step for r in runs):
            self.changed(f"{problem.name}: not begun: nothing was left for it")
            return  # it waits, for `--resume` with more
        read = [(r.run, h) for r in runs if (h := self._read(r)) is not None]
        finalists = finalists_of(read)
        if not finalists:
            failed = next((r for r in runs if r.step is not None), None)
            step = failed.step if failed is not None else FailedStep.SEARCH
            reason = failed.reason if failed is not None else "no run has a kernel that passed"
            self._fail(problem, step or FailedStep.SEARCH, reason)
            return
        began, before = time.monotonic(), self.campaign.of(problem).seconds
        self._keep(lambda c: c.noted(problem, state=ProblemState.BEGUN))

        def tell(line: Answer) -> None:
            if "run" in line:
                self._keep(lambda c: c.noted(problem, run=line["run"]))
            if "doing" in line:
                self.say(problem.name, f"final race of {len(finalists)}, {line['doing']}")

        store, _ = read_history(self.folder / RUNS / read[0][0])
        target = store.manifest.target
        begun = self.campaign.of(problem).run
        limits = {"seed": 0, "judges": self._race_judges(self._device(problem))}
        answer = self._ask(runs[0], limits, begun, finalists, target, tell)
        self.say(problem.name, "")
        seconds = before + time.monotonic() - began
        self._keep(lambda c: c.noted(problem, seconds=seconds))
        if "error" in answer:
            self._fail(
                problem, FailedStep(answer.get("step", FailedStep.SEARCH.value)), answer["error"]
            )
            return
        if answer["stop"] == Stop.INTERRUPTED.value:
            raise KeyboardInterrupt
        folder = self.folder / RUNS / self.campaign.of(problem).run
        race = read_history(folder)[1].race
        if race is None or race.winner is None:
            self._fail(problem, FailedStep.SEARCH, NO_FINALIST)
            return
        self._keep(lambda c: c.noted(problem, state=ProblemState.DONE))
        self.changed("")

    def _fail(self, problem: Problem, step: FailedStep, reason: str) -> None:
        text = short(printable(reason), _MOST_REASON)
        self._keep(lambda c: c.noted(problem, state=ProblemState.FAILED, step=step, reason=text))
        self.changed(f"{problem.name}: final race failed: {step}: {text}")

    # -- record and processes ----------------------------------------------------------------------

    def _read(self, run: CampaignRun) -> History | None:
        """A run's history; None before it has one."""
        if not run.run:
            return None
        folder = self.folder / RUNS / run.run
        try:
            return read_history(folder)[1]
        except RunError as e:
            if not run.step:
                text = short(printable(str(e)), _MOST_REASON)
                self._change(run, over="failed", step=FailedStep.SEARCH, reason=text)
            return None

    def _change(self, run: CampaignRun, /, **changes: Any) -> None:
        self._keep(lambda c: c.changed(run, **changes))

    def _keep(self, change: Callable[[Campaign], Campaign]) -> None:
        """Write what a change makes of the campaign, with its time."""
        with self._lock:
            now = time.monotonic()
            campaign = change(self.campaign)
            seconds = campaign.seconds + now - self._noted_s
            self.campaign, self._noted_s = replace(campaign, seconds=seconds), now
            write_record(self.folder, self.campaign)

    def _ask(
        self,
        run: CampaignRun,
        limits: Mapping[str, object],
        begun: str,
        elites: list[Migrant],
        target: str,
        tell: Tell,
    ) -> Answer:
        """The answer of a worker. With a `target`, the elites race; else a slice is spent.

        Raises:
            KeyboardInterrupt: The campaign is stopping; the worker has ended, and kept what it had.
            ModelError: A model cannot be asked.
        """
        config = {**run.options, **self.options, **limits, "runs": str(self.folder / RUNS)}
        request = {
            "task": run.task,
            "device": run.device,
            "config": config,
            "run": str(self.folder / RUNS / begun) if begun else "",
            "elites": [to_json(e) for e in elites],
            "race": bool(target),
            "target": target,
        }
        return self._workers.ask(request, tell)


def _finish(futures: Sequence[Future[None]]) -> None:
    """Wait for all; raise the first error at once."""
    for future in as_completed(futures):
        future.result()
