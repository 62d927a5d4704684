"""A campaign's runs as a table: in the terminal, on its page, and for programs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kagent_sandbox.errors import RunError
from rich.text import Text

from kagent.campaign.budget import BudgetUsed
from kagent.campaign.record import Campaign, CampaignRun
from kagent.runs.lineage import Operator
from kagent.runs.store import read_history
from kagent.suite.record import RUNS
from kagent.ui.live import clock, speed_text
from kagent.ui.table import Column, TextTable

COLUMNS = (
    Column("run"),
    Column("state"),
    Column("evaluated", right=True),
    Column("from other runs", right=True, drop=3),
    Column("best so far, × torch", right=True),
    Column("last gain", right=True, drop=1),
    Column("cost", right=True),  # left out where nothing costs
    Column("time", right=True, drop=2),
)
_COST = 6
ESTIMATES = (
    "The best so far is the search's own estimate on visible cases. Only the final race's figures "
    "are results"
)


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run, and what its folder says.

    Attributes:
        run: The run.
        evaluated: Evaluations with a verdict.
        migrated: Candidates of other runs among its candidates.
        best: Estimated speed-up over the best of torch; 0 where nothing has passed.
        elapsed_s: Working time of its sessions.
        dollars: Cost of models.
        at_work: Whether a slice is being spent on it.
    """

    run: CampaignRun
    evaluated: int = 0
    migrated: int = 0
    best: float = 0.0
    elapsed_s: float = 0.0
    dollars: float = 0.0
    at_work: bool = False

    @property
    def state(self) -> str:
        """'waiting', 'at work', 'open' (more slices may come), why it ended, or what failed."""
        if self.at_work:
            return "at work"
        if self.run.step is not None:
            return f"failed: {self.run.step}"
        return self.run.over or ("open" if self.run.run else "waiting")

    @property
    def gain(self) -> str:
        """'+1.2 %', the last slice's; nothing before the first one is over."""
        last = self.run.last
        return "" if last is None else f"{100 * math.expm1(last.gain):+.1f} %"

    @property
    def cells(self) -> tuple[str, ...]:
        """As `COLUMNS` has them."""
        return (
            self.run.name,
            self.state,
            str(self.evaluated),
            str(self.migrated),
            speed_text(self.best),
            self.gain,
            f"${self.dollars:.2f}" if self.dollars else "–",
            clock(self.elapsed_s),
        )


@dataclass(frozen=True, slots=True)
class Runs:
    """A campaign's runs as a table: headers, and the cells of each run."""

    rows: Sequence[RunRow]
    columns: Sequence[Column]
    cells: Sequence[Sequence[str]]

    @classmethod
    def of(cls, rows: Sequence[RunRow]) -> Runs:
        """The table of rows; without a column of costs where nothing costs."""
        kept = [i for i in range(len(COLUMNS)) if i != _COST or any(r.dollars for r in rows)]
        return cls(rows, [COLUMNS[i] for i in kept], [[r.cells[i] for i in kept] for r in rows])


def runs_of(folder: Path, campaign: Campaign, at_work: Collection[str] = ()) -> Runs:
    """All runs of a campaign.

    Args:
        folder: The campaign's folder.
        campaign: The campaign.
        at_work: Names of the runs that a slice is being spent on.
    """
    return Runs.of([replace(_row(folder, r), at_work=r.name in at_work) for r in campaign.runs])


def _row(folder: Path, run: CampaignRun) -> RunRow:
    if not run.run:
        return RunRow(run)
    try:
        _, history = read_history(folder / RUNS / run.run)
    except RunError:  # it says so as the reason of its failure, once work on it goes on
        return RunRow(run)
    lineage, best = history.lineage, history.lineage.incumbent
    return RunRow(
        run,
        BudgetUsed.of(history).judged,
        sum(c.proposal.operator is Operator.MIGRATE for c in lineage),
        0.0 if best is None else math.exp(lineage.log_speed(best.id)),
        history.elapsed_s,
        history.spent.dollars,
    )


def runs_table(runs: Runs) -> TextTable:
    """The table of runs for a terminal."""
    table = TextTable(runs.columns)
    for row, (name, state, *cells) in zip(runs.rows, runs.cells, strict=True):
        style = "red" if row.run.step is not None else "dim"
        table.add_row(Text(name, "bold"), Text(state, style), *cells)
    return table


def doing_lines(doing: Mapping[str, str]) -> list[str]:
    """Lines that say what is being done, one for each run and final race."""
    return [f"{name}: {text}" if name else text for name, text in doing.items()]


def spent_line(campaign: Campaign, rows: Sequence[RunRow]) -> str:
    """'12 of 20 evaluations, 1:20 of 5:00, $0.20 of $1.00'. A campaign that was resumed with less
    than it had used says that no more is spent.
    """
    given = campaign.settings
    used = sum(r.evaluated for r in rows)
    over = f"{used} evaluations (the budget is {given.budget} now: no more are made)"
    parts = [over if used > given.budget else f"{used} of {given.budget} evaluations"]
    limit = "" if given.max_time is None else f" of {clock(given.max_time)}"
    parts.append(f"{clock(campaign.seconds)}{limit}")
    dollars = sum(r.dollars for r in rows)
    if dollars or campaign.max_cost is not None:
        limit = "" if campaign.max_cost is None else f" of ${campaign.max_cost:.2f}"
        parts.append(f"${dollars:.2f}{limit}")
    return ", ".join(parts)
