"""Comparison of a candidate with the incumbent, in blocks that alternate.

The times are analysed after each round. An interim analysis may drop the candidate, since that can
only lose it. It may call the candidate faster only if P(faster) is at least `CLEAR`; the last
analysis promotes at the usual threshold. On a CPU further pairs follow until the candidate is
clearly faster or hopeless. docs/measuring.md has the arithmetic.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kagent_sandbox.data.verdict import Comparison, Rejected, Stage, Status
from kagent_sandbox.errors import MachineError
from kagent_sandbox.judge.arena.session import CandidateRejected
from kagent_sandbox.judge.timing import estimates
from kagent_sandbox.judge.timing.noise import Noise

if TYPE_CHECKING:
    import random

    from kagent_sandbox.device.traits import Round, Traits
    from kagent_sandbox.judge.arena.session import LauncherSession
    from kagent_sandbox.judge.timing.blocks import TimedBlocks

_TYPICAL = 8  # samples of the incumbent that count together
LOSING_RATIO = 0.985
"""A candidate is timed no further if the interval of its ratio ends below this."""
FAR_RATIO = 0.9
"""Bound of the interval below which timing ends after the first round, when little is known."""
CLEAR = 0.999
"""A candidate needs no further pairs from this P(faster) on."""
HOPELESS = (0.1, 0.4, 0.7)
"""Further pairs are not worth it up to this P(faster), at the first, second and later analyses,
if the interval also ends below `WORTHWHILE`.
"""
WORTHWHILE = 1.04
"""A candidate is not hopeless while its interval reaches this ratio. On a busy host a kernel that
is faster by 5 % looks hopeless now and then, while little is known of it. benchmarks/looks.py shows
what these limits find and cost.
"""
FURTHER_S = 5.0
"""Seconds for further pairs, since other candidates wait. None is begun after that."""
PAUSES_S = (0.02, 0.02, 0.02)
"""Pauses in seconds before blocks whose times are no measurement are timed again."""
LONG_PAUSES_S = (0.5, 2.0, 5.0)
"""Further pauses in seconds if the incumbent's times are no measurement either. A neighbour takes
longer to leave than a glitch, and giving up ends the run.
"""


class UntimeableError(MachineError):
    """Samples of every kernel that was timed are no measurement."""

    def __init__(self, case: str, spread: str) -> None:
        self.case, self.spread = case, spread
        super().__init__(
            f"{case} cannot be timed: {spread}. Something else keeps this machine busy: end it, "
            "then resume the run"
        )


@dataclass
class IncumbentComparison:
    """The blocks of one candidate beside the incumbent, on every case."""

    timed_cases: Mapping[str, TimedBlocks]
    traits: Traits
    rng: random.Random
    noise: Noise
    notes: list[str] = field(default_factory=list)  # disturbances that the times show
    side: str = "a"  # the side that is or was timed: it is to blame for a failure
    _secret: dict[str, int] = field(default_factory=dict)

    @property
    def alone(self) -> bool:
        """Whether there is no incumbent beside the candidate."""
        return all(len(timed.blocks) == 1 for timed in self.timed_cases.values())

    def take(self, session: LauncherSession, suspect: Callable[[TimedBlocks], None]) -> bool:
        """Time blocks in ABBA order on every case. Return whether all were timed.

        A candidate that clearly loses is dropped early. One block of every case has its results
        checked; the choice is secret. `suspect` tests a case's times, right after its blocks.

        Raises:
            CandidateRejected: The candidate failed, was wrong, or its times cannot be true.
            MachineError: Nothing can be timed here.
        """
        schedule = self.traits.schedule
        self._secret = {name: self.rng.randrange(self._pairs) for name in self.timed_cases}
        session.wait_until_idle()
        for timing_round in schedule.rounds:
            last = timing_round is schedule.rounds[-1]
            for timed in self.timed_cases.values():
                self._round(timed, timing_round)
                if last:
                    self._repeat_disturbed(timed)
                    self.side = "a"
                    suspect(timed)
            limit = FAR_RATIO if timing_round is schedule.rounds[0] else LOSING_RATIO
            if not last and not self._alone and self._look().high < limit:
                self._verify_rest()
                return False
        more = None if self._alone else schedule.more(len(self.timed_cases))
        until = time.monotonic() + FURTHER_S
        for look in range(schedule.interim_looks):
            if more is None or time.monotonic() > until or decided(self._look(), look):
                break
            for timed in self.timed_cases.values():
                self._round(timed, more)
        self._verify_rest()
        self.notes += [n for t in self.timed_cases.values() for n in self._drift_notes(t)]
        return True

    def compare(self, against: str, *, resamples: int = estimates.RESAMPLES) -> Comparison:
        """Compare the candidate's times with the incumbent's, over all cases."""
        paired = {
            name: estimates.PairedSamples(tuple(t.blocks["a"]), tuple(t.blocks["b"]))
            for name, t in self.timed_cases.items()
        }
        seen = sum(len(d.a) - 1 for d in paired.values())
        noise = {
            name: self.noise.sd(
                statistics.median(d.a[0]),
                self.traits.noise,
                pairs=len(d.a),
                beside=seen - (len(d.a) - 1),
            )
            for name, d in paired.items()
        }
        rng = np.random.default_rng(len(paired))
        combined = estimates.combine(paired, rng, noise, resamples=resamples)
        interval = combined.ratio
        return Comparison(
            against, interval.value, interval.low, interval.high, combined.p_faster, combined.cases
        )

    @property
    def _alone(self) -> bool:
        return all(len(t.contenders) == 1 for t in self.timed_cases.values())

    @property
    def _pairs(self) -> int:
        return self.traits.schedule.pairs(len(self.timed_cases))

    def _round(self, timed: TimedBlocks, timing_round: Round) -> None:
        """Time some more pairs of blocks of one case."""
        done = len(timed.blocks["a"])
        order = estimates.abba(self._pairs)
        for side in order[2 * done : 2 * (done + timing_round.pairs)]:
            if side in timed.contenders:
                self.side = side
                checked = side == "a" and len(timed.blocks["a"]) == self._secret[timed.case.name]
                timed.sample(side, timing_round.samples, verify=checked)

    def _verify_rest(self) -> None:
        """Check the cases whose secret block was not reached."""
        for name, timed in self.timed_cases.items():
            if self._secret[name] >= len(timed.blocks["a"]):
                self.side = "a"
                timed.verify("a")

    def _look(self) -> Comparison:
        return self.compare("", resamples=estimates.LOOK_RESAMPLES)

    def _repeat_disturbed(self, timed: TimedBlocks) -> None:
        """Time all blocks of a case once more if the incumbent's times drift, and again while
        samples are no measurement.

        Raises:
            CandidateRejected: The candidate's stay so, and the incumbent's beside them do not.
            UntimeableError: Everybody's stay so.
        """
        tries = 0
        for pause_s in (*PAUSES_S, *LONG_PAUSES_S):
            noisy = self._noisy(timed)
            if not noisy and (tries or not self._drifts(timed)):
                break
            if tries == len(PAUSES_S) and self._its_own(noisy, timed):
                break
            tries += 1
            time.sleep(pause_s)
            for blocks in timed.blocks.values():
                blocks.clear()
            rounds = self.traits.schedule.rounds
            self._secret[timed.case.name] = self.rng.randrange(self._pairs)
            for timing_round in rounds:
                self._round(timed, timing_round)
        if tries:
            self.notes.append(f"{timed.case.name}: taken {tries + 1} times, something disturbed")
        noisy = self._noisy(timed)
        if not noisy:
            return
        us = sorted(x for b in timed.blocks[noisy[0]] for x in b)
        spread = f"samples of one kernel lie between {us[0]:.1f} and {us[-1]:.1f} µs"
        if self._its_own(noisy, timed):
            text = f"{spread}, while the incumbent's beside them agree"
            raise CandidateRejected(Rejected(Stage.MEASURE, Status.SUSPECT, text, timed.case.name))
        raise UntimeableError(timed.case.name, spread)

    @staticmethod
    def _noisy(timed: TimedBlocks) -> list[str]:
        """Sides whose samples are no measurement."""
        return [
            side
            for side, blocks in timed.blocks.items()
            if estimates.is_noise([us for block in blocks for us in block])
        ]

    @staticmethod
    def _its_own(noisy: Sequence[str], timed: TimedBlocks) -> bool:
        """Whether only the candidate's times are noise, while the incumbent's agree."""
        return noisy == ["a"] and len(timed.blocks) > 1

    def _drifts(self, timed: TimedBlocks) -> bool:
        blocks = _typical(timed)
        return len(blocks) > 1 and max(blocks) > self.traits.drift * min(blocks)

    def _drift_notes(self, timed: TimedBlocks) -> list[str]:
        if not self._drifts(timed):
            return []
        blocks = _typical(timed)
        return [
            f"{timed.case.name}: blocks of the incumbent, a known kernel, took {min(blocks):.1f} "
            f"to {max(blocks):.1f} µs"
        ]


def decided(found: Comparison, look: int) -> bool:
    """Whether further pairs are not worth it: the candidate is clearly faster, or hopeless.

    `look` counts from 0.
    """
    hopeless = HOPELESS[min(look, len(HOPELESS) - 1)]
    lost = found.p_faster <= hopeless and found.high < WORTHWHILE
    return lost or found.p_faster >= CLEAR


def _typical(timed: TimedBlocks) -> list[float]:
    """Medians of the incumbent's samples, so many at a time that they outvote a few slow ones."""
    samples = [us for block in timed.blocks.get("b", ()) for us in block]
    whole = len(samples) // _TYPICAL * _TYPICAL
    return [statistics.median(samples[i : i + _TYPICAL]) for i in range(0, whole, _TYPICAL)]
