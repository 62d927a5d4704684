"""The final race: who takes part, and who has won. The judge runs it, on cases that nobody has
seen.

Scores of a search are the best of many noisy measurements on cases that were tuned for, and so a
little too good. Only the race's figures are reported as a run's result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kagent_sandbox.data.race import BEST_OF_TORCH, Race
from kagent_sandbox.data.verdict import Comparison, Passed, SpeedVerdict

from kagent.runs.lineage import PROMOTION, Candidate, Lineage

MOST = 3
CLOSE = 0.02  # log speed-up below the incumbent's at which a race can still turn out otherwise


@dataclass(frozen=True, slots=True)
class Repeat:
    """The final race once more, on another device of the run."""

    unit: str
    race: Race


@dataclass(frozen=True, slots=True)
class FinalRace:
    """The entrants, the incumbent first, and the result. `winner` is None if all of them failed.

    `repeats` show whether the result holds on another device; they decide nothing.
    """

    finalists: tuple[int, ...]
    winner: int | None
    race: Race
    repeats: tuple[Repeat, ...] = ()

    @property
    def versus_torch(self) -> Comparison | None:
        """The winner beside the best of torch, over all hidden cases; None where there is none."""
        return None if self.winner is None else self.race.versus_torch(str(self.winner))

    @property
    def verdict(self) -> SpeedVerdict | None:
        """The run's verdict; None where no finalist, or no baseline, ran on every case."""
        found = self.versus_torch
        return None if found is None else found.verdict


def choose_finalists(lineage: Lineage) -> list[Candidate]:
    """The incumbent, and those whose measured score is close enough to be as good as it."""
    elites = lineage.elites(8)
    if not elites:
        return []
    incumbent = elites[0]
    limit = lineage.log_speed(incumbent.id) - CLOSE
    close = [
        c
        for c in elites[1:]
        if lineage.log_speed(c.id) > limit - max(0.0, 2 * _stderr(c) - CLOSE)
        and (not c.facts or not incumbent.facts or c.facts.work_hash != incumbent.facts.work_hash)
    ]
    return [incumbent, *close][:MOST]


def winner(race: Race, finalists: Sequence[Candidate]) -> int | None:
    """The incumbent, unless another one was faster beyond doubt, or it failed on the hidden
    cases.
    """
    ran = [c.id for c in finalists if str(c.id) in race.overall]
    if not ran:
        return None
    if ran[0] != finalists[0].id:
        return max(ran, key=lambda i: _against(race, i, BEST_OF_TORCH).ratio)
    faster = {i: _against(race, i, str(ran[0])) for i in ran[1:]}
    clear = [i for i, comparison in faster.items() if comparison.p_faster > PROMOTION]
    return max(clear, key=lambda i: faster[i].ratio, default=ran[0])


def _against(race: Race, candidate_id: int, against: str) -> Comparison:
    comparisons = {c.against: c for c in race.overall[str(candidate_id)]}
    return comparisons.get(against, Comparison(against, 0.0, 0.0, 0.0, 0.0))


def _stderr(candidate: Candidate) -> float:
    return candidate.verdict.score_stderr if isinstance(candidate.verdict, Passed) else 0.0
