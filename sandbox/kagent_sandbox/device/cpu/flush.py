"""Flush caches before every sample on a CPU, of candidates and of baselines, so that they hold none
of its data.

The judge has just written a candidate's inputs, and a baseline's process its own. Part of them
would still be in a cache. The part depends on the last writes and made equal kernels differ by
half.
"""

from __future__ import annotations

import functools
import os
import threading
import time

import torch

from kagent_sandbox.device.cpu.facts import cpu_facts

_TIMES = 2  # the last-level cache
_LOOK_S = 0.0001
_MOST_REST_S = 0.05


def settle() -> None:
    """Read what is larger than all caches, and let this process's threads come to rest."""
    _larger_than_caches().sum()
    come_to_rest()


def come_to_rest() -> None:
    """Wait until no other thread of this process runs.

    OpenMP's threads spin for a while when they have nothing to do, 0.2 ms on one processor and 5 ms
    on another. A candidate's threads would share their cores, and a baseline's, which are those
    themselves, would be awake already (`benchmarks/candidate_and_baseline.py`).
    """
    end = time.monotonic() + _MOST_REST_S
    while time.monotonic() < end:
        time.sleep(_LOOK_S)
        if not any(map(_runs, other_threads())):
            return


def other_threads() -> list[str]:
    """Ids of this process's threads but for the one that asks."""
    own = str(threading.get_native_id())
    return [task for task in os.listdir("/proc/self/task") if task != own]


def _runs(task: str) -> bool:
    """Whether a thread of this process runs, or waits for a core."""
    try:
        with open(f"/proc/self/task/{task}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] == "R"
    except OSError:  # it has ended
        return False


@functools.cache
def _larger_than_caches() -> torch.Tensor:
    # Written once: zeros that nobody wrote are all the same page of memory.
    return torch.ones(_TIMES * cpu_facts().l2_bytes // 4)
