"""How candidates are checked and timed on a device, as data: what the judge reads in the place of
the device's name.

A device's folder has its own values, with the reasons for them. Needs neither torch nor the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Round:
    """Pairs of blocks after which a candidate that clearly loses is let go."""

    pairs: int
    samples: int  # per block


@dataclass(frozen=True, slots=True)
class Schedule:
    """How a candidate and the incumbent take turns on one kind of device."""

    rounds: tuple[Round, ...]  # of each case
    further: Round | None  # while it may yet turn out to be faster; its pairs are of all cases
    interim_looks: int  # how often that many follow, at most
    placements: int | None  # placements that one block rotates over; None: all, in each sample

    def more(self, cases: int) -> Round | None:
        """What follows for each case of so many."""
        if self.further is None:
            return None
        return Round(math.ceil(self.further.pairs / cases), self.further.samples)

    def pairs(self, cases: int) -> int:
        """Pairs of blocks of one case of so many, at most."""
        more = self.more(cases)
        return sum(p.pairs for p in self.rounds) + (self.interim_looks * more.pairs if more else 0)


@dataclass(frozen=True, slots=True)
class Placements:
    """How many buffer sets each contender rotates over."""

    least: int
    most: int
    span_us: float = 0.0  # that a sample which executes all of them is to last

    @property
    def fixed(self) -> bool:
        """Whether there are as many for every kernel."""
        return self.least == self.most

    def lasting(self, us: float, *, most: int | None = None) -> int:
        """So many executions of `us` microseconds each that they last for the span, within
        bounds; `most` is another upper one.
        """
        return executions_for(self.span_us, us, self.least, self.most if most is None else most)


def executions_for(span_us: float, us: float, least: int, most: int) -> int:
    """How many executions of `us` microseconds each last for a span, within bounds."""
    return max(least, min(most, math.ceil(span_us / max(us, 1.0))))


@dataclass(frozen=True, slots=True)
class NoiseModel:
    """What repeating cannot remove from times here, and how a device is asked for more of it by an
    A/A comparison (`kagent_sandbox.judge.timing.noise`).
    """

    share: float  # standard deviation of log(time), of kernels of any length ...
    us: float  # ... and so many µs of a kernel's own beside that
    idle_pairs: float
    """Of how pairs of blocks differ: up to so many times what is systematic is the device's own
    doing, which longer kernels show less of. The rest is a neighbour's, which lasts."""
    copy_bytes: int  # of the tensor that the A/A copies
    places: int  # that it rotates over
    pairs: int  # of blocks
    samples: int  # per block

    def systematic(self, us: float, factor: float = 1.0) -> float:
        """Standard deviation of log(time) of kernels of `us` that repeating cannot remove, times
        `factor`: how much more this machine showed when it was asked.
        """
        return float(factor * (self.share + self.us / us))  # of numpy, where `us` was


@dataclass(frozen=True, slots=True)
class InputPolicy:
    """Whether a check's and a timed block's inputs are drawn anew each time, or drawn once and
    used again in processes that have not seen them.
    """

    pool: int = 0  # draws that are kept per check case; 0: all are new
    stock_share: float = 0.0  # of the host's memory, that kept draws for timing may take
    threads: int = 0  # that draw inputs at once; 0: nothing is kept for timing

    @property
    def reused(self) -> bool:
        """Whether later processes get what earlier ones had: then no arena may pass on what one
        has written down of it.
        """
        return self.pool > 0 or self.threads > 0


@dataclass(frozen=True, slots=True)
class KeptLaunchers:
    """Launchers that wait, with a checked candidate in them, for its measurement."""

    most: int = 0  # 0: every measurement starts its own
    bytes_each: int = 1  # of the device's memory: one is kept for every so many

    def of(self, memory_bytes: int) -> int:
        """How many on a device with that memory: at least one, if any."""
        return min(self.most, max(1, memory_bytes // self.bytes_each))


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """All that differs between devices in how the judge goes about it."""

    schedule: Schedule
    placements: Placements
    noise: NoiseModel
    inputs: InputPolicy
    kept_launchers: KeptLaunchers = field(default_factory=KeptLaunchers)
    race_rounds: int
    race_samples: int  # of everyone, per round
    sweep_s: float  # lane seconds per case for finding a candidate's best configuration
    drift: float
    """Slowest over fastest few samples of the incumbent, a known kernel: from here on something
    disturbed."""
    enough_samples: Mapping[float, int] = field(default_factory=dict)
    """From so many µs on, the first that fits: samples of a block that are enough."""
    native: bool
    """Candidates' code is host code in its launcher's process: contenders have a launcher each,
    and what they leave behind in it is looked at (`GuestHost`)."""
    judges_clock: bool
    """A sample is taken on the judge's clock, from a process that was stopped: caches settle
    (`Backend.settle`) before each."""
    disturbed_by_builds: bool
    """Compilers use what is timed: nothing is built meanwhile."""
    compile_modes: tuple[str, ...]
    """Names of the torch.compile baselines that are measured (`kagent_sandbox.data.race`)."""

    def enough(self, us: float) -> float:
        """Samples of a block that are enough for kernels of `us` microseconds."""
        return next((n for least, n in self.enough_samples.items() if us >= least), math.inf)
