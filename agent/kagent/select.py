"""What to try next: a pure function of the lineage, the run's seed and the proposal's id.

At the budgets that matter here (20 to 200 evaluations) strong pressure on the best and one
immediate repair of what failed explain nearly all of a search's gain over random sampling.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kagent_sandbox.verdict import Passed, Rejected, Status

from kagent.lineage import Candidate, Lineage, Operator
from kagent.propose import Brief, Setting

T = TypeVar("T")

INCUMBENT_SHARE = 0.7
POOL = 8
HOT, COLD = 0.1, 0.04  # temperature on log speed-up at the start and at the end of the budget
GAIN = 0.005  # log speed-up over its parent that counts as an operator's success
FLOOR = 0.05  # no operator's share falls below this: it may be late that it pays

REPAIRABLE = frozenset(Status) - {Status.DUPLICATE, Status.SUSPECT, Status.TAMPER}
REPAIR_TRIALS = 4  # repairs before their rate of success decides
REPAIR_RATE = 0.15


def select(
    setting: Setting, lineage: Lineage, proposal_id: int, pending: Sequence[Brief] = ()
) -> Brief:
    """The brief of a proposal. `pending` are the briefs of earlier proposals without a verdict.

    Raises:
        ValueError: Nothing has passed yet, so that there is no parent.
    """
    elites = lineage.elites(POOL)
    if not elites:
        raise ValueError("nothing to select from: no candidate passed")
    rng = random.Random(f"{setting.seed}/{proposal_id}/select")  # noqa: S311 - a search, not a secret
    progress = min(1.0, lineage.counted / max(1, setting.budget))
    failed = to_repair(lineage, pending) if Operator.REPAIR in setting.operators else None
    if failed is not None:
        operator, parent = Operator.REPAIR, failed
    else:
        operator = _draw(rng, operator_shares(lineage, setting.operators))
        parent = lineage[_draw(rng, parent_shares(lineage, elites, progress))]
    return Brief(setting, proposal_id, lineage, operator, parent, tuple(elites), progress)


def parent_shares(
    lineage: Lineage, elites: Sequence[Candidate], progress: float
) -> Mapping[int, float]:
    """Probability of each elite, by id, to be the parent. The first elite is the incumbent.

    The incumbent with `INCUMBENT_SHARE`; the rest by Boltzmann weights on log speed-up among all
    elites (the incumbent too), divided by √(1 + children): what was tried often has less left to
    give.
    """
    temperature = HOT + (COLD - HOT) * progress
    best = max(lineage.rank(c.id) for c in elites)
    weights = [
        math.exp((lineage.rank(c.id) - best) / temperature) / math.sqrt(1 + lineage.children(c.id))
        for c in elites
    ]
    total = sum(weights)
    shares = {c.id: (1 - INCUMBENT_SHARE) * w / total for c, w in zip(elites, weights, strict=True)}
    shares[elites[0].id] += INCUMBENT_SHARE
    return shares


@dataclass(frozen=True, slots=True)
class Arm:
    """What an operator has achieved so far."""

    tried: int
    successes: int
    seconds: float


def arms(lineage: Lineage, operators: Sequence[Operator]) -> Mapping[Operator, Arm]:
    """Trials, successes (better than the best parent) and seconds per operator."""
    counted = {o: [c for c in lineage if c.counts and c.proposal.operator is o] for o in operators}
    return {
        o: Arm(
            tried=len(candidates),
            successes=sum(_succeeded(lineage, c) for c in candidates),
            seconds=sum(c.cost_s for c in candidates),
        )
        for o, candidates in counted.items()
    }


def _succeeded(lineage: Lineage, candidate: Candidate) -> bool:
    verdict = candidate.verdict
    if not isinstance(verdict, Passed):
        return False
    before = max((lineage.log_speed(p) for p in candidate.proposal.parents), default=-math.inf)
    return lineage.log_speed(candidate.id) > before + max(GAIN, verdict.score_stderr)


def operator_shares(lineage: Lineage, operators: Sequence[Operator]) -> Mapping[Operator, float]:
    """Probability of each operator: its successes per second, smoothed, and never below `FLOOR`.

    Repairs are not drawn; they follow a failure (`to_repair`).
    """
    drawn = [o for o in operators if o is not Operator.REPAIR]
    stats = arms(lineage, drawn)
    tried = sum(a.tried for a in stats.values())
    typical_s = sum(a.seconds for a in stats.values()) / tried if tried else 1.0
    rates = {
        o: (a.successes + 1)
        / (a.tried + 2)
        / max(1e-3, a.seconds / a.tried if a.tried else typical_s)
        for o, a in stats.items()
    }
    total = sum(rates.values())
    return {o: FLOOR + (1 - FLOOR * len(drawn)) * r / total for o, r in rates.items()}


def to_repair(lineage: Lineage, pending: Sequence[Brief]) -> Candidate | None:
    """The latest failure that deserves its one repair: that of a good parent, not itself a
    repair.
    """
    arm = arms(lineage, [Operator.REPAIR])[Operator.REPAIR]
    if arm.tried >= REPAIR_TRIALS and arm.successes < REPAIR_RATE * arm.tried:
        return None
    good = {c.id for c in lineage.elites(POOL)}
    under_way = {b.parent.id for b in pending if b.operator is Operator.REPAIR}
    for candidate in reversed(list(lineage)):
        verdict, proposal = candidate.verdict, candidate.proposal
        if (
            isinstance(verdict, Rejected)
            and verdict.status in REPAIRABLE
            and proposal.operator not in (Operator.REPAIR, Operator.SEED)
            and good.intersection(proposal.parents)
            and not lineage.children(candidate.id)
            and candidate.id not in under_way
        ):
            return candidate
    return None


def _draw(rng: random.Random, shares: Mapping[T, float]) -> T:
    return rng.choices(list(shares), weights=list(shares.values()))[0]
