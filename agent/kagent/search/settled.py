"""Whether a search has anything left to gain."""

from __future__ import annotations

import random

from kagent_sandbox.data.verdict import Passed

from kagent.runs.ask import Setting
from kagent.runs.lineage import Candidate, Lineage, Operator
from kagent.search.tunables import read_tunables
from kagent.search.tuner import known_configs

ROOM = 0.01  # share of each case's time that is left to the roofline where there is nothing to gain
EXPECTED = (
    0.0015  # log speed-up that is expected of the best untried constants: no interval shows it
)
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
    constants = set(setting.operators) <= {Operator.TUNE, Operator.RECOMBINE}
    return constants and lineage.counted >= FEWEST and _expected(setting, lineage) < EXPECTED


def _is_at_the_roofline(incumbent: Candidate) -> bool:
    verdict = incumbent.verdict
    timings = verdict.timings if isinstance(verdict, Passed) else ()
    return bool(timings) and all(t.roofline_share > 1 - ROOM for t in timings)


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
