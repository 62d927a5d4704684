"""Traits of a device, as data: how candidates are checked and timed on it. The judge reads them
instead of the device's name.

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
    """Numbers of pairs and samples of a comparison on one kind of device."""

    rounds: tuple[Round, ...]  # of each case
    further: Round | None  # while it may yet turn out to be faster; its pairs are of all cases
    interim_looks: int  # how often that many follow, at most
    placements: int | None  # placements that one block rotates over; None: all, in each sample

    def more(self, cases: int) -> Round | None:
        """Return the further round of each case, of so many cases."""
        if self.further is None:
            return None
        return Round(math.ceil(self.further.pairs / cases), self.further.samples)

    def pairs(self, cases: int) -> int:
        """Pairs of blocks of one case of so many, at most."""
        more = self.more(cases)
        return sum(p.pairs for p in self.rounds) + (self.interim_looks * more.pairs if more else 0)


@dataclass(frozen=True, slots=True)
class Placements:
    """Number of placements that each contender rotates over."""

    least: int
    most: int
    span_us: float = 0.0  # that a sample which executes all of them is to last
    single_share: float = 1.0  # of the device's memory: a case that moves more has one place

    @property
    def fixed(self) -> bool:
        """Whether there are as many for every kernel."""
        return self.least == self.most

    def lasting(self, us: float, *, most: int | None = None) -> int:
        """Number of executions, of `us` microseconds each, that last for the span, within bounds;
        `most` replaces the upper one.
        """
        return executions_for(self.span_us, us, self.least, self.most if most is None else most)


def executions_for(span_us: float, us: float, least: int, most: int) -> int:
    """Return the number of executions, of `us` microseconds each, that last for a span, within
    bounds.
    """
    return max(least, min(most, math.ceil(span_us / max(us, 1.0))))


@dataclass(frozen=True, slots=True)
class NoiseModel:
    """Noise of times that repeating cannot remove, and the A/A test that asks a device for more of
    it (`kagent_sandbox.judge.timing.noise`).
    """

    share: float  # standard deviation of log(time), of kernels of any length ...
    us: float  # ... and so many µs of a kernel's own beside that
    idle_pairs: float
    """Factor on the systematic noise: differences of pairs of blocks up to it are the device's own,
    and longer kernels show less of them. The rest is a neighbour's, which lasts.
    """
    copy_bytes: int  # of the tensor that the A/A copies
    places: int  # that it rotates over
    pairs: int  # of blocks
    samples: int  # per block

    def systematic(self, us: float, factor: float = 1.0) -> float:
        """Return the standard deviation of log(time) that repeating cannot remove.

        Args:
            us: µs of the kernel.
            factor: This machine's noise over the known one.
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
    tf32: bool = False  # torch's own errors are those in TF32, too, where a GPU may compute in it

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
    share: float = 1.0  # of the device's memory: a larger arena is not kept after a turn

    def of(self, memory_bytes: int) -> int:
        """Return the number on a device with that memory: at least one, if any."""
        return min(self.most, max(1, memory_bytes // self.bytes_each))


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Traits of one device that the judge reads."""

    schedule: Schedule
    placements: Placements
    noise: NoiseModel
    inputs: InputPolicy
    kept_launchers: KeptLaunchers = field(default_factory=KeptLaunchers)
    race_rounds: int
    race_samples: int  # of everyone, per round
    sweep_s: float  # lane seconds per case for finding a candidate's best configuration
    drift: float
    """Largest ratio of the incumbent's slowest to its fastest few samples. The incumbent is a known
    kernel, so a larger ratio shows a disturbance.
    """
    enough_samples: Mapping[float, int] = field(default_factory=dict)
    """Samples of a block that are enough from so many µs on; the first entry that fits counts."""
    alignment_bytes: int
    """Bytes that torch's allocator aligns memory to: kernels may rely on that, and on no more."""
    native: bool
    """Whether candidates' code is host code in its launcher's process. Contenders then have a
    launcher each, and the state that they leave behind is compared (`GuestHost`).
    """
    judges_clock: bool
    """Whether a sample is taken on the judge's clock, from a process that was stopped. Caches
    settle (`Backend.settle`) before each.
    """
    disturbed_by_builds: bool
    """Whether compilers use the timed device. Nothing is then built while candidates are timed."""
    compile_modes: tuple[str, ...]
    """Names of the torch.compile baselines that are measured (`kagent_sandbox.data.race`)."""

    def enough(self, us: float) -> float:
        """Samples of a block that are enough for kernels of `us` microseconds."""
        return next((n for least, n in self.enough_samples.items() if us >= least), math.inf)
