"""Contenders and baselines side by side in a fresh launcher: the final race, and `kagent bench`."""

from __future__ import annotations

import contextlib
import functools
import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from kagent_sandbox.data.race import BEST_OF_TORCH, TORCH, Race, RaceCase, Ratio
from kagent_sandbox.data.verdict import CaseTiming, Comparison, Rejected, Stage
from kagent_sandbox.device.device_memory import lacks_memory, memory_use
from kagent_sandbox.device.interface import BaselineFailed
from kagent_sandbox.errors import DeviceError, DeviceFull
from kagent_sandbox.judge.arena.layout import pitch_of
from kagent_sandbox.judge.arena.scratch import blamed, refuse_scratch
from kagent_sandbox.judge.arena.session import Arenas, CandidateRejected, LauncherSession
from kagent_sandbox.judge.check.checker import Checker, check_results
from kagent_sandbox.judge.timing import estimates, metrics
from kagent_sandbox.judge.timing.blocks import TimedBlocks, placement_count
from kagent_sandbox.judge.timing.hard_inputs import recheck_on_hard_inputs
from kagent_sandbox.judge.timing.versus_incumbent import CLEAR

if TYPE_CHECKING:
    import random

    from kagent_sandbox.data.build import Built, Contender
    from kagent_sandbox.data.case import Case
    from kagent_sandbox.data.device import Ceilings
    from kagent_sandbox.data.kind import Kind
    from kagent_sandbox.data.task import Task
    from kagent_sandbox.device.interface import Arena, Backend, Blame, OpenBaselines
    from kagent_sandbox.device.interference import Watch
    from kagent_sandbox.device.traits import Traits
    from kagent_sandbox.judge.arena.phase_timer import PhaseTimer
    from kagent_sandbox.judge.timing.noise import Noise
    from kagent_sandbox.judge.timing.race_baselines import RaceBaselines

Blocks: TypeAlias = "dict[str, list[tuple[float, ...]]]"


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
    clock: PhaseTimer
    noise: Noise
    watch: Watch
    seconds: float = 0.0  # of a race: further rounds begin in it while verdicts are not clear

    def race(
        self,
        contenders: Sequence[Contender],
        cases: Sequence[Case],
        race_baselines: RaceBaselines | None,
    ) -> Race:
        """Time all contenders on every case. A contender that fails or is wrong is out, for all
        cases.

        Args:
            contenders: The candidates.
            cases: The cases of the race.
            race_baselines: Source of baselines; None for a race without them.
        """
        until = time.monotonic() + self.seconds
        failed: dict[str, Rejected] = {}
        runners = [self._settled(c, cases) for c in contenders]
        for runner in list(runners):
            try:
                check_results(self.task, runner.built, cases)
            except CandidateRejected as e:
                failed[runner.id] = e.verdict
                runners.remove(runner)
        doubted = set[str]()
        samples: dict[str, Blocks] = {}
        absent: dict[str, _Absent] = {}
        notes: dict[str, tuple[str, ...]] = {}
        while runners:
            try:
                samples = self._run(runners, cases, race_baselines, absent, notes, until)
                break
            except _OutError as e:
                if e.blame != "kernel" and e.id not in doubted:
                    doubted.add(e.id)  # once more: it may not have been the kernel
                    continue
                if e.blame == "machine":
                    raise DeviceError(f"twice in a race: {e}; no kernel can cause that") from e
                failed[e.id] = e.verdict
                runners = [r for r in runners if r.id != e.id]
            except (DeviceFull, RuntimeError) as e:  # torch's are among the latter
                largest = self._largest(runners, cases)
                refused = functools.partial(self._refused, runner=largest, cases=cases)
                verdict = blamed(e, refused, self.checker.sampler.compute_on_host)
                if verdict is not None:
                    failed[largest.id] = verdict
                    runners = [r for r in runners if r.id != largest.id]
        ids = [r.id for r in runners]
        by_id = {r.id: r for r in runners}
        results = [
            replace(
                self._case(c, samples[c.name], by_id, absent.get(c.name, _Absent())),
                notes=notes.get(c.name, ()),
            )
            for c in (cases if runners else ())
        ]
        overall = {i: self._overall(i, ids, samples, results) for i in ids}
        return Race(tuple(results), overall, failed)

    def _settled(self, contender: Contender, cases: Sequence[Case]) -> Contender:
        """Add a configuration for every case: that of the most similar benchmark case.

        The table was frozen before: nothing is tuned on the cases of a race.
        """
        choice = metrics.choice_for(cases, self.task.cases(self.kind).bench, contender.choice)
        return replace(contender, choice=choice)

    def _run(
        self,
        runners: Sequence[Contender],
        cases: Sequence[Case],
        race_baselines: RaceBaselines | None,
        absent: dict[str, _Absent],
        notes: dict[str, tuple[str, ...]],
        until: float,
    ) -> dict[str, Blocks]:
        """Blocks of samples of everyone, per case; puts who did not run, and why, into `absent`,
        and what disturbed into `notes`.

        What is left `until` that time of `time.monotonic` is shared evenly by the cases.
        """
        largest = self._largest(runners, cases)
        try:
            arena = self.arenas.at_least(self._arena_bytes(largest, cases))
        except CandidateRejected as e:
            raise _OutError(largest.id, e.verdict) from e
        found: dict[str, Blocks] = {}
        for number, case in enumerate(cases):
            now = time.monotonic()
            share = now + (until - now) / (len(cases) - number)
            while case.name not in found:  # again where a baseline failed, in the end without it
                with contextlib.suppress(BaselineFailed), contextlib.ExitStack() as stack:
                    with self.clock.part("open"):
                        opened = (
                            stack.enter_context(race_baselines.open(case, arena))
                            if race_baselines
                            else None
                        )
                    if opened is not None:
                        absent[case.name] = _Absent(opened.missing, tuple(opened.lacking))
                    blocks = self._run_case(runners, case, arena, opened, share, notes)
                    found[case.name] = blocks
        return found

    def _count(self, case: Case) -> int:
        places, memory = self._traits.placements, self.backend.facts.memory_bytes
        return placement_count(self.task, case, places, self.ceilings, memory)

    def _arena_bytes(self, runner: Contender, cases: Sequence[Case]) -> int:
        return max(self._count(c) * pitch_of([runner.plan(c.name)]) for c in cases)

    def _largest(self, runners: Sequence[Contender], cases: Sequence[Case]) -> Contender:
        """The contender that the arena is as large for."""
        return max(runners, key=lambda r: self._arena_bytes(r, cases))

    def _refused(
        self, error: Exception, runner: Contender, cases: Sequence[Case]
    ) -> Rejected | None:
        """See `refuse_scratch`."""
        if not lacks_memory(error):
            return None

        def arena_bytes(built: Built) -> int:
            return self._arena_bytes(replace(runner, built=built), cases)

        use = memory_use(self.backend.device, self.arenas.nbytes)
        return refuse_scratch(error, use, runner.built, arena_bytes, Stage.MEASURE)

    def _run_case(
        self,
        runners: Sequence[Contender],
        case: Case,
        arena: Arena,
        opened: OpenBaselines | None,
        until: float,
        notes: dict[str, tuple[str, ...]],
    ) -> Blocks:
        """A fresh launcher per case: baselines inside of it keep their memory until it ends.

        After the rounds that everybody gets, further ones follow `until` that time of
        `time.monotonic`, or until every verdict beside torch is clear.
        """
        traits = self._traits
        block, rounds = traits.race_samples, traits.race_rounds
        apart = {r.id: r.built.binaries for r in runners if traits.native}
        shared = {h: b for r in runners for h, b in r.built.binaries.items() if not traits.native}
        sides = {r.id: r for r in runners}
        secret = {i: self.rng.randrange(rounds) for i in sides}
        theirs: Blocks = {n: [] for n in (opened.names if opened else ())}
        launcher = opened.launcher if opened else None
        session = LauncherSession(
            self.backend, arena, shared, Stage.MEASURE, launcher, self.clock, apart
        )
        timed = TimedBlocks(session, self.checker, case, sides, self._count(case), traits)
        try:
            with session:
                timed.prepare()
                self.watch.begin()
                for turn in itertools.count():
                    if turn >= rounds and (
                        time.monotonic() >= until or self._clear(timed.blocks, theirs)
                    ):
                        break
                    for name in order([*sides, *theirs], turn):
                        if opened is not None and name in theirs:
                            with session.paused():  # whatever the candidates may be up to
                                theirs[name].append(tuple(opened.samples(name, block)))
                        else:
                            timed.sample(name, block, verify=secret[name] == turn)
                notes[case.name] = tuple(self.watch.notes())
                for name in sides:
                    checks = self.task.cases(self.kind).check
                    recheck_on_hard_inputs({case.name: timed}, name, checks, self.rng)
        except CandidateRejected as e:
            raise _OutError(e.owner or timed.side, e.verdict) from e
        return {**timed.blocks, **theirs}

    def _clear(self, blocks: Blocks, baselines: Blocks) -> bool:
        """Whether further rounds could hardly change a verdict beside the fastest of torch.

        The limit is `CLEAR` and not the 95 % of a verdict: whoever looks often at 95 % finds
        something sooner or later. Without torch there is nothing to wait for.
        """
        torch = [b for name, b in baselines.items() if name in TORCH]
        if not torch:
            return True
        fastest = min(torch, key=lambda b: statistics.median(itertools.chain(*b)))
        for mine in blocks.values():
            paired = _paired_samples(mine, fastest)
            noise = self._systematic(statistics.median(paired.a[0]), len(mine))
            logs = estimates.bootstrap_log_ratios(
                paired, np.random.default_rng(0), noise=noise, resamples=estimates.LOOK_RESAMPLES
            )
            if 1 - CLEAR < float(np.mean(logs > 0)) < CLEAR:
                return False
        return True

    def _case(
        self,
        case: Case,
        samples: Mapping[str, Sequence[Sequence[float]]],
        runners: Mapping[str, Contender],
        absent: _Absent,
    ) -> RaceCase:
        flat = {n: [us for b in blocks for us in b] for n, blocks in samples.items()}
        torch_us = [statistics.median(us) for n, us in flat.items() if n in TORCH]
        known_best = torch_us and not any(n in TORCH for n in absent.lacking)
        baseline_us = min(torch_us) if known_best else None
        candidates: dict[str, CaseTiming] = {}
        baselines: dict[str, CaseTiming] = {}
        for name, us in flat.items():
            runner = runners.get(name)
            known = next(iter(runners.values())) if runner is None else runner
            timed = metrics.case_timing(
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
        pairs = min(map(len, samples.values()))
        noise = self._systematic(min(statistics.median(v) for v in flat.values()), pairs)
        ratios = []
        for mine in candidates:
            for other in samples:
                if other != mine:
                    interval = estimates.ratio(
                        _paired_samples(samples[mine], samples[other]), rng, noise=noise
                    )
                    ratios.append(Ratio(mine, other, interval.value, interval.low, interval.high))
        return RaceCase(
            case.name,
            case.dtype,
            case.dims,
            candidates,
            baselines,
            tuple(ratios),
            missing=absent.missing,
            lacking=absent.lacking,
        )

    def _overall(
        self,
        mine: str,
        ids: Sequence[str],
        samples: Mapping[str, Mapping[str, Sequence[Sequence[float]]]],
        cases: Sequence[RaceCase],
    ) -> tuple[Comparison, ...]:
        """Comparisons with the other candidates, the best of torch where it is known on all cases,
        and baselines on all cases.
        """
        everywhere = set.intersection(*(set(s) for s in samples.values()))
        opponents: dict[str, dict[str, str]] = {
            other: dict.fromkeys(samples, other)
            for other in sorted(everywhere, key=lambda n: (n not in ids, n))
            if other != mine
        }
        fastest = {c.case: name for c in cases if (name := c.fastest_of_torch) is not None}
        if len(fastest) == len(samples):
            opponents[BEST_OF_TORCH] = fastest
        comparisons = []
        for against, names in opponents.items():
            paired = {c: _paired_samples(samples[c][mine], samples[c][n]) for c, n in names.items()}
            noise = {
                c: self._systematic(statistics.median(d.a[0]), len(d.a)) for c, d in paired.items()
            }
            combined = estimates.combine(paired, np.random.default_rng(0), noise)
            r = combined.ratio
            comparisons.append(
                Comparison(against, r.value, r.low, r.high, combined.p_faster, combined.cases)
            )
        return tuple(comparisons)

    def _systematic(self, us: float, pairs: int) -> float:
        return self.noise.sd(us, self._traits.noise, pairs=pairs)

    @property
    def _traits(self) -> Traits:
        return self.backend.traits


@dataclass(frozen=True)
class _Absent:
    """Baselines that did not run on a case: see `OpenBaselines`."""

    missing: Mapping[str, str] = field(default_factory=dict)
    lacking: tuple[str, ...] = ()


class _OutError(Exception):
    def __init__(self, contender: str, verdict: Rejected) -> None:
        super().__init__(verdict.message)
        self.id = contender
        self.verdict = verdict

    @property
    def blame(self) -> Blame:
        return self.__cause__.blame if isinstance(self.__cause__, CandidateRejected) else "kernel"


def _paired_samples(
    a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]
) -> estimates.PairedSamples:
    return estimates.PairedSamples(tuple(tuple(x) for x in a), tuple(tuple(x) for x in b))


def order(names: Sequence[str], turn: int) -> list[str]:
    """An order of names in which, over as many turns as there are names (twice as many where that
    is odd), each is first and last equally often, and right after each other one equally often. Of
    every two turns the second one reverses the first.

    Source: E. J. Williams, Experimental designs balanced for the estimation of residual effects of
    treatments, Australian Journal of Scientific Research A 2 (1949).
    """
    n, shift = len(names), turn // 2
    places = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(n)]  # 0, 1, -1, 2, -2, ...
    found = [names[(place + shift) % n] for place in places]
    return found[::-1] if turn % 2 else found
