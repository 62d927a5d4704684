"""A CPU's backend whose verdicts on times do not depend on the machine's load."""

import random

from handmade_candidates import SLOW, compiled
from kagent_sandbox.data.device import Ceilings
from kagent_sandbox.device.cpu.backend import CpuBackend
from kagent_sandbox.device.interface import nothing


class ScriptedClock:
    """A real launcher that runs everything and tells made-up times: 500 µs, of `SLOW` ten times
    that, give or take 1 %. What is decided from times then does not depend on the machine's load.
    """

    def __init__(self, launcher):
        self._launcher = launcher
        self._us = {}
        self._random = random.Random(0)

    def __getattr__(self, name):
        return getattr(self._launcher, name)

    def prepare(self, key, plan, offsets):
        slow = any(k.hash == compiled(SLOW)[0] for k in plan.kernels)
        self._us[key] = 5000.0 if slow else 500.0
        self._launcher.prepare(key, plan, offsets)

    def sample(self, keys, *, limit_s, observe=nothing):
        self._launcher.sample(keys, limit_s=limit_s, observe=observe)
        return self._us[keys[0]] * self._random.uniform(0.99, 1.01)


class ScriptedBackend(CpuBackend):
    """A CPU on which times are made up, and all the rest is real."""

    def settle(self):
        """Flush nothing: times are made up."""

    def ceilings(self, *, again=False):
        return Ceilings(10.0, 10.0, 10.0, {})

    def launcher(self, arena, **options):
        return ScriptedClock(super().launcher(arena, **options))
