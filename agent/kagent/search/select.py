"""Selection of the next attempt: a pure function of the lineage, the run's seed and the proposal's
id.

At the budgets that matter here (20 to 200 evaluations) strong pressure on the best and one
immediate repair of what failed explain nearly all of a search's gain over random sampling.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from kagent_sandbox.data.verdict import Passed, Rejected, Status

from kagent.runs.ask import Ask, AskRecord, Setting
from kagent.runs.lineage import FREE, Candidate, Lineage, Operator, Proposal, assumed

T = TypeVar("T")

INCUMBENT_SHARE = 0.7
POOL = 8
HOT, COLD = 0.1, 0.04  # temperature on log speed-up at the start and at the end of the budget
GAIN = 0.005  # log speed-up over its parent that counts as an operator's success
FLOOR = 0.05  # no operator's share falls below this: it may be late that it pays

REPAIRABLE = frozenset(Status) - {
    Status.DUPLICATE,
    Status.SUSPECT,
    Status.TAMPER,
    Status.NO_KERNEL,  # there is no file to mend
}
MOST_REPAIRS = (
    4  # in a chain: a first kernel of a new kind fails to compile, then is wrong, then hangs
)
REPAIR_TRIALS = 4  # chains of repairs before their rate of success decides
REPAIR_RATE = 0.15


KICKED_FROM = 100  # evaluations before which no search is kicked
IDLE = 40  # evaluations without a gain after which it is
KICK_IDEAS = 3
ROOM = 0.05  # share of the time above the roofline at which two ideas are asked for at once

UNTIMED = (Operator.STRUCTURE, Operator.REWRITE, Operator.CROSSOVER)
"""Operators that can be asked for before anything was timed: constants are not to be guessed."""


def select(
    setting: Setting,
    lineage: Lineage,
    number: int,
    pending: Sequence[Ask] = (),
    seeds: Sequence[Proposal] = (),
) -> Ask:
    """Decide on ask `number`.

    Args:
        setting: Facts of the run.
        lineage: The lineage as it stands.
        number: Number of the ask.
        pending: Earlier asks without a verdict.
        seeds: The run's seeds, for asks while nothing has passed.

    Raises:
        ValueError: Nothing has passed, and no seed waits for its verdict: there is no parent.
    """
    elites, ideas = _ground(setting, lineage)
    if not elites:
        return _untimed(setting, _with_assumed(lineage, seeds), number)
    rng = random.Random(f"{setting.seed}/{number}/select")  # noqa: S311 - a search, not a secret
    progress = progress_of(lineage, setting.budget)
    failed = None
    if Operator.REPAIR in setting.operators:
        failed = to_repair(lineage, pending, elites)
    if failed is not None:
        operator, parent = Operator.REPAIR, failed
    elif ideas == KICK_IDEAS:
        operator, parent = Operator.STRUCTURE, elites[0]
    else:
        operator = _draw(rng, operator_shares(lineage, setting.operators))
        parent = lineage[_draw(rng, parent_shares(lineage, elites, progress))]
    return Ask(setting, number, lineage, operator, parent, tuple(elites), progress, ideas=ideas)


def kicked_at(lineage: Lineage) -> int | None:
    """Length of the lineage at which the latest kick was due; None where there was none.

    From `KICKED_FROM` evaluations on, `IDLE` of them without a gain are a reason to begin again
    somewhere else: with several ideas at once in the incumbent, and then from what came of it. A
    gain is a new incumbent, or in a line that was kicked a new best of its own. The incumbent
    itself stays: what is kicked has to beat it.
    """
    promoted = {c.id for c in lineage.promotions}
    start: int | None = None
    best, idle, counted = -math.inf, 0, 0
    for candidate in lineage:
        counted += candidate.counts
        idle += candidate.counts
        log = lineage.rank(candidate.id)
        if candidate.id in promoted:
            start = None
        if candidate.id in promoted or (start is not None and log > best + GAIN):
            best, idle = log, 0
        if counted >= KICKED_FROM and idle >= IDLE:
            start, best, idle = candidate.id + 1, -math.inf, 0
    return start


def _ground(setting: Setting, lineage: Lineage) -> tuple[list[Candidate], int]:
    """Candidates that parents are chosen among, the first one preferred, and the techniques to ask
    for in one proposal: two while the incumbent is more than `ROOM` above its roofline in some
    case, `KICK_IDEAS` in a kick.
    """
    elites = lineage.elites(POOL)
    start = kicked_at(lineage) if Operator.STRUCTURE in setting.operators else None
    if start is not None:
        # What was timed little is in it, too: it is all behind the incumbent.
        line = [c for c in lineage.passed() if c.id >= start]
        if not line:
            return elites[:1], KICK_IDEAS
        elites = line[:POOL]
    incumbent = lineage.incumbent
    verdict = incumbent.verdict if incumbent is not None else None
    timings = verdict.timings if isinstance(verdict, Passed) else ()
    return elites, 2 if any(t.roofline_share < 1 - ROOM for t in timings) else 1


def _untimed(setting: Setting, lineage: Lineage, number: int) -> Ask:
    """Select while nothing was timed: neighbours take different seeds, and every seed all operators
    in turn.
    """
    elites = [c for c in lineage if c.is_assumed]
    if not elites:
        raise ValueError("nothing to select from: no candidate passed")
    fitting = [o for o in UNTIMED if o is not Operator.CROSSOVER or len(elites) > 1]
    operators = [o for o in fitting if o in setting.operators] or [Operator.STRUCTURE]
    turn, place = divmod(number, len(elites))
    elites = elites[place:] + elites[:place]
    operator = operators[(turn + place) % len(operators)]
    return Ask(setting, number, lineage, operator, elites[0], tuple(elites), 0.0)


def _with_assumed(lineage: Lineage, seeds: Sequence[Proposal]) -> Lineage:
    """The lineage, continued with the seeds that have no verdict in it."""
    return Lineage([*lineage, *(assumed(s) for s in seeds if s.id >= len(lineage))])


def restored_ask(
    setting: Setting, lineage: Lineage, ask: AskRecord, seeds: Sequence[Proposal] = ()
) -> Ask:
    """The ask of a stored ask, from the run's lineage as it is now; `seeds` as in `select`."""
    before = lineage.as_of(ask.seen)
    setting = replace(setting, budget=ask.budget)
    elites, ideas = _ground(setting, before)
    if not elites:
        return _untimed(setting, _with_assumed(before, seeds), ask.number)
    progress = progress_of(before, ask.budget)
    parent = before[ask.parent]
    # Earlier versions put asks for what the loop itself does now.
    operator = Operator.STRUCTURE if ask.operator in FREE else ask.operator
    return Ask(setting, ask.number, before, operator, parent, tuple(elites), progress, ideas=ideas)


def progress_of(lineage: Lineage, budget: int) -> float:
    """Share of the budget that is used up, 0 to 1."""
    return min(1.0, lineage.counted / max(1, budget))


def parent_shares(
    lineage: Lineage, elites: Sequence[Candidate], progress: float
) -> Mapping[int, float]:
    """Return each elite's probability, by id, to be the parent. The first elite is the incumbent.

    The incumbent has `INCUMBENT_SHARE`. The rest is shared by Boltzmann weights on log speed-up
    among all elites (the incumbent too), divided by √(1 + children): a parent that was tried often
    has less left to give.

    Args:
        lineage: The lineage as it stands.
        elites: The incumbent and the best others.
        progress: Share of the budget that is used.
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
    """Achievements of an operator so far."""

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

    Repairs are not drawn: they follow a failure (`to_repair`). Nor is what needs nobody
    (`kagent.runs.lineage.FREE`).
    """
    drawn = [o for o in operators if o is not Operator.REPAIR and o not in FREE]
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


def to_repair(
    lineage: Lineage, pending: Sequence[Ask], parents: Sequence[Candidate] = ()
) -> Candidate | None:
    """The latest failure that deserves a repair: of what a good parent led to. A repair that fails
    is repaired, too, up to `MOST_REPAIRS` in a chain, while its error is another one.

    Args:
        lineage: The lineage as it stands.
        pending: Earlier asks without a verdict.
        parents: Good parents beside the elites: those of a line that was kicked.

    Returns:
        The failure, or None where there is none, or repairs do not succeed.
    """
    ended = [c for c in lineage if _is_repair(c) and c.counts and not _goes_on(lineage, c)]
    mended = sum(isinstance(c.verdict, Passed) for c in ended)
    if len(ended) >= REPAIR_TRIALS and mended < REPAIR_RATE * len(ended):
        return None
    good = {c.id for c in (*lineage.elites(POOL), *parents)}
    under_way = {b.parent.id for b in pending if b.operator is Operator.REPAIR}
    for candidate in reversed(list(lineage)):
        verdict, proposal = candidate.verdict, candidate.proposal
        if (
            isinstance(verdict, Rejected)
            and verdict.status in REPAIRABLE
            and proposal.operator is not Operator.SEED
            and (base := lineage.base(candidate.id)) is not None
            and good.intersection((base.id, *proposal.parents))
            and _may_go_on(lineage, candidate)
            and not lineage.children(candidate.id)
            and candidate.id not in under_way
        ):
            return candidate
    return None


def _is_repair(candidate: Candidate) -> bool:
    return candidate.proposal.operator is Operator.REPAIR


def _goes_on(lineage: Lineage, repair: Candidate) -> bool:
    """Whether a repair has failed and was repaired, or can be: the end of its chain decides."""
    verdict = repair.verdict
    if not isinstance(verdict, Rejected) or verdict.status not in REPAIRABLE:
        return False
    return lineage.children(repair.id) > 0 or _may_go_on(lineage, repair)


def _may_go_on(lineage: Lineage, failure: Candidate) -> bool:
    """Whether a failure is no repair, or one in a chain of fewer than `MOST_REPAIRS` that fails
    otherwise than all before it: at another stage, or with another error.
    """
    chain = [failure]
    while _is_repair(chain[-1]):
        chain.append(lineage[chain[-1].proposal.parents[0]])
    errors = [
        (c.verdict.stage, c.verdict.status, c.verdict.message)
        for c in chain
        if isinstance(c.verdict, Rejected)
    ]
    return len(chain) <= MOST_REPAIRS and len(set(errors)) == len(chain)


def mate(ask: Ask) -> Candidate | None:
    """The elite that a crossover joins to the parent: the one that is ahead of it by most on some
    cases, another structure before one of the same; None where there is no second elite.
    """
    speed = ask.lineage.speed(ask.parent.id)
    ours = speed.cases if speed is not None else {}

    def ahead(candidate: Candidate) -> tuple[bool, float, int]:
        theirs = ask.lineage.speed(candidate.id)
        gains = [log - ours.get(case, log) for case, log in theirs.cases.items()] if theirs else []
        other = candidate.proposal.name != ask.parent.proposal.name
        return other, sum(g for g in gains if g > 0), -candidate.id

    others = [c for c in ask.elites if c.id != ask.parent.id]
    return max(others, key=ahead, default=None)


def _draw(rng: random.Random, shares: Mapping[T, float]) -> T:
    return rng.choices(list(shares), weights=list(shares.values()))[0]
