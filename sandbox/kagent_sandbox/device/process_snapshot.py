"""State of a process as the kernel shows it to others, and what changed between two."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

_OF_PROCESS = {
    "SigIgn": "signals that are ignored",
    "SigCgt": "signals that have a handler",
    "Umask": "rights that new files do not get (umask)",
    "THP_enabled": "whether there are huge pages",
}
_OF_THREAD = {
    "Name": "name of a thread",
    "SigBlk": "signals that a thread blocks",
    "Cpus_allowed": "cores of a thread",
}
_SIGNAL_SETS = ("SigIgn", "SigCgt", "SigBlk")
_MOST_NAMES = 6  # of signals

Status: TypeAlias = Mapping[str, str]


@dataclass(frozen=True)
class ProcessSnapshot:
    """A process as the kernel shows it to others."""

    status: Status
    threads: Mapping[int, Status]
    files: frozenset[str] | None  # descriptors with their targets; None where they may not be seen


def differences(before: ProcessSnapshot, after: ProcessSnapshot) -> list[str]:
    """Describe the differences between two states in words."""
    found: list[str] = []
    if before.threads.keys() != after.threads.keys():
        found.append(f"there are {len(after.threads)} threads, and were {len(before.threads)}")
    pairs = [(before.status, after.status, _OF_PROCESS)]
    both = sorted(before.threads.keys() & after.threads.keys())
    pairs += [(before.threads[t], after.threads[t], _OF_THREAD) for t in both]
    for one, other, names in pairs:
        for key, what in names.items():
            values = one.get(key, ""), other.get(key, "")
            if values[0] != values[1]:
                first, then = map(_signals, values) if key in _SIGNAL_SETS else values
                found.append(f"{what}: {then}, and before {first}")
    if before.files is not None and after.files is not None:
        left = sorted(after.files - before.files)
        found += [f"open: {', '.join(left)}"] if left else []
        gone = sorted(before.files - after.files)
        found += [f"closed: {', '.join(gone)}"] if gone else []
    return list(dict.fromkeys(found))


def signal_names(numbers: Sequence[int]) -> str:
    """The first few by name, and how many more there are."""
    known = {s.value: s.name for s in signal.Signals}
    names = [known.get(n, f"signal {n}") for n in numbers[:_MOST_NAMES]]
    more = len(numbers) - len(names)
    return ", ".join(names or ["none"]) + (f" and {more} more" if more else "")


def _signals(mask: str) -> str:
    """Names of the signals in a set as /proc shows it."""
    bits = int(mask or "0", 16)
    return signal_names([n for n in range(1, 65) if bits >> (n - 1) & 1])
