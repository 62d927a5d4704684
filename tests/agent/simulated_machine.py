"""A machine for the simulated landscape: its builder compiles nothing, its judge computes times."""

import hashlib
import math
import random
import threading
import time

from kagent.evolve.machine import Machine, Unit
from kagent.runs.lineage import kernel_id
from kagent_sandbox.builder.identity import source_hash, tree_hash
from kagent_sandbox.data.build import BuildRequest, Built
from kagent_sandbox.data.plan import Alloc, Buffer, Fill, Plan, TensorRef
from kagent_sandbox.data.race import Race
from kagent_sandbox.data.verdict import CaseTiming, Comparison, Passed, Rejected, Stage, Status
from kagent_sandbox.errors import MachineError
from simulated_landscape import N, case_times, values


def plan_of(source):
    """A plan that differs when the tunables do."""
    v = values(source)
    number = float(int(hashlib.sha256(repr(sorted(v.items())).encode()).hexdigest()[:8], 16))
    ref = TensorRef(0, 0, (1,), (1,), "float32")
    return Plan("cpu", (Buffer(0, "scratch", 4),), (Alloc(0), Fill(ref, number)), (ref,), ())


class FakeBuilder:
    """Sleeps a little (so that work ends in another order than it began), rejects what says
    BROKEN."""

    def __init__(self, delay_s=0.0, seed=0):
        self.delay_s = delay_s
        self.random = random.Random(seed)
        self.calls = 0
        self.most_at_once = 0
        self._at_once = 0
        self._lock = threading.Lock()

    def build(self, request):
        with self._lock:
            self.calls += 1
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            pause = self.random.random() * self.delay_s
        time.sleep(pause)
        with self._lock:
            self._at_once -= 1
        if "BROKEN" in request.source:
            return Rejected(Stage.BUILD, Status.COMPILE_ERROR, "line 1: BROKEN")
        return Built(
            source_hash=source_hash(request.source),
            tree_hash=tree_hash(request.source),
            target="cpu",
            configs=({"source": request.source},),
            plans={(0, "c"): plan_of(request.source)},
            binaries={},
            build_s=0.1,
            log=request.source,
        )


class FakeJudge:
    """Times by `case_times`. `wide` is a factor on those of wide kernels, which other devices may
    have; after `dies_after` measurements it fails."""

    def __init__(self, delay_s=0.0, wide=1.0, dies_after=math.inf):
        self.delay_s = delay_s
        self.wide = wide
        self.dies_after = dies_after
        self.measured = []
        self.races = 0
        self.compared = 0

    def times(self, source):
        factor = self.wide if values(source).get("FLAVOUR") == "wide" else 1.0
        return {case: us * factor for case, us in case_times(source).items()}

    def check(self, built):
        if "WRONG" in built.log:
            return Rejected(Stage.CHECK, Status.INCORRECT_NUMERICAL, "element [0]", "c")
        return ()

    def sweep(self, built):
        return [case_times(config["source"]) for config in built.configs]

    def measure(self, built, errors, incumbent=None, against="", *, choice=None):
        time.sleep(self.delay_s)
        source = built.log
        if len(self.measured) >= self.dies_after:
            raise MachineError("the device has left")
        self.measured.append(kernel_id(source))
        mine = self.times(source)
        score = math.exp(sum(math.log(100.0 / t) for t in mine.values()) / len(mine))
        versus = None
        if incumbent is not None:
            theirs = self.times(incumbent.log)
            versus = compared(against, theirs, mine)
        return Passed(timings_of(mine), errors, score, 0.001, versus=versus, lane_s=0.2)

    def race(self, contenders, *, hidden, baselines=True):
        self.races += hidden
        self.compared += not hidden
        times = {c.id: self.times(c.built.log) for c in contenders}
        if baselines:
            times["torch"] = dict.fromkeys(N, 100.0)
        overall = {
            c.id: tuple(compared(o, times[o], times[c.id]) for o in times if o != c.id)
            for c in contenders
        }
        return Race((), overall)


def timings_of(times):
    return tuple(
        CaseTiming(n, t, t * 0.99, t * 1.01, 30, 0.5, 1.0, 0.0, baseline_us=100.0)
        for n, t in times.items()
    )


def compared(against, theirs, mine):
    cases = {n: theirs[n] / t for n, t in mine.items()}
    ratio = math.exp(sum(map(math.log, cases.values())) / len(cases))
    low, high = ratio / 1.006, ratio * 1.006
    return Comparison(against, ratio, low, high, 0.99 if ratio > 1.004 else 0.5, cases)


def machine(builder=None, judge=None, quiet=False, jobs=2, tune=1, others=(), moves=False):
    units = [Unit(f"unit {i}", other) for i, other in enumerate(others, 1)]
    return Machine(
        builder or FakeBuilder(),
        judge or FakeJudge(),
        jobs,
        quiet,
        lambda source: BuildRequest(source, "toy", "cpu", ()),
        lambda source: BuildRequest(source, "toy", "cpu", ()),
        lambda say: say("baselines") or {"us": {}},
        lambda source: BuildRequest(source, "toy", "cpu", ()),
        tune,
        "unit 0",
        (lambda say: say("others") or units) if units else None,
        moves,
    )
