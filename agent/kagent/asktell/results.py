"""Results of answers, and the best of a run, as programs see them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from kagent_sandbox.data.verdict import Passed, Rejected, Verdict

from kagent.asktell.answers import Accepted
from kagent.asktell.state import Precheck, read_state
from kagent.runs.history import History
from kagent.runs.store import RunStore


@dataclass(frozen=True, slots=True)
class Result:
    """The result of an answer. `str(result)` describes it in a line."""

    id: int
    """Id of the candidate that the answer is."""
    ask: int | None
    """Number of the ask that it answers; None for a kernel that nobody asked for."""
    again: bool
    """Whether it had been told before, so that nothing was added."""
    fault: str
    """Reason why the reply holds no kernel; empty if it holds one."""
    verdict: Verdict | None
    """The judge's verdict; None while it is queued."""
    speed_up: float | None
    """Ratio to the best of torch; None if it was rejected or is not judged."""
    looked: Precheck | None
    """Precheck of a queued answer: whether it builds and, as far as it was run, computes the right
    values.
    """
    promoted: bool
    """Whether it is the best now."""

    @property
    def passed(self) -> bool:
        """Whether it is correct and was timed."""
        return isinstance(self.verdict, Passed)

    def __str__(self) -> str:
        return f"#{self.id}: {self._became()}{' (told before)' if self.again else ''}"

    def _became(self) -> str:
        found = self.looked.rejected if self.looked is not None else None
        rejected = self.verdict if isinstance(self.verdict, Rejected) else found
        if rejected is not None:
            return f"{rejected.stage} {rejected.status}: {rejected.message}"
        if self.speed_up is not None:
            best = ", the best so far" if self.promoted else ""
            return f"{self.speed_up:.3f}× the best of torch{best}"
        if self.fault:
            return f"NO_KERNEL: {self.fault}"
        if self.looked is None:
            return "waits for a judge"
        right = f", right in {self.looked.where}" if self.looked.interpreted else ""
        return f"builds for {self.looked.target}{right}, waits for a judge"


@dataclass(frozen=True, slots=True)
class Best:
    """The fastest correct candidate of a run. Its text form says which, and how fast."""

    id: int
    """Id of the candidate."""
    name: str
    """Name of the seed that it descends from."""
    source: str
    """Text of the kernel file."""
    path: Path
    """The kernel file in the run's folder."""
    speed_up: float
    """Ratio to the best of torch, as the search has it. The final race decides."""
    verdict: Passed
    """The judge's verdict, with the times of every case."""

    def __str__(self) -> str:
        return f"#{self.id} {self.name}: {self.speed_up:.3f}× the best of torch, {self.path}"


def result_of(accepted: Accepted, history: History) -> Result:
    """Return the result of an accepted answer."""
    lineage = history.lineage
    verdict = lineage[accepted.id].verdict if accepted.id < len(lineage) else None
    passed, best = isinstance(verdict, Passed), lineage.incumbent
    return Result(
        id=accepted.id,
        ask=accepted.ask,
        again=accepted.again,
        fault=accepted.fault,
        verdict=verdict,
        speed_up=math.exp(lineage.log_speed(accepted.id)) if passed else None,
        looked=read_state(history).looked.get(accepted.id),
        promoted=best is not None and best.id == accepted.id,
    )


def best_of(store: RunStore, history: History) -> Best | None:
    """The incumbent."""
    found = history.lineage.incumbent
    if found is None or not isinstance(found.verdict, Passed):
        return None
    proposal = found.proposal
    return Best(
        id=found.id,
        name=proposal.name,
        source=proposal.source,
        path=store.kernel_path(proposal.kernel),
        speed_up=math.exp(history.lineage.log_speed(found.id)),
        verdict=found.verdict,
    )
