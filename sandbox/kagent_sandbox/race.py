"""Contenders and baselines side by side in a fresh launcher: the final race, and `kagent bench`."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kagent_sandbox import figures, timing
from kagent_sandbox.blocks import BLOCK_SAMPLES, Table, arena_bytes, placements
from kagent_sandbox.check import Checker, check_results
from kagent_sandbox.session import Arenas, Disqualified, Session
from kagent_sandbox.verdict import CaseTiming, Comparison, Rejected, Stage

if TYPE_CHECKING:
    import random

    from kagent_sandbox.figures import Contender
    from kagent_sandbox.launch.base import Backend, Ceilings, Launcher
    from kagent_sandbox.task import Case, Kind, Task

LEAST_SAMPLES = 30  # of everyone
TORCH = ("eager", "compile", "compile max-autotune")
"""Baselines that torch alone provides: the fastest of them is what a candidate is scored against.
"""
BEST_OF_TORCH = "torch"
"""Name of the comparison with whichever of `TORCH` is fastest, case by case."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """Time of `against` / time of `candidate` on one case: above 1, the candidate is faster."""

    candidate: str
    against: str
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class RaceCase:
    """One case of a race: what everyone took, and how the candidates compare."""

    case: str
    dtype: str
    dims: Mapping[str, int | float | bool]
    candidates: Mapping[str, CaseTiming]
    baselines: Mapping[str, CaseTiming]
    ratios: tuple[Ratio, ...]


@dataclass(frozen=True, slots=True)
class Race:
    """A race's result. `overall` compares each candidate with everyone else over all cases."""

    cases: tuple[RaceCase, ...]
    overall: Mapping[str, tuple[Comparison, ...]]
    failed: Mapping[str, Rejected] = field(default_factory=dict)


class Rivals(Protocol):
    """Baselines that run trusted code on inputs of their own seeds, timed like candidates are."""

    def launcher(self, backend: Backend) -> Launcher | None:
        """What to use instead of the backend's own launcher, where baselines live inside of it."""

    def ready(self, case: Case) -> Sequence[str]:
        """Make the baselines of a case ready (compile, warm up, capture); their names."""

    def samples(self, name: str, case: Case, count: int) -> list[float]:
        """`count` times in µs of one execution."""

    def done(self, case: Case) -> None:
        """Give the case's memory back."""


@dataclass(frozen=True)
class Racer:
    """Runs races of one task on one device."""

    task: Task
    backend: Backend
    checker: Checker
    arenas: Arenas
    ceilings: Ceilings
    kind: Kind
    rng: random.Random

    def race(
        self, contenders: Sequence[Contender], cases: Sequence[Case], rivals: Rivals | None
    ) -> Race:
        """Time everyone on every case; who fails or is wrong is out, for all cases."""
        failed: dict[str, Rejected] = {}
        runners = [self._settled(c, cases) for c in contenders]
        for runner in list(runners):
            try:
                check_results(self.task, runner.built, cases)
            except Disqualified as e:
                failed[runner.id] = e.verdict
                runners.remove(runner)
        samples: dict[str, dict[str, list[tuple[float, ...]]]] = {}
        while runners:
            try:
                samples = self._run(runners, cases, rivals)
                break
            except _OutError as e:
                failed[e.id] = e.verdict
                runners = [r for r in runners if r.id != e.id]
        ids = [r.id for r in runners]
        by_id = {r.id: r for r in runners}
        results = [self._case(c, samples[c.name], by_id) for c in cases] if runners else []
        overall = {i: self._overall(i, ids, samples) for i in ids}
        return Race(tuple(results), overall, failed)

    def _settled(self, contender: Contender, cases: Sequence[Case]) -> Contender:
        """With a configuration for every case: the one of the most similar benchmark case.

        The table was frozen before: nothing is tuned on the cases of a race.
        """
        known = [c for c in self.task.cases(self.kind).bench if c.name in contender.choice]
        choice = dict(contender.choice)
        for case in cases:
            if case.name not in choice and known:
                nearest = min(known, key=lambda k, c=case: _distance(k, c))  # type: ignore[misc]
                choice[case.name] = contender.choice[nearest.name]
        return replace(contender, choice=choice)

    def _run(
        self, runners: Sequence[Contender], cases: Sequence[Case], rivals: Rivals | None
    ) -> dict[str, dict[str, list[tuple[float, ...]]]]:
        """Blocks per case and name."""
        block = BLOCK_SAMPLES[self.kind]
        rounds = -(-LEAST_SAMPLES // block)
        counts = {c.name: placements(self.task, c, self.kind, self.ceilings) for c in cases}
        nbytes = max(arena_bytes(self.task, c, runners, counts[c.name]) for c in cases)
        binaries = {h: b for r in runners for h, b in r.built.binaries.items()}
        sides = {r.id: r for r in runners}
        found: dict[str, dict[str, list[tuple[float, ...]]]] = {}
        current = runners[0].id
        try:
            arena = self.arenas.at_least(nbytes)
            with Session(self.backend, arena, binaries, Stage.MEASURE) as session:
                for case in cases:
                    names = list(rivals.ready(case)) if rivals else []
                    theirs: dict[str, list[tuple[float, ...]]] = {n: [] for n in names}
                    secret = {i: self.rng.randrange(rounds) for i in sides}
                    with Table(session, self.checker, case, sides, counts[case.name]) as table:
                        for turn in range(rounds):
                            # Everyone is next to everyone, and first and last, equally often.
                            for name in _order([*sides, *names], turn):
                                if name in theirs:
                                    assert rivals is not None
                                    theirs[name].append(tuple(rivals.samples(name, case, block)))
                                else:
                                    current = name
                                    table.sample(name, block, verify=secret[name] == turn)
                    if rivals:
                        rivals.done(case)
                    found[case.name] = {**table.blocks, **theirs}
        except Disqualified as e:
            raise _OutError(current, e.verdict) from e
        return found

    def _case(
        self,
        case: Case,
        samples: Mapping[str, Sequence[Sequence[float]]],
        runners: Mapping[str, Contender],
    ) -> RaceCase:
        flat = {n: [us for b in blocks for us in b] for n, blocks in samples.items()}
        torch_us = [statistics.median(us) for n, us in flat.items() if n in TORCH]
        baseline_us = min(torch_us) if torch_us else None
        candidates: dict[str, CaseTiming] = {}
        baselines: dict[str, CaseTiming] = {}
        for name, us in flat.items():
            runner = runners.get(name)
            known = next(iter(runners.values())) if runner is None else runner
            timed = figures.case_timing(
                self.task,
                case,
                known.plan(case.name),
                us,
                self.ceilings,
                config=known.choice.get(case.name, 0),
                baseline_us=baseline_us,
            )
            if runner is None:
                baselines[name] = replace(timed, config=0, launches=0, peak_bytes=0)
            else:
                candidates[name] = timed
        rng = np.random.default_rng(0)
        noise = timing.systematic(min(statistics.median(v) for v in flat.values()), gpu=self._gpu)
        ratios = []
        for mine in candidates:
            for other in samples:
                if other != mine:
                    interval = timing.ratio(_duel(samples[mine], samples[other]), rng, noise=noise)
                    ratios.append(Ratio(mine, other, interval.value, interval.low, interval.high))
        return RaceCase(case.name, case.dtype, case.dims, candidates, baselines, tuple(ratios))

    def _overall(
        self,
        mine: str,
        ids: Sequence[str],
        samples: Mapping[str, Mapping[str, Sequence[Sequence[float]]]],
    ) -> tuple[Comparison, ...]:
        """Comparisons with the other candidates, the best of torch, and baselines on all cases."""
        everywhere = set.intersection(*(set(s) for s in samples.values()))
        opponents: dict[str, dict[str, str]] = {
            other: dict.fromkeys(samples, other)
            for other in sorted(everywhere, key=lambda n: (n not in ids, n))
            if other != mine
        }
        fastest: dict[str, str] = {}
        for case, blocks in samples.items():
            torch = [n for n in blocks if n in TORCH]
            if torch:
                fastest[case] = min(
                    torch,
                    key=lambda n, b=blocks: statistics.median(itertools.chain(*b[n])),  # type: ignore[misc]
                )
        if len(fastest) == len(samples):
            opponents[BEST_OF_TORCH] = fastest
        comparisons = []
        for against, names in opponents.items():
            duels = {c: _duel(samples[c][mine], samples[c][n]) for c, n in names.items()}
            noise = {
                c: timing.systematic(statistics.median(d.a[0]), gpu=self._gpu)
                for c, d in duels.items()
            }
            combined = timing.combine(duels, np.random.default_rng(0), noise)
            r = combined.ratio
            comparisons.append(
                Comparison(against, r.value, r.low, r.high, combined.p_faster, combined.cases)
            )
        return tuple(comparisons)

    @property
    def _gpu(self) -> bool:
        return self.kind == "gpu"


class _OutError(Exception):
    def __init__(self, contender: str, verdict: Rejected) -> None:
        super().__init__(verdict.message)
        self.id = contender
        self.verdict = verdict


def _duel(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> timing.Duel:
    return timing.Duel(tuple(tuple(x) for x in a), tuple(tuple(x) for x in b))


def _order(names: Sequence[str], turn: int) -> list[str]:
    """Rotated by one place every two turns, and reversed every other turn."""
    shift = turn // 2 % len(names)
    rotated = [*names[shift:], *names[:shift]]
    return rotated[::-1] if turn % 2 else rotated


def _distance(known: Case, case: Case) -> float:
    """How unlike two cases are: another dtype outweighs everything, then sizes by their ratio."""
    total = 100.0 if known.dtype != case.dtype else 0.0
    for name, value in case.dims.items():
        other = known.dims.get(name, value)
        if isinstance(value, bool) or value <= 0 or other <= 0:
            total += 10.0 * (value != other)
        else:
            total += abs(math.log(value / other))
    return total
