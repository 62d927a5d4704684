"""Verdicts of several judges in one lineage.

Judges work side by side, so an incumbent may be promoted while a candidate is timed beside the one
before. Such a candidate may be the better one: it is timed again, beside the new one, before its
verdict is recorded. Whether it has a chance is estimated through the chain of comparisons.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist

from kagent_sandbox.data.verdict import Comparison, Passed, Verdict

from kagent.runs.lineage import Lineage, stderr_of

CHANCE = 0.05
"""P(faster than the new incumbent) above which a candidate is timed again."""
_Z = NormalDist().inv_cdf(0.975)


def wants_rematch(lineage: Lineage, verdict: Verdict) -> bool:
    """Whether a verdict that is next to be recorded has to be given again, beside the incumbent of
    now.

    Args:
        lineage: All candidates before it.
        verdict: Its verdict.
    """
    incumbent = lineage.incumbent
    if incumbent is None or not isinstance(verdict, Passed):
        return False
    versus = verdict.versus
    if versus is None:
        return True  # it was timed alone, and there is somebody to be timed beside
    if versus.against == str(incumbent.id):
        return False
    chance = chance_against(lineage, versus)
    return chance is None or (not verdict.screened and chance > CHANCE)


def chance_against(lineage: Lineage, versus: Comparison) -> float | None:
    """P(faster than the incumbent) of a candidate that was timed beside an earlier one; None where
    that one was withdrawn since, so that nothing connects the two.
    """
    chain = [c.id for c in lineage.promotions]
    earlier = int(versus.against)
    base, now = lineage.speed(earlier), lineage.speed(chain[-1])
    if base is None or now is None or earlier not in chain or versus.ratio <= 0:
        return None
    later = [lineage.speed(i) for i in chain[chain.index(earlier) + 1 :]]
    sd = math.hypot(stderr_of(versus), *(s.stderr for s in later if s is not None))
    ahead = base.log + math.log(versus.ratio) - now.log
    return NormalDist().cdf(ahead / sd) if sd > 0 else float(ahead > 0)


def widened(versus: Comparison, sd: float) -> Comparison:
    """A comparison as it holds for any device of the fleet.

    Args:
        versus: As it was measured on one of them.
        sd: Standard deviation of log(ratio) from device to device.
    """
    if sd <= 0 or versus.low <= 0:
        return versus
    log = math.log(versus.ratio)
    p = NormalDist(0.0, math.hypot(stderr_of(versus), sd)).cdf(log)
    return replace(
        versus,
        low=math.exp(log - math.hypot(log - math.log(versus.low), _Z * sd)),
        high=math.exp(log + math.hypot(math.log(versus.high) - log, _Z * sd)),
        p_faster=min(p, versus.p_faster) if log > 0 else max(p, versus.p_faster),
    )
