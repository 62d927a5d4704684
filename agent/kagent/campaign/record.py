"""campaign.json: what a campaign is, and how far each of its runs and final races has come.

What runs have measured is not in it: it stays in their folders. A kill loses none of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kagent.runs.events import Stop
from kagent.suite.problems import Problem, require_inside
from kagent.suite.record import FailedStep, ProblemState, Record

MOST_SLICE = 10
"""Evaluations of a slice, at most: after so many the best place for the next ones is asked anew."""


_LIMITS = (Stop.BUDGET.value, Stop.TIME.value, Stop.COST.value, Stop.TOKENS.value)


@dataclass(frozen=True, slots=True)
class Slice:
    """A slice of the budget, spent on one run.

    Attributes:
        evaluations: Charged evaluations.
        seconds: Wall clock, starting the judge included.
        dollars: Cost of models.
        gain: Logarithm of the best kernel's speed-up over the best one before.
    """

    evaluations: int
    seconds: float
    dollars: float
    gain: float


@dataclass(frozen=True, slots=True)
class CampaignRun:
    """One task on one device with one seed of all random decisions.

    Attributes:
        name: "softmax, cpu, seed 0".
        task: Folder of the task.
        device: As `--device` takes it.
        seed: Of all random decisions.
        target: Name of the problem that its finalists race for.
        options: Options of the run, by their names.
        run: Name of its folder in `runs/`; "" before there is one.
        last: The last slice that was spent on it; None before the first one is over.
        over: Why no slice is spent on it any more; "" if one may be.
        step: The step that failed; None if none did.
        reason: Why it failed.
    """

    name: str
    task: str
    device: str
    seed: int
    target: str
    options: Mapping[str, object]
    run: str = ""
    last: Slice | None = None
    over: str = ""
    step: FailedStep | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        require_inside(self.run)


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign(Record):
    """A campaign as its folder has it. Its problems are the final races: one per task and device.

    `settings.budget` and `settings.max_time` (seconds) are limits over all runs.

    Attributes:
        devices: As `--device` takes them.
        seeds: Runs of each task on each device.
        max_cost: Most dollars over all runs; None: no limit.
        runs: The runs.
        seconds: Working time so far.
    """

    FILE = "campaign.json"
    WHAT = "campaign"
    BEGIN = "kagent campaign"
    ITEM = "task"
    FAST = "ratio > {}×"

    devices: tuple[str, ...]
    seeds: int
    max_cost: float | None
    runs: tuple[CampaignRun, ...]
    seconds: float = 0.0

    @property
    def slice_evaluations(self) -> int:
        """Evaluations of a slice: the first slices of all runs take half of the budget."""
        return max(1, min(MOST_SLICE, self.settings.budget // (2 * len(self.runs))))

    @property
    def budget_text(self) -> str:
        """'20 evaluations over 5 runs, 90 s at most, $2.00 at most'."""
        given, count = self.settings, len(self.runs)
        text = f"{given.budget} evaluations over {count} run" + "s" * (count > 1)
        if given.max_time is not None:
            text += f", {given.max_time:g} s at most"
        return text + ("" if self.max_cost is None else f", ${self.max_cost:.2f} at most")

    @property
    def device_text(self) -> str:
        """'cpu, cuda:0'."""
        return ", ".join(self.devices)

    def changed(self, run: CampaignRun, /, **changes: Any) -> Campaign:
        """The campaign with changes to a run."""
        runs = (replace(r, **changes) if r.name == run.name else r for r in self.runs)
        return replace(self, runs=tuple(runs))

    def run(self, name: str) -> CampaignRun:
        """A run as it is now."""
        return next(r for r in self.runs if r.name == name)

    def runs_of(self, problem: Problem) -> tuple[CampaignRun, ...]:
        """The runs whose finalists race for a problem."""
        return tuple(r for r in self.runs if r.target == problem.name)

    def resumed(self) -> Campaign:
        """The campaign as it goes on: what the machine failed at is tried again, and so is what
        came to a limit, which may be another one now.
        """
        campaign = self.again()
        for run in self.runs:
            if run.step is FailedStep.MACHINE or run.over in _LIMITS:
                campaign = campaign.changed(run, over="", step=None, reason="")
        return campaign

    def race_again(self, problem: Problem) -> Campaign:
        """The campaign with a problem's final race still to come."""
        return self.noted(problem, state=ProblemState.BEGUN, run="", step=None, reason="")
