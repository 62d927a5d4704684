"""Real measurements that are brief, for tests in which no figure is the point.

A comparison has as many pairs of samples as ever. But a sample executes a short kernel a few times
rather than 64, each on inputs that must be drawn; no caches are emptied before it; and the A/A test
copies less. That was most of a run's CPU time.

Nor may a busy machine decide how a test ends: a sample lasts for some 100 µs, and one in which a
neighbour has the core is a hundred times as long. Samples that differ as much are times here, too,
and nothing is subtracted from them, which could be more than they are.

In all other tests' processes, but those that start as users start them, caches alone are left as
they are: on a server with 260 MiB of them, emptying these was three quarters of a measurement.
Rooflines are then those of arrays that caches hold, too.
"""

import copy
import dataclasses
import functools
import math

import torch
from kagent_sandbox.device.cpu import ceilings, flush, launcher
from kagent_sandbox.device.cpu.traits import TRAITS
from kagent_sandbox.device.traits import Placements
from kagent_sandbox.judge.check import guests
from kagent_sandbox.judge.timing import estimates

_OTHERS = {
    "schedule": dataclasses.replace(TRAITS.schedule, interim_looks=1),
    "placements": Placements(least=2, most=4, span_us=100.0),
    "noise": dataclasses.replace(TRAITS.noise, copy_bytes=1 << 19, pairs=12),
}


larger_than_caches = flush._larger_than_caches
"""What is read where caches are emptied."""


def keep_caches():
    """Empty no caches in this process from now on, and in its forks; have small ceilings."""
    flush._larger_than_caches = functools.cache(lambda: torch.ones(1024))
    # Arrays that exceed such caches take 20 s of CPU time. In a cache rooflines are higher, and the
    # judge suspects less.
    ceilings._MOST_ARRAY_BYTES = ceilings._LEAST_ARRAY_BYTES
    ceilings._MOST_PLACEMENTS = 2
    ceilings._ROUNDS = 2


def repeat_less():
    """Have judges of this process, and of its forks, repeat calls less to see whether these keep
    memory: half of a check's CPU time. Whatever keeps some at every call shows all the same;
    test_guests repeats as often as users' judges do.
    """
    guests._FEW_RUNS, guests.REPEAT_S = 4, 0.0


def apply():
    """Time briefly in this process from now on, and in its forks."""
    keep_caches()
    ceilings.TRAITS = copy.copy(TRAITS)  # which all tests share
    for name, value in _OTHERS.items():
        object.__setattr__(TRAITS, name, value)  # for all that hold it already
    estimates.NOISE_SPAN = math.inf
    launcher.RequestCost.cost_s = 0.0
