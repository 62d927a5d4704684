"""Other activity on the machine while times were taken: neighbours, clocks, throttling.

Two readings, one before and one after, and what differs between them becomes notes for people.
Interleaving already protects a comparison from what hits both sides alike; the notes say when the
times themselves are not those of a quiet machine.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from kagent_sandbox.process import process_tree

R = TypeVar("R")
BUSY_CORES = 0.3
"""Others' use of the processors, and what a hypervisor took, from which on it is worth a word."""
CROWDED_SHARE = 0.15  # of a device, not ours: what times say then is tried once more
WAITED_SHARE = 0.1  # of the time: that long a thread of ours was ready and had no core
CLOCK_CHANGE = 0.05
LEAST_S = 0.1  # the host counts in hundredths of a second
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class HostReading:
    """Sums since the host started, in seconds, and what the cores' clocks are now."""

    at_s: float
    busy_s: float  # of all cores, by everybody
    stolen_s: float  # by the hypervisor
    own_s: float  # busy, by this process and all under it
    waited_s: float  # threads of those under it that were ready and had no core
    core_mhz: tuple[float, ...] = ()  # empty where the host does not tell


def read_host(
    root: Path = Path("/"), pid: int | None = None, children: Sequence[int] | None = None
) -> HostReading:
    """Read the kernel's counters of the processors.

    Kernels run in the processes under this one. Its own threads prepare and compare data between
    samples, more of them than there are cores: that they wait says nothing about the times.

    Args:
        root: Has proc/ and sys/ in it.
        pid: The judge's process; this one by default.
        children: Processes under it; those that the kernel lists by default.
    """
    proc = root / "proc"
    pid = os.getpid() if pid is None else pid
    children = process_tree.descendants(pid) if children is None else children
    busy = stolen = 0.0
    with contextlib.suppress(OSError, ValueError):
        fields = [float(v) for v in (proc / "stat").read_text().split("\n", 1)[0].split()[1:]]
        user, nice, system, _, _, irq, softirq, stolen = fields[:8]
        busy = user + nice + system + irq + softirq
    own = sum(_ticks(proc / str(process) / "stat") for process in (pid, *children))
    waited = sum(_waited_s(t) for c in children for t in (proc / str(c) / "task").glob("*"))
    return HostReading(
        time.monotonic(), busy * _TICK_S, stolen * _TICK_S, own * _TICK_S, waited, _clocks(root)
    )


def _ticks(path: Path) -> float:
    """User and system time of a process."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = path.read_text(encoding="latin-1").rpartition(")")[2].split()
        return float(fields[11]) + float(fields[12])
    return 0.0


def _waited_s(task: Path) -> float:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return float((task / "schedstat").read_text().split()[1]) / 1e9
    return 0.0


def _clocks(root: Path) -> tuple[float, ...]:
    found = []
    for path in sorted(root.glob("sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_cur_freq")):
        with contextlib.suppress(OSError, ValueError):
            found.append(float(path.read_text()) / 1e3)
    return tuple(found)


def others_cores(before: HostReading, after: HostReading) -> float:
    """Return the number of cores that other programs used."""
    busy = after.busy_s - before.busy_s - (after.own_s - before.own_s)
    return busy / max(LEAST_S, after.at_s - before.at_s)


def stolen_cores(before: HostReading, after: HostReading) -> float:
    """Return the number of cores that the hypervisor took."""
    return (after.stolen_s - before.stolen_s) / max(LEAST_S, after.at_s - before.at_s)


def host_notes(before: HostReading, after: HostReading) -> list[str]:
    """Describe disturbances between two readings; nothing is said about less than `LEAST_S`."""
    seconds = after.at_s - before.at_s
    if seconds < LEAST_S:
        return []
    notes = []
    others = others_cores(before, after)
    if others > BUSY_CORES:
        notes.append(f"other programs used {others:.1f} cores")
    stolen = stolen_cores(before, after)
    if stolen > BUSY_CORES:
        notes.append(f"the hypervisor took {stolen:.1f} cores away")
    waited = (after.waited_s - before.waited_s) / seconds
    if waited > WAITED_SHARE:
        notes.append(f"kernels' threads were ready and had no core for {waited:.0%} of the time")
    if before.core_mhz and after.core_mhz:
        then, now = max(before.core_mhz), max(after.core_mhz)
        if abs(now / then - 1) > CLOCK_CHANGE:
            notes.append(f"the fastest core's clock went from {then:.0f} to {now:.0f} MHz")
    return notes


@dataclass(frozen=True, slots=True)
class GpuReading:
    """NVML's values for a GPU at one moment."""

    sm_mhz: float  # 0: not told
    reasons: tuple[str, ...] = ()  # why the clocks are lower than they could be
    others: Mapping[int, float] = field(default_factory=dict)  # process -> share of the GPU's time


def gpu_notes(before: GpuReading, after: GpuReading) -> list[str]:
    """Describe disturbances between two readings."""
    notes = []
    if before.sm_mhz and after.sm_mhz and abs(after.sm_mhz / before.sm_mhz - 1) > CLOCK_CHANGE:
        notes.append(f"the GPU's clock went from {before.sm_mhz:.0f} to {after.sm_mhz:.0f} MHz")
    reasons = sorted({*before.reasons, *after.reasons})
    if reasons:
        notes.append(f"the GPU was slowed down: {', '.join(reasons)}")
    shares = list(after.others.values())
    if shares:
        who = f"{len(shares)} other process{'es' * (len(shares) > 1)}"
        notes.append(f"{who} used the GPU ({sum(shares):.0%} of its time)")
    return notes


class Watch(Protocol):
    """Says what disturbed between `begin` and `notes`."""

    def begin(self) -> None:
        """Times are taken from now on."""

    def notes(self) -> Sequence[str]:
        """Describe disturbances since `begin`."""

    def crowded(self) -> bool:
        """Whether others have used so much of the device since `begin` that times which cannot be
        true are the machine's fault, and no candidate's.
        """


class _Readings(Generic[R]):
    """A watch by two readings of anything."""

    def __init__(self, read: Callable[[], R]) -> None:
        self._read = read
        self._before: R | None = None

    def begin(self) -> None:
        """See `Watch`."""
        self._before = self._read()

    def _since(self) -> tuple[R, R] | None:
        return None if self._before is None else (self._before, self._read())


class HostWatch(_Readings[HostReading]):
    """Watch of a host while CPU times are taken."""

    def __init__(
        self, read: Callable[[], HostReading] = read_host, cores: int | None = None
    ) -> None:
        super().__init__(read)
        self._cores = len(os.sched_getaffinity(0)) if cores is None else cores

    def notes(self) -> Sequence[str]:
        """See `Watch`."""
        since = self._since()
        return [] if since is None else host_notes(*since)

    def crowded(self) -> bool:
        """See `Watch`. What a candidate does itself does not count."""
        since = self._since()
        if since is None or since[1].at_s - since[0].at_s < LEAST_S:
            return False
        return others_cores(*since) + stolen_cores(*since) > CROWDED_SHARE * self._cores


class GpuWatch(_Readings[GpuReading]):
    """Watch of a GPU while times are taken. Each reading covers the users since the one before."""

    def begin(self) -> None:
        """See `Watch`."""
        super().begin()
        self._seen: dict[int, float] = {}

    def _since(self) -> tuple[GpuReading, GpuReading] | None:
        since = super()._since()
        if since is None:
            return None
        for process, share in since[1].others.items():
            self._seen[process] = max(share, self._seen.get(process, 0.0))
        return since[0], replace(since[1], others=self._seen)

    def notes(self) -> Sequence[str]:
        """See `Watch`."""
        since = self._since()
        return [] if since is None else gpu_notes(*since)

    def crowded(self) -> bool:
        """See `Watch`."""
        since = self._since()
        return since is not None and sum(since[1].others.values()) > CROWDED_SHARE


class Unwatched:
    """A watcher without a source of readings. It reports nothing."""

    def begin(self) -> None:
        """See `Watch`."""

    def notes(self) -> Sequence[str]:
        """See `Watch`."""
        return []

    def crowded(self) -> bool:
        """See `Watch`."""
        return False
