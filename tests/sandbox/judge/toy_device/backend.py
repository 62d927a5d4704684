"""A device that is simulated: it executes plans in the judge's own process, which nothing real may
do, and its clock counts operations: 100 µs each.
"""

import contextlib
import os
import random
import tempfile
from collections import Counter
from pathlib import Path
from types import MappingProxyType

import torch
from kagent_sandbox.confine.isolation import Isolation
from kagent_sandbox.confine.policy import Tier
from kagent_sandbox.data.device import Ceilings, DeviceFacts
from kagent_sandbox.data.plan import Alloc, Free
from kagent_sandbox.data.plan_json import dump_plan
from kagent_sandbox.device.baseline_calls import MeasuredBaseline, make_call
from kagent_sandbox.device.cpu.executor import Runner
from kagent_sandbox.device.interface import nothing
from kagent_sandbox.device.interference import Unwatched
from kagent_sandbox.device.plan_ops import as_words, strided_view

from toy_device.entry import TRAITS

OP_US = 100.0
EAGER_US = 150.0
CALLS = Counter()
"""How often the judge has asked for what, in this process."""


class ToyArena:
    """Memory of this process."""

    def __init__(self, nbytes):
        self.nbytes = nbytes
        self.memory = torch.zeros(nbytes + 4096, dtype=torch.uint8)
        start = -self.memory.data_ptr() % 4096
        self.memory = self.memory[start : start + nbytes]

    def view(self, tensor, base):
        return strided_view(self.memory, tensor, base)

    def bytes(self, start, stop):
        return self.memory[start:stop]

    def words(self, nbytes):
        return as_words(self.memory, nbytes)

    def close(self):
        CALLS["arena.close"] += 1


class ToyLauncher:
    def __init__(self, arena):
        self._folder = tempfile.TemporaryDirectory()
        self._runner = Runner(arena.memory, Path(self._folder.name))
        self._us = {}
        self._random = random.Random(0)
        self._numbers = {}

    def load(self, binaries):
        request = {"do": "load", "hashes": list(binaries)}
        self._runner.perform(request, list(binaries.values()))

    def prepare(self, key, plan, offsets):
        self._us[key] = OP_US * sum(not isinstance(op, Alloc | Free) for op in plan.ops)
        number = self._numbers.setdefault(key, len(self._us))
        self._runner.perform({"do": "prepare", "number": number, "at": offsets}, [dump_plan(plan)])

    def forget(self, key):
        self._runner.perform({"do": "forget", "number": self._numbers[key]}, ())

    def populate(self, keys):
        CALLS["populate"] += 1

    def stop(self):
        CALLS["stop"] += 1

    def wait_until_idle(self):
        CALLS["wait_until_idle"] += 1

    def run(self, key, *, limit_s):
        CALLS["run"] += 1
        self._runner.execute([self._numbers[key]])

    def sample(self, keys, *, limit_s, observe=nothing):
        CALLS["sample"] += 1
        self._runner.execute([self._numbers[key] for key in keys])
        observe()
        us = sum(self._us[key] for key in keys) / len(keys)
        return us * self._random.uniform(0.999, 1.001)

    def wall_us(self, keys, count, *, limit_s):
        return None

    def close(self):
        CALLS["launcher.close"] += 1
        self._folder.cleanup()


class ToyBaselines:
    """Eager torch, which takes as long as one says."""

    launcher = None
    missing = MappingProxyType({})
    lacking = ()
    names = ("eager",)

    def prefetch(self):
        CALLS["prefetch"] += 1

    def compile_ahead(self, calls, call_bytes, *, shared):
        assert not calls, "it has no compile modes"
        yield from ()
        return ()

    def open(self, calls, arena):
        assert [call.name for call in calls] == ["eager"]
        return contextlib.nullcontext(self)

    def samples(self, name, count):
        return [EAGER_US + i / 10 for i in range(count)]


def facts():
    return DeviceFacts(
        kind="cpu",
        name="a toy",
        target="cpu",
        key=f"a toy {os.environ.get('TOY_DEVICE', '')}",
        memory_bytes=1 << 30,
        l2_bytes=1 << 20,
        units=1,
        theoretical_gb_per_s=0.0,
    )


class ToyBackend:
    traits = TRAITS
    device = torch.device("cpu")
    isolation = Isolation(Tier.T0, 0, False, False)

    def __init__(self):
        self.facts = facts()

    def arena(self, nbytes):
        return ToyArena(nbytes)

    def launcher(self, arena, *, timed=True, callers=1):
        CALLS["launcher"] += 1
        return ToyLauncher(arena)

    def synchronize(self):
        CALLS["synchronize"] += 1

    def wait_until_idle(self):
        pass

    def free_unused(self, *, shared=False):
        pass

    def settle(self):
        CALLS["settle"] += 1

    def race_baselines(self):
        return ToyBaselines()

    def healthy(self):
        return True

    def printed(self):
        return ""

    def ceilings(self, *, again=False):
        return Ceilings(1000.0, 1000.0, 1000.0, {})

    def watch(self):
        return Unwatched()

    def close(self):
        CALLS["close"] += 1


def measure(call):
    """Eager torch works, and takes as long as one says."""
    make_call(call, torch.device("cpu"))()
    return MeasuredBaseline(EAGER_US)
