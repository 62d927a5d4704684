"""Searches of the simulated landscape on the simulated machine, and stored runs of them."""

import asyncio
import random

from kagent.evolve.loop import Evolution
from kagent.evolve.remembering import SeedText
from kagent.runs.ask import Draft, Setting
from kagent.runs.lineage import Operator
from kagent.runs.manifest import Manifest
from kagent.runs.store import RunStore
from simulated_landscape import toy_source, toy_task
from simulated_machine import machine


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


def stored_run(folder, budget=12, race=None):
    """A run of the toy task in `folder / "runs"`; its folder."""
    search, store = evolution(folder / "task", folder / "runs", budget=budget)
    with store:
        asyncio.run(search.run())
        if race is not None:
            store.race(race)
    return store.folder
