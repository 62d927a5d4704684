"""Flush caches before every sample on a CPU, of candidates and of baselines, so that they hold none
of its data.

The judge has just written a candidate's inputs, and a baseline's process its own. Part of them
would still be in a cache. The part depends on the last writes and made equal kernels differ by
half.
"""

from __future__ import annotations

import functools
import time

import torch

from kagent_sandbox.device.cpu.facts import cpu_facts

_TIMES = 2  # the last-level cache
_REST_S = 0.0004  # this process's own threads spin for half as long


def settle() -> None:
    """Read what is larger than all caches, and let this process's threads come to rest."""
    _larger_than_caches().sum()
    time.sleep(_REST_S)


@functools.cache
def _larger_than_caches() -> torch.Tensor:
    # Written once: zeros that nobody wrote are all the same page of memory.
    return torch.ones(_TIMES * cpu_facts().l2_bytes // 4)
