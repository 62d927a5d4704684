"""Whether a search has anything left to gain."""

from __future__ import annotations

import random
import statistics

from kagent_sandbox.data.verdict import Passed
from kagent_sandbox.judge.timing.metrics import ALARM_SHARE

from kagent.runs.ask import Setting
from kagent.runs.lineage import Candidate, Lineage, Operator, stderr_of
from kagent.search.tunables import read_tunables
from kagent.search.tuner import known_configs

ROOM = 0.01  # share of each case's time that is left to the roofline where there is nothing to gain
UNSEEN = 0.49  # expected gain that no interval shows, in standard errors of the run's comparisons
FEWEST = 8  # evaluations before constants are said to be settled


def nothing_to_gain(setting: Setting, lineage: Lineage) -> bool:
    """Whether the incumbent is within `ROOM` of the roofline in every case, or, where constants
    are all that is tried, no untried ones promise to beat it by what could be seen.
    """
    incumbent = lineage.incumbent
    if incumbent is None:
        return False
    if _is_at_the_roofline(incumbent):
        return True
    if not set(setting.operators) <= {Operator.TUNE, Operator.RECOMBINE}:
        return False
    stderr = _stderr(lineage)
    if stderr is None or lineage.counted < FEWEST:
        return False
    return _expected(setting, lineage) < UNSEEN * stderr


def _is_at_the_roofline(incumbent: Candidate) -> bool:
    """Whether it is within `ROOM` of it in every case. A share that is possible only in a cache, or
    where the ceilings were measured on a busier machine, does not say how much is left.
    """
    verdict = incumbent.verdict
    timings = verdict.timings if isinstance(verdict, Passed) else ()
    return bool(timings) and all(1 - ROOM < t.roofline_share <= ALARM_SHARE for t in timings)


def _stderr(lineage: Lineage) -> float | None:
    """Median standard error of comparisons with an incumbent, of log speed-ups; None before the
    first one.
    """
    found = [
        stderr_of(v.versus)
        for c in lineage
        if isinstance(v := c.verdict, Passed) and v.versus is not None and not v.screened
    ]
    return statistics.median(found) if found else None


def _expected(setting: Setting, lineage: Lineage) -> float:
    """Largest expected log speed-up over the incumbent of constants that were not tried."""
    assert lineage.incumbent is not None
    over = lineage.log_speed(lineage.incumbent.id)
    seen: set[str] = set()
    most = 0.0
    for candidate in lineage.passed():
        file = read_tunables(candidate.proposal.source)
        if file is None or file.size < 2 or file.family in seen:
            continue
        seen.add(file.family)
        rng = random.Random(f"{setting.seed}/settled")  # noqa: S311 - a search, not a secret
        search, untold = known_configs(file, lineage, rng)
        most = max(most, search.most_expected_gain(over, untold))
    return most
