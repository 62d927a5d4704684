"""Raise priority and pin threads while timing, where this user's rights allow it.

Two cores that eight programs want give a kernel of half a millisecond 5 ms, give or take 3. With
priority over them it takes 0.6; and a slice of the scheduler's (0.7 ms) more wherever one of its
threads is woken on the core that another one runs on, so each gets a core.

Only privileged users may take priority; all others measure what they get, and
`kagent_sandbox.device.interference` says what disturbed. It lasts while times are taken: a kernel
that hangs then keeps others out for as long as it may run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Self

_NICE = -10  # ten times the share of a program that asks for nothing
_CAP_SYS_NICE = 23
_SHARE = 0.2  # of the busiest thread's time: less, and a thread is none of those that compute


class CpuPriority:
    """Priority, and a core each, for threads that compute. A context manager, to be used again and
    again. The thread that uses it has priority with them. What the host refuses stays as it is.
    """

    def __init__(self, pid: int, tasks: Sequence[int]) -> None:
        """`tasks` are the threads of process `pid` that compute, the first of them first."""
        self._pids = {pid, os.getpid()}
        self._cores = os.sched_getaffinity(0)
        self._places = _places(tasks, sorted(self._cores)) if reaches_launchers() else {}
        self._tasks = [0, *tasks]

    def __enter__(self) -> Self:
        _set_priority(self._pids, self._tasks, _NICE)
        for task, core in self._places.items():
            _pin(task, {core})
        return self

    def __exit__(self, *_: object) -> None:
        _set_priority(self._pids, self._tasks, 0)
        for task in self._places:
            _pin(task, self._cores)


def reaches_launchers() -> bool:
    """Whether this process may pin the threads of launchers as it may its own.

    Launchers of root are other users, whose threads only CAP_SYS_NICE reaches, which containers
    lack by default. Baselines, which run in this process, are then left to the scheduler as
    candidates are: pinned alone, they were up to three times as fast.
    """
    if os.geteuid() != 0:
        return True
    with open("/proc/self/status", encoding="ascii") as file:
        effective = next(line for line in file if line.startswith("CapEff:"))
    return bool(int(effective.split()[1], 16) >> _CAP_SYS_NICE & 1)


def of_process(pid: int) -> CpuPriority:
    """Manage a process all of whose threads compute, and were started in that order."""
    return CpuPriority(pid, sorted(_seconds(pid)))


def of_workers(work: Callable[[], object]) -> CpuPriority:
    """Manage the threads of this process that do some work, found by having them do it."""
    before = _seconds(os.getpid())
    work()
    spent = {task: s - before.get(task, 0.0) for task, s in _seconds(os.getpid()).items()}
    least = _SHARE * max(spent.values(), default=0.0)
    return CpuPriority(os.getpid(), sorted(task for task, s in spent.items() if s > least))


def _seconds(pid: int) -> dict[int, float]:
    """Processor time of each thread of a process."""
    found: dict[int, float] = {}
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with (
                contextlib.suppress(OSError, ValueError, IndexError),
                open(f"/proc/{pid}/task/{task}/schedstat", encoding="ascii") as file,
            ):
                found[int(task)] = int(file.read().split()[0]) / 1e9
    return found


def _places(tasks: Sequence[int], cores: Sequence[int]) -> Mapping[int, int]:
    """A core for each thread: the first one the first, and each pool of OpenMP's the others.

    A process has one pool or two (torch may bring a libgomp of its own), with a thread for every
    core but the first. Other numbers of threads are left to the scheduler.
    """
    others = len(cores) - 1
    if others < 1 or len(tasks) < 2 or (len(tasks) - 1) % others:
        return {}
    return {t: cores[0 if i == 0 else 1 + (i - 1) % others] for i, t in enumerate(tasks)}


def _pin(task: int, cores: set[int]) -> None:
    with contextlib.suppress(OSError):
        os.sched_setaffinity(task, cores)


def _set_priority(pids: set[int], tasks: Sequence[int], nice: int) -> None:
    """Set what the scheduler looks at within a session and, where it groups sessions, what it looks
    at between them.
    """
    for task in tasks:
        try:
            os.setpriority(os.PRIO_PROCESS, task, nice)
        except PermissionError:
            return
        except ProcessLookupError:
            continue
    for pid in pids:
        with (
            contextlib.suppress(OSError),
            open(f"/proc/{pid}/autogroup", "w", encoding="ascii") as file,
        ):
            file.write(str(nice))
