"""How much of the best possible gain the search finds, on invented landscapes.

    python benchmarks/search_simulation.py [--policies "greedy;kagent, as written"]
        [--landscapes standard,rugged] [--budget 50] [--seeds 200] [--jobs 2]

A kernel is a set of techniques (each used or not), and the values of four tunables. Techniques are
worth something alone and in pairs; the best values depend on the techniques. A model flips
techniques that it is dealt, unless it sees that they cannot pay, and else those that it believes
in, breaks some kernels and mends some. Nothing here was fitted to
anything but the 27 recorded answers that `calibrated` stands for. Parents, operators, repairs,
kicks, cards, their priors, the tuning before a verdict and the rule of promotion are kagent's own
classes. `kagent, memory` begins with the winner and the techniques' effects of a run of 50 on a
related landscape: half the spread of every worth added, half of the tunables' best values moved.

Printed per landscape and policy: the log speed-up of the best kernel that the policy would report,
over that of the landscape's optimum, after some evaluations; mean and 95 % interval over seeds.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from statistics import NormalDist

import numpy as np
from kagent.prompting.card_choice import choose_cards
from kagent.prompting.cards import Card, FrontMatter
from kagent.runs.ask import Ask, Setting
from kagent.runs.ideas import effects
from kagent.runs.lineage import Candidate, Facts, Lineage, Operator, Origin, Proposal
from kagent.search.config_search import ConfigSearch
from kagent.search.select import mate, select
from kagent.search.settled import nothing_to_gain
from kagent.search.tunables import read_tunables
from kagent.search.tuner import Tuner, propose
from kagent_sandbox.data.verdict import (
    CaseTiming,
    Comparison,
    Passed,
    Rejected,
    Stage,
    Status,
)
from work_queue import cancelled_on_interrupt

TECHNIQUES = 12
VALUES = (8, 5, 5, 4)  # of each tunable
RESAMPLES = 2  # drafts more, where one is known already
SCREENED = math.log(0.985)  # an interval that ends below ends the timing early
SWEEP_NOISE = 1.5  # of a few samples, over that of a verdict


@dataclass(frozen=True)
class Landscape:
    """How kernels are made, and how the model makes them."""

    losing: float = 0.35  # share of techniques that lose on their own
    most_loss: float = 0.15  # log
    most_gain: float = 0.22
    pairs: int = 14
    most_pair: float = 0.4
    pairs_gain: float = 0.6  # share of pairs that gain
    tunables: tuple[float, float] = (0.05, 0.25)  # log lost by a tunable at its worst value
    scale: float = 1.0  # of all gains
    roofline: tuple[float, float] | None = None  # log above the seed, approached softly
    dead: float = 0.0  # share of techniques that can never pass
    breaks: float = 1.0  # factor on every probability to break a kernel
    belief: float = 0.08  # noise of what the model believes of a technique, log
    sharp: float = 6.0  # how strongly it acts on that
    mends: float = 0.6  # probability that a repair works
    idle: float = 0.1  # share of answers that change nothing
    noise: float = 0.015  # standard deviation of a verdict, log
    in_flight: int = 1


LANDSCAPES = {
    "standard": Landscape(),
    "rugged": Landscape(
        losing=0.45,
        most_loss=0.2,
        most_gain=0.2,
        pairs=34,
        most_pair=0.5,
        pairs_gain=0.45,
        tunables=(0.15, 0.5),
    ),
    "dead ends": Landscape(dead=0.4),
    "strong model": Landscape(breaks=0.2, belief=0.03, mends=0.85, idle=0.03, sharp=10.0),
    "weak model": Landscape(breaks=1.7, belief=0.3, mends=0.35, idle=0.2),
    "four in flight": Landscape(in_flight=4),
    "flat": Landscape(tunables=(0.01, 0.05)),
    "calibrated": Landscape(
        losing=0.6,
        pairs_gain=0.5,
        scale=0.3,
        roofline=(0.06, 0.2),
        breaks=0.2,
        belief=0.03,
        mends=0.85,
        idle=0.03,
        sharp=10.0,
        noise=0.003,
    ),
}
SOFT = 0.35  # of the head-room: where the roofline begins to be felt


@dataclass(frozen=True)
class Kernel:
    """One kernel. `fault` says how it is broken."""

    techniques: tuple[int, ...]
    values: tuple[int, ...]
    fault: str = ""


SEED = Kernel((0,) * TECHNIQUES, (0,) * len(VALUES))


class World:
    """One draw of a landscape, the model's answers in it, and what measuring gives."""

    def __init__(self, kind: Landscape, seed: int) -> None:
        draw = np.random.default_rng(seed)
        n = TECHNIQUES
        self.kind, self.seed = kind, seed
        self.rng = np.random.default_rng(10_000 + seed)
        losing = draw.random(n) < kind.losing
        loss, gain = draw.uniform(0.02, kind.most_loss, n), draw.uniform(0.02, kind.most_gain, n)
        self.gains = np.where(losing, -loss, gain)
        self.pairs = []
        for _ in range(kind.pairs):
            i, j = draw.choice(n, 2, replace=False)
            size = draw.uniform(0.1, kind.most_pair)
            sign = 1 if draw.random() < kind.pairs_gain else -1
            self.pairs.append((int(i), int(j), size * sign))
        self.weights = draw.uniform(*kind.tunables, len(VALUES))
        self.shifts = draw.integers(0, 3, (len(VALUES), n))
        self.origins = [int(draw.integers(0, count)) for count in VALUES]
        self.belief = np.exp(kind.sharp * (self.gains + kind.belief * draw.standard_normal(n)))
        every = np.array(list(itertools.product([0, 1], repeat=n)))
        total = every @ self.gains
        for i, j, size in self.pairs:
            total = total + size * every[:, i] * every[:, j]
        self.dead = np.zeros(n, bool)
        if kind.dead:
            self.dead[draw.choice(n, round(kind.dead * n), replace=False)] = True
            total = np.where(every[:, self.dead].any(1), -9, total)
        self.room = 0.0 if kind.roofline is None else float(draw.uniform(*kind.roofline))
        self.base = kind.scale * self.raw(SEED)
        self.start = self.capped(self.base)
        self.optimum = self.capped(kind.scale * float(total.max())) - self.start

    def raw(self, kernel: Kernel) -> float:
        """Log speed before scale and roofline."""
        techniques = np.array(kernel.techniques)
        log = float(self.gains @ techniques)
        log += sum(s * kernel.techniques[i] * kernel.techniques[j] for i, j, s in self.pairs)
        for k, count in enumerate(VALUES):
            best = (self.origins[k] + int(self.shifts[k] @ techniques)) % count
            log -= 2 * self.weights[k] * ((kernel.values[k] - best) / (count - 1)) ** 2
        return log

    def capped(self, log: float) -> float:
        """The same under the roofline, where there is one."""
        if not self.room:
            return log
        left = (self.room - (log - self.base)) / (SOFT * self.room)
        return self.room - SOFT * self.room * (math.log1p(math.exp(left)) if left < 30 else left)

    def log(self, kernel: Kernel) -> float:
        """Log speed-up over the seed."""
        return self.capped(self.kind.scale * self.raw(kernel)) - self.start

    def measured(self, kernel: Kernel, factor: float = 1.0) -> float:
        """`log` with the noise of a verdict, times a factor."""
        return self.log(kernel) + self.rng.normal(0, factor * self.kind.noise)

    def related(self) -> World:
        """A landscape like it: other worths of techniques and pairs, some best values moved."""
        other = copy.copy(self)
        draw = np.random.default_rng(77 + self.seed)
        other.rng = np.random.default_rng(20_000 + self.seed)
        other.gains = self.gains + 0.06 * draw.standard_normal(TECHNIQUES)
        other.pairs = [(i, j, s + 0.125 * draw.standard_normal()) for i, j, s in self.pairs]
        other.origins = [
            (o + int(draw.integers(0, 2)) * int(draw.integers(1, n))) % n
            for o, n in zip(self.origins, VALUES, strict=True)
        ]
        other.base = self.kind.scale * other.raw(SEED)
        other.start = other.capped(other.base)
        return other

    # -- the model -------------------------------------------------------------------------------

    def edit(
        self,
        parent: Kernel,
        others: Sequence[Kernel] = (),
        kind: str = "",
        dealt: Sequence[int] = (),
    ) -> Kernel:
        """One answer of the model; `kind` is the operator that it was asked for, `dealt` are the
        techniques in its prompt.
        """
        rng, law = self.rng, self.kind
        techniques, values = list(parent.techniques), list(parent.values)
        if not kind:
            u, spare = rng.random(), law.idle - 0.1
            limits = ((0.4 - spare / 2, "tune"), (0.75 - spare, "structure"))
            limits += ((0.85 - spare, "rewrite"), (0.95, "idle"))
            kind = next((name for limit, name in limits if u < limit), "crossover")
        elif rng.random() < law.idle:
            kind = "idle"
        breaks = 0.0
        if kind == "tune":
            breaks = 0.12
            for k in rng.choice(len(VALUES), rng.integers(1, 3), replace=False):
                if rng.random() < 0.7:
                    near = values[k] + rng.choice([-2, -1, 1, 2])
                    values[k] = int(np.clip(near, 0, VALUES[k] - 1))
                else:
                    values[k] = int(rng.integers(0, VALUES[k]))
        elif kind == "structure":
            ideas = self.chosen(techniques, dealt)
            breaks = 1 - (1 - 0.35) ** len(ideas)
            self.flip(techniques, values, ideas)
        elif kind == "rewrite":
            breaks = 0.55
            for i in rng.choice(TECHNIQUES, rng.integers(2, 5), replace=False):
                techniques[i] ^= 1
            values[:] = [int(rng.integers(0, n)) for n in VALUES]
        elif kind == "crossover":
            breaks = 0.3
            if others:
                other = others[int(rng.integers(len(others)))]
                pairs = zip(techniques, other.techniques, strict=True)
                techniques = [a if rng.random() < 0.5 else b for a, b in pairs]
                if rng.random() < 0.5:
                    values = list(other.values)
        return self.made(techniques, values, breaks)

    def idea(self, techniques: Sequence[int]) -> int:
        """A technique that the model would flip."""
        off = [i for i in range(TECHNIQUES) if not techniques[i]]
        on = [i for i in range(TECHNIQUES) if techniques[i]]
        if off and (not on or self.rng.random() < 0.8):
            belief = self.belief[off]
            return int(self.rng.choice(off, p=belief / belief.sum()))
        return int(self.rng.choice(on))

    def chosen(self, techniques: Sequence[int], dealt: Sequence[int]) -> list[int]:
        """The techniques that the model flips, of those that it was dealt or others."""
        found: list[int] = []
        for card in dealt:
            share = self.belief[card] / (self.belief[card] + self.belief.mean())
            idea = card if self.rng.random() < share else self.idea(techniques)
            if idea not in found:
                found.append(idea)
        return found or [self.idea(techniques)]

    def flip(self, techniques: list[int], values: list[int], ideas: Sequence[int]) -> None:
        """Change techniques, and some values with them."""
        for i in ideas:
            techniques[i] ^= 1
        for k, count in enumerate(VALUES):
            if self.rng.random() < 0.25:
                values[k] = int(self.rng.integers(0, count))

    def made(self, techniques: Sequence[int], values: Sequence[int], breaks: float) -> Kernel:
        """The kernel, broken with a probability, or because a technique cannot work."""
        fault = self._fault() if self.rng.random() < min(0.9, breaks * self.kind.breaks) else ""
        if not fault and any(d and t for d, t in zip(self.dead, techniques, strict=True)):
            fault = self._fault()
        return Kernel(tuple(techniques), tuple(values), fault)

    def _fault(self) -> str:
        return "compile" if self.rng.random() < 0.6 else "wrong"

    def repair(self, broken: Kernel) -> Kernel:
        """The model's repair of a broken kernel, with the error in view."""
        rng = self.rng
        if any(d and t for d, t in zip(self.dead, broken.techniques, strict=True)):
            if rng.random() < self.kind.mends / 2:  # at best the idea is given up
                pairs = zip(self.dead, broken.techniques, strict=True)
                return Kernel(tuple(0 if d else t for d, t in pairs), broken.values)
            return replace(broken, fault=self._fault())
        if rng.random() < self.kind.mends:
            return replace(broken, fault="")
        if rng.random() < 0.5:
            return broken  # the same bug again
        return replace(broken, fault=self._fault())


def tuned(world: World, kernel: Kernel, count: int) -> Kernel:
    """The best of `count` configurations, by a few samples of each: kagent's own choice."""
    search = ConfigSearch(VALUES, kernel.values, random.Random(int(world.rng.integers(1 << 30))))
    for _ in range(count):
        config = search.next()
        if config is None:
            break
        search.add(config, world.measured(replace(kernel, values=config), SWEEP_NOISE))
    return replace(kernel, values=search.best)


# -- policies ------------------------------------------------------------------------------------


def greedy(world: World, budget: int, repairs: bool = False) -> list[float]:
    """Always from the best measured; with `repairs`, each failure is repaired once."""
    world.measured(SEED)
    best = (0.0, SEED)
    known, broken, curve = {SEED}, list[Kernel](), [0.0]
    flying: list[tuple[Kernel, bool]] = []
    while len(curve) < budget:
        while len(flying) < world.kind.in_flight and len(curve) + len(flying) < budget:
            failed = broken.pop() if broken else None
            for _ in range(3):
                draft = world.repair(failed) if failed else world.edit(best[1])
                if draft not in known:
                    break
            if world.kind.in_flight > 1:
                known.add(draft)
            flying.append((draft, failed is not None))
        place = 0 if len(flying) == 1 else int(world.rng.integers(len(flying)))
        kernel, repaired = flying.pop(place)
        known.add(kernel)
        if kernel.fault:
            if repairs and not repaired:
                broken.append(kernel)
        else:
            log = world.measured(kernel)
            if log > best[0]:
                best = (log, kernel)
        curve.append(world.log(best[1]))
    return curve


class Search:
    """kagent's own selection, lineage and rule of promotion, around the simulated model."""

    first = SEED

    def __init__(
        self,
        world: World,
        budget: int,
        configs: int,
        most_ideas: int = 9,
        before: Search | None = None,
    ) -> None:
        """Begin with the seed's verdict; `configs` are tried of each kernel before its own. At most
        `most_ideas` are asked for at once. `before` is an earlier run.
        """
        self.world, self.budget, self.configs = world, budget, configs
        self.most_ideas = most_ideas
        self.setting = Setting(
            None,  # type: ignore[arg-type] - nothing is joined by shape: there is one case
            "gpu",
            "sm_90a",
            budget - 1,
            int(world.rng.integers(1 << 30)),
            max(4, world.kind.in_flight),
            (
                Operator.STRUCTURE,
                Operator.REWRITE,
                Operator.CROSSOVER,
                *((Operator.TUNE,) if configs < 2 else ()),
                Operator.REPAIR,
            ),
            priors=effects(before.lineage) if before is not None else (),
        )
        self.lineage = Lineage()
        self.kernels: list[Kernel] = []
        self.known = {SEED}
        self.curve: list[float] = []
        self.record(Operator.SEED, (), self.first)
        if before is not None and (best := before.lineage.incumbent) is not None:
            found = before.kernels[best.id]
            self.record(Operator.SEED, (), found, again=found in self.known)
            self.known.add(found)

    def run(self) -> list[float]:
        """Log speed-up of the incumbent after each evaluation."""
        flying: list[tuple[Ask, Operator, tuple[int, ...], Kernel, str, bool]] = []
        asked = 0
        while len(self.curve) < self.budget:
            while (
                len(flying) < self.world.kind.in_flight
                and len(self.curve) + len(flying) < self.budget
            ):
                lineage = self.lineage.as_of(len(self.lineage))
                ask = select(self.setting, lineage, asked, [f[0] for f in flying])
                ask = replace(ask, ideas=min(ask.ideas, self.most_ideas))
                asked += 1
                operator, parents, kernel, card = self.answer(ask)
                flying.append((ask, operator, parents, kernel, card, kernel in self.known))
                self.known.add(kernel)
            place = 0 if len(flying) == 1 else int(self.world.rng.integers(len(flying)))
            _, operator, parents, kernel, card, again = flying.pop(place)
            self.record(operator, parents, kernel, card, again=again)
        return self.curve[: self.budget]

    def answer(self, ask: Ask) -> tuple[Operator, tuple[int, ...], Kernel, str]:
        """The model's answer: the first that is new, of a few; and the cards that it was dealt."""
        operator, parents = ask.operator, (ask.parent.id,)
        if operator is Operator.CROSSOVER:
            second = mate(ask)
            if second is None:
                operator = Operator.STRUCTURE
            else:
                parents = (*parents, second.id)
        parent, *others = (self.kernels[i] for i in parents)
        cards: Sequence[Card] = ()
        if operator in (Operator.STRUCTURE, Operator.REWRITE):
            unused = [c for c, used in zip(DECK, parent.techniques, strict=True) if not used]
            cards = choose_cards(ask, DECK, unused or DECK)
        elif operator is Operator.REPAIR and (origin := ask.parent.proposal.origin) is not None:
            cards = [c for c in DECK if c.name in origin.techniques]
        dealt = [DECK.index(c) for c in cards]
        for _ in range(1 + RESAMPLES):
            if operator is Operator.REPAIR:
                kernel = self.world.repair(parent)
            else:
                kernel = self.world.edit(parent, others, operator.value, dealt)
            if kernel not in self.known:
                break
        return operator, parents, kernel, "+".join(c.name for c in cards)

    def record(
        self,
        operator: Operator,
        parents: tuple[int, ...],
        kernel: Kernel,
        card: str = "",
        again: bool = False,
    ) -> None:
        """Tune, judge and record."""
        number = len(self.lineage)
        incumbent = self.lineage.incumbent
        facts = None
        if again:
            verdict = Rejected(Stage.PARSE, Status.DUPLICATE, "")
        elif kernel.fault == "compile":
            verdict = Rejected(Stage.BUILD, Status.COMPILE_ERROR, "")
        elif kernel.fault:
            verdict = Rejected(Stage.CHECK, Status.INCORRECT_NUMERICAL, "")
        else:
            if self.configs > 1 and operator is not Operator.SEED:
                kernel = tuned(self.world, kernel, self.configs)
                self.known.add(kernel)
            verdict = self.verdict(kernel, incumbent)
            facts = Facts("", str(number), 1, 1.0)
        self.kernels.append(kernel)
        origin = None if operator is Operator.SEED else Origin("simulated", card, seconds=30.0)
        name = f"k{sum(kernel.techniques)}"
        proposal = Proposal(
            number, parents, operator, name, source_of(kernel), "", seen=number, origin=origin
        )
        self.lineage.record(Candidate(proposal, verdict, facts))
        best = self.lineage.incumbent
        if operator is not Operator.SEED or not self.curve:
            self.curve.append(0.0 if best is None else self.world.log(self.kernels[best.id]))

    def verdict(self, kernel: Kernel, incumbent: Candidate | None) -> Passed:
        """Times beside the incumbent's, with noise."""
        log = self.world.measured(kernel)
        us = 100 * math.exp(-log)
        share = min(1.0, math.exp(self.world.log(kernel) - self.world.optimum))
        timings = (CaseTiming("all", us, us, us, 30, share, 1.0, 1.0, baseline_us=100.0),)
        noise = self.world.kind.noise
        passed = Passed(timings, (), math.exp(log), noise, lane_s=0.8)
        if incumbent is None:
            return passed
        ahead = self.world.measured(kernel) - self.world.log(self.kernels[incumbent.id])
        low, high = (ahead + z * noise for z in (-1.96, 1.96))
        versus = Comparison(
            str(incumbent.id),
            *(math.exp(x) for x in (ahead, low, high)),
            NormalDist().cdf(ahead / noise),
        )
        return replace(passed, versus=versus, screened=high < SCREENED)


NAMES = "ABCD"
_FRONT = FrontMatter(title="", bound=("memory",), languages=("cuda",))
DECK = [Card(f"t{i:02}", _FRONT, {}) for i in range(TECHNIQUES)]


def source_of(kernel: Kernel) -> str:
    """A file of the kernel."""
    lists = {name: list(range(count)) for name, count in zip(NAMES, VALUES, strict=True)}
    values = "".join(f"{n} = {v}\n" for n, v in zip(NAMES, kernel.values, strict=True))
    return f"TUNE = {lists!r}\n{values}T = {kernel.techniques!r}, {kernel.fault!r}\n"


class Constants(Search):
    """kagent's tuner alone: the constants of one kernel, some techniques in it."""

    def __init__(self, world: World, budget: int) -> None:
        """Begin with the middle of the values' lists."""
        drawn = world.rng.random(TECHNIQUES) < 0.3
        used = tuple(int(t and not d) for t, d in zip(drawn, world.dead, strict=True))
        self.first = Kernel(used, tuple(n // 2 for n in VALUES))
        super().__init__(world, budget, 1)
        self.setting = replace(self.setting, operators=Tuner.operators)
        self.settled = 0  # evaluations at which nothing was left to gain

    def run(self) -> list[float]:
        """Share of the best gain by constants after each evaluation."""
        while len(self.curve) < self.budget:
            if not self.settled and nothing_to_gain(self.setting, self.lineage):
                self.settled = len(self.curve)
            ask = select(self.setting, self.lineage.as_of(len(self.lineage)), len(self.curve))
            draft = propose(ask)
            assert draft is not None
            file = read_tunables(draft.source)
            assert file is not None
            values = tuple(t.index for t in file.items)
            self.record(Operator.TUNE, draft.parents, replace(self.first, values=values))
        every = (
            self.world.log(replace(self.first, values=v))
            for v in itertools.product(*map(range, VALUES))
        )
        base = self.world.log(self.first)
        room = max(every) - base
        return [(log - base) / room for log in self.curve]


def constants(kind: str, budget: int, seed: int) -> tuple[list[float], int]:
    """Shares of the best gain by constants, and the evaluations at which the tuner would stop."""
    search = Constants(World(LANDSCAPES[kind], seed), budget)
    return search.run(), search.settled or budget


def kagent(world: World, budget: int, configs: int = 1, most_ideas: int = 9) -> list[float]:
    """The search with a model; `configs` of each kernel are tried before its verdict."""
    return Search(world, budget, configs, most_ideas).run()


def remembering(world: World, budget: int) -> list[float]:
    """The search after a run of 50 on a related landscape."""
    before = Search(world.related(), 50, 16)
    before.run()
    return Search(world, budget, 16, before=before).run()


Policy = Callable[[World, int], list[float]]
POLICIES: Mapping[str, Policy] = {
    "greedy": greedy,
    "greedy, repairs": partial(greedy, repairs=True),
    "kagent, as written": kagent,
    "kagent, tuned before": partial(kagent, configs=16),
    "kagent, one idea": partial(kagent, configs=16, most_ideas=1),
    "kagent, memory": remembering,
}


def shares(policy: str, landscape: str, budget: int, seed: int) -> list[float]:
    """Share of the optimum after each evaluation."""
    world = World(LANDSCAPES[landscape], seed)
    return [log / world.optimum for log in POLICIES[policy](world, budget)]


def told(found: Sequence[tuple[list[float], int]]) -> str:
    """What the tuner reached, how fast, and where it would have stopped."""
    reached = [next((i + 1 for i, s in enumerate(c) if s >= 0.95), math.inf) for c, _ in found]
    at = {n: statistics.mean(c[n - 1] for c, _ in found) for n in (8, 16, 25, 50)}
    kept = statistics.mean(c[stop - 1] / c[-1] for c, stop in found if c[-1] > 0)
    return (
        "  ".join(f"@{n} {share:.3f}" for n, share in at.items())
        + f"  .95 after {statistics.median(reached):g} (median); stops after "
        f"{statistics.mean(s for _, s in found):.1f} (mean) with {kept:.3f} of its final share"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--policies", default=";".join(POLICIES))
    parser.add_argument("--landscapes", default=",".join(LANDSCAPES))
    parser.add_argument("--budget", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--constants", action="store_true", help="the tuner alone, too (budget >= 50)"
    )
    options = parser.parse_args()
    points = [n for n in (10, 25, 50, 100, 200, 500) if n <= options.budget]
    with ProcessPoolExecutor(options.jobs) as pool, cancelled_on_interrupt(pool):
        for landscape in options.landscapes.split(","):
            for policy in filter(None, options.policies.split(";")):
                work = partial(shares, policy, landscape, options.budget)
                curves = list(pool.map(work, range(options.seeds), chunksize=8))
                figures = []
                for n in points:
                    at = [c[n - 1] for c in curves]
                    error = 1.96 * statistics.stdev(at) / math.sqrt(len(at))
                    figures.append(f"@{n} {statistics.mean(at):.3f} ± {error:.3f}")
                print(f"{landscape:15} {policy:22} " + "  ".join(figures), flush=True)
            if options.constants:
                work = partial(constants, landscape, options.budget)
                found = list(pool.map(work, range(options.seeds), chunksize=8))
                print(f"{landscape:15} {'tuner alone':22} {told(found)}", flush=True)


if __name__ == "__main__":
    main()
