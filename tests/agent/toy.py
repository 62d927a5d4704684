"""A synthetic landscape: builder, judge and proposer in a few lines of arithmetic each.

A candidate's text is a module with tunables X and Y; its time is a smooth function of them plus a
pinch that depends on its text, so that equal texts always measure alike.
"""

import ast
import asyncio
import hashlib
import math
import random
import threading
import time
from pathlib import Path

from kagent.evolve.loop import Evolution
from kagent.evolve.machine import Machine, Unit
from kagent.evolve.remembering import SeedText
from kagent.runs.ask import Draft, Setting
from kagent.runs.lineage import Operator, kernel_id
from kagent.runs.manifest import Manifest
from kagent.runs.store import RunStore
from kagent_sandbox.builder.identity import source_hash, tree_hash
from kagent_sandbox.data.build import BuildRequest, Built
from kagent_sandbox.data.plan import Alloc, Buffer, Fill, Plan, TensorRef
from kagent_sandbox.data.race import Race
from kagent_sandbox.data.task import Task, load_task
from kagent_sandbox.data.verdict import CaseTiming, Comparison, Passed, Rejected, Stage, Status
from kagent_sandbox.errors import MachineError
from kagent_sandbox.syntax import parse

TASK_TOML = """
name = "toy"
summary = "A toy"
entry = "toy"
signature = "toy(x: Tensor[M, N]) -> Tensor[M, N]"
bytes = "2 * M * N * itemsize"
flops = "0"
dims = { M = "rows", N = "columns" }
arguments = [{ name = "x", shape = ["M", "N"] }]
results = [{ name = "y", shape = ["M", "N"], k = 2.0 }]

[cpu]
check = [{ name = "c", dtype = "float32", M = 2, N = 3 }]
bench = [
  { name = "short", dtype = "float32", M = 8, N = 16 },
  { name = "middle", dtype = "float32", M = 8, N = 64 },
  { name = "long", dtype = "float32", M = 8, N = 256 },
]
[gpu]
check = [{ name = "gc", dtype = "float32", M = 2, N = 3 }]
bench = [{ name = "gb", dtype = "float32", M = 2, N = 3 }]
"""


REFERENCE = """
import torch


def inputs(case, generator, device):
    shape = (case.dims["M"], case.dims["N"])
    return {"x": torch.randn(shape, generator=generator, device=device)}


def reference(x):
    return 2 * x.double()


def eager(x):
    return x * 2


def experts():
    return {}
"""


def toy_task(folder: Path) -> Task:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "task.toml").write_text(TASK_TOML)
    (folder / "reference.py").write_text(REFERENCE)
    return load_task(folder)


def toy_source(x=1, y=1, flavour="plain", extra="", name="toy"):
    return f'''"""{flavour}"""
import torch

X = {x!r}  # how wide
Y = {y!r}
TUNE = {{"X": [1, 2, 4, 8, 16, 32], "Y": [1, 2, 3, 4]}}
FLAVOUR = "{flavour}"
{extra}

def {name}(x):
    return torch.empty_like(x)
'''


def values(source):
    found = {}
    for node in parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            found[node.targets[0].id] = node.value.value
    return found


N = {"short": 16, "middle": 64, "long": 256}


def case_times(source):
    """µs per benchmark case; a recombined file takes the time of the part that serves the case."""
    v = values(source)
    second = next((n.removeprefix("FLAVOUR") for n in v if n.startswith("FLAVOUR_")), "")
    other = {n: v.get(n + second) for n in ("X", "Y", "FLAVOUR")}
    pinch = int(hashlib.sha256(source.encode()).hexdigest()[:4], 16) / 65535 * 0.002
    return {
        case: part_us(v if n <= v.get("N_SPLIT", n) else other, case) * (1 + pinch)
        for case, n in N.items()
    }


def part_us(v, case):
    width, depth = math.log2(v.get("X", 1)), v.get("Y", 1)
    base = 100 * (1 + 0.06 * (width - 4) ** 2 + 0.05 * (depth - 3) ** 2)
    slope = {"plain": 1.0, "wide": 1.6}.get(v.get("FLAVOUR"), 1.2)
    return {"short": base * slope, "middle": base, "long": base / slope}[case]


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


class RandomProposer:
    """Other values of X and Y, sometimes broken, wrong or a duplicate."""

    name = "random"
    operators = (Operator.TUNE, Operator.STRUCTURE, Operator.REPAIR)
    at_once = 1
    resamples = 8

    def __init__(self, delay_s=0.0, seed=0):
        self.delay_s = delay_s
        self.random = random.Random(seed)

    async def propose(self, ask):
        await asyncio.sleep(self.random.random() * self.delay_s)
        rng = ask.rng()
        fault = "" if ask.operator is Operator.REPAIR else rng.choice(["", "", "", "# WRONG"])
        if ask.operator is Operator.STRUCTURE:
            fault = rng.choice(["", "BROKEN = 1"])
        extra = f"Z = {rng.randrange(30)}\n{fault}"
        source = toy_source(2 ** rng.randrange(6), rng.randrange(1, 5), extra=extra)
        parents = (ask.parent.id,)
        return Draft(parents, ask.operator, ask.parent.proposal.name, source, "a guess")


def setting(task, proposer, budget=30, seed=0, in_flight=4):
    return Setting(task, "cpu", "cpu", budget, seed, in_flight, tuple(proposer.operators))


def manifest(**changes):
    fields = {
        "task": "toy",
        "task_folder": "toy",
        "task_digest": "0",
        "matrix": False,
        "kind": "cpu",
        "target": "cpu",
        "seed": 0,
        "lang": "any",
        "proposer": "random",
        "operators": (Operator.TUNE,),
        "in_flight": 4,
        "configs": 1,
        "environment": {},
        "started": "2026-01-01T00:00:00",
        "version": "0",
    }
    return Manifest(**{**fields, **changes})


def machine(builder=None, judge=None, quiet=False, jobs=2, tune=1, others=()):
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
    )


SEEDS = (SeedText("cpp_plain", toy_source()), SeedText("cpp_wide", toy_source(flavour="wide")))


def evolution(folder, runs, *, proposer=None, budget=30, observe=None, seeds=SEEDS, **more):
    """An evolution over a new store, or over the one that is in `runs` already."""
    proposer = proposer or RandomProposer()
    task = toy_task(folder)
    existing = sorted(runs.glob("*/run.json")) if runs.exists() else []
    store = RunStore.open(existing[-1].parent) if existing else RunStore.create(runs, manifest())
    options = {k: more.pop(k) for k in ("seed", "in_flight") if k in more}
    return Evolution(
        setting(task, proposer, budget, **options),
        seeds,
        store,
        more.pop("machine", None) or machine(),
        proposer,
        observe or (lambda event: None),
        **more,
    ), store
