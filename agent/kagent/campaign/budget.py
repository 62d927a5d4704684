"""Choice of the run that gets the next slice of the budget. Pure: it depends on the runs' folders
alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kagent.campaign.record import Campaign, CampaignRun, Slice
from kagent.runs.events import Stop
from kagent.runs.history import History
from kagent.runs.lineage import Operator

_GIVEN = (Operator.SEED, Operator.MIGRATE)
"""Operators of what a run begins with, or is given."""


@dataclass(frozen=True, slots=True)
class BudgetUsed:
    """Budget that one run has used.

    Attributes:
        judged: Evaluations with a verdict.
        waiting: Charged proposals without one, of a session that was ended: judged next.
        dollars: Cost of models.
    """

    judged: int = 0
    waiting: int = 0
    dollars: float = 0.0

    @classmethod
    def of(cls, history: History) -> BudgetUsed:
        """Budget that a run has used, from its history."""
        return cls(history.lineage.counted, history.waiting, history.spent.dollars)

    @property
    def evaluations(self) -> int:
        """Evaluations that nobody else may use."""
        return self.judged + self.waiting


@dataclass(frozen=True, slots=True)
class Next:
    """The next slice.

    Attributes:
        run: The run that gets it.
        budget: The run's budget until the slice is over, all earlier ones included.
        max_time: Most seconds of its search; None: no limit.
        max_cost: Most dollars of the run, all earlier slices included; None: no limit.
        shared: Whether others keep a part of the time or money that is left.
    """

    run: CampaignRun
    budget: int
    max_time: float | None
    max_cost: float | None
    shared: bool = False


def limit_of(campaign: Campaign, spent: Mapping[str, BudgetUsed]) -> Stop:
    """The limit over all runs that is reached; the budget, which ends a campaign, if none is."""
    dollars = sum(spent[r.name].dollars for r in campaign.runs)
    if campaign.settings.max_time is not None and _left(campaign) == 0:
        return Stop.TIME
    if campaign.max_cost is not None and dollars >= campaign.max_cost:
        return Stop.COST
    return Stop.BUDGET


def next_slice(
    campaign: Campaign,
    spent: Mapping[str, BudgetUsed],
    places: Mapping[str, int] | None = None,
    busy: Collection[Next] = (),
) -> Next | None:
    """The slice that is spent next; None where nothing is left to spend, or nothing to spend it on.

    Every run gets its first slice. Then the run is next whose last slice gained most per cost; of
    equals, the one with the fewest evaluations.

    Args:
        campaign: The campaign.
        spent: By the runs' names, what each has used up.
        places: Slices of each device that may be spent at once; one of each if None.
        busy: Slices that are being spent. What they may use is used up for all others.
    """
    spent = {**spent, **{n.run.name: _reserved(spent[n.run.name], n) for n in busy}}
    room = {d: (places or {}).get(d, 1) for d in campaign.devices}
    at_once = sum(room.values())
    for each in busy:
        room[each.run.device] -= 1
    used = sum(spent[r.name].evaluations for r in campaign.runs)
    dollars = sum(spent[r.name].dollars for r in campaign.runs)
    left_s = None if campaign.settings.max_time is None else _left(campaign)
    left_dollars = None if campaign.max_cost is None else campaign.max_cost - dollars
    if limit_of(campaign, spent) is not Stop.BUDGET:
        return None
    at_work = {n.run.name for n in busy}
    open_runs = [r for r in campaign.runs if not r.over and r.name not in at_work]
    first = [r for r in open_runs if r.last is None]
    size = campaign.slice_evaluations
    owed = {r.name: max(0, size - spent[r.name].evaluations) for r in first}

    def most(run: CampaignRun) -> int:
        """Evaluations that the run may be given now, besides those that wait."""
        free = campaign.settings.budget - used
        others = sum(n for name, n in owed.items() if name != run.name)
        return max(0, min(owed.get(run.name) or size, free - others))

    able = [r for r in open_runs if room[r.device] > 0 and (most(r) or spent[r.name].waiting)]
    if not able:
        return None

    def order(run: CampaignRun) -> tuple[bool, float, int]:
        rate = 0.0 if run.last is None else gain_per_cost(campaign, run.last)
        return run.last is not None, -rate, spent[run.name].evaluations

    run = min(able, key=order)
    # Time and money are shared, so that each gets some.
    sharing = len(first) if run.last is None else 1
    rounds = math.ceil(sharing / at_once)
    sharing = max(sharing, at_once - len(busy))
    own = spent[run.name]
    return Next(
        run,
        own.evaluations + most(run),
        None if left_s is None else left_s / rounds,
        None if left_dollars is None else own.dollars + left_dollars / sharing,
        shared=(left_s is not None and rounds > 1) or (left_dollars is not None and sharing > 1),
    )


def _reserved(spent: BudgetUsed, busy: Next) -> BudgetUsed:
    """Budget that a run may have used when its slice is over."""
    dollars = spent.dollars if busy.max_cost is None else max(spent.dollars, busy.max_cost)
    return BudgetUsed(max(spent.judged, busy.budget), 0, dollars)


def gain_per_cost(campaign: Campaign, spent: Slice) -> float:
    """Gain of a slice over its cost: the largest share that it used up of one of the budgets."""
    shares = [spent.evaluations / campaign.settings.budget]
    if campaign.settings.max_time is not None:
        shares.append(spent.seconds / campaign.settings.max_time)
    if campaign.max_cost is not None:
        shares.append(spent.dollars / campaign.max_cost)
    return max(0.0, spent.gain) / max(1e-9, *shares)


def gain_since(history: History, records: int) -> float:
    """Logarithm of the best kernel's speed-up over the best one of the first `records` records, and
    over seeds and candidates of other runs that came since: those are no gain of this run's.
    """
    lineage = history.lineage
    best = lineage.incumbent
    if best is None:
        return 0.0
    given = [i + 1 for i, c in enumerate(lineage) if c.proposal.operator in _GIVEN]
    before = lineage.as_of(max(records, *given))
    if before.incumbent is None:
        return 0.0
    gain = lineage.log_speed(best.id) - before.log_speed(before.incumbent.id)
    return gain if math.isfinite(gain) else 0.0


def _left(campaign: Campaign) -> float:
    return max(0.0, (campaign.settings.max_time or 0.0) - campaign.seconds)
