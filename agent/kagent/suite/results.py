"""A suite's results: those of its problems' final races, and figures over all problems.

Estimates of the searches have no part in them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from kagent_sandbox.data.race import BEST_OF_TORCH, TORCH
from kagent_sandbox.data.verdict import Comparison, SpeedVerdict
from kagent_sandbox.errors import RunError

from kagent.runs.store import read_history
from kagent.suite.problems import Problem
from kagent.suite.record import RUNS, FailedStep, ProblemProgress, ProblemState, Record
from kagent.ui.end_of_run import missing_modes

OPPONENTS = (BEST_OF_TORCH, *TORCH)
"""Opponents of winners: the best of torch case by case, then each of its ways."""
THRESHOLDS = (1.0, 2.0)
"""The p of fast_p."""


@dataclass(frozen=True, slots=True)
class ProblemResult:
    """Outcome of one problem.

    Attributes:
        problem: The problem.
        progress: How far it has come. It is correct if its state is DONE: a kernel of its run
            passed all checks, those of the race's hidden cases included.
        beside: The race's winner beside the opponents that ran on every case: time of the opponent
            / time of the winner, over all hidden cases.
        missing: Ways of torch that did not run, by the number of cases.
        lacking: Those of them that lacked memory which others may have held, likewise. Whether the
            winner is faster than these, or than the best of torch, is not known.
        cases: Hidden cases of the race.
        disturbed: Cases in which something else used the device.
        winner: Number and name of the winner.
        device: The device of the race.
        device_key: What tells it from other devices.
    """

    problem: Problem
    progress: ProblemProgress
    beside: Mapping[str, Comparison] = field(default_factory=dict)
    missing: Mapping[str, int] = field(default_factory=dict)
    lacking: Mapping[str, int] = field(default_factory=dict)
    cases: int = 0
    disturbed: int = 0
    winner: str = ""
    device: str = ""
    device_key: str = ""

    @property
    def name(self) -> str:
        """The problem's name."""
        return self.problem.name

    @property
    def correct(self) -> bool:
        """Whether a correct kernel was found."""
        return self.progress.state is ProblemState.DONE

    @property
    def versus_torch(self) -> Comparison | None:
        """The winner beside the best of torch; None where there is none."""
        return self.beside.get(BEST_OF_TORCH)

    @property
    def verdict(self) -> SpeedVerdict | None:
        """The winner's verdict beside the best of torch; None where there is none."""
        return None if self.versus_torch is None else self.versus_torch.verdict

    def unknown_beside(self, opponent: str) -> bool:
        """Whether it is not known for lack of memory how the winner compares with an opponent."""
        return bool(self.lacking) if opponent == BEST_OF_TORCH else opponent in self.lacking


@dataclass(frozen=True, slots=True)
class SpeedupStatistics:
    """Speed-ups of winners over one opponent.

    Attributes:
        problems: Correct problems on which the opponent ran.
        mean: Geometric mean of the ratios on these; None if there are none.
        fast: fast_p by p: the share of finished problems that are correct, and whose winner is
            more than p times as fast. This is KernelBench's metric. None while nothing is
            finished.
        unknown: Correct problems that are left out of all this: the opponent lacked memory.
    """

    problems: int
    mean: float | None
    fast: Mapping[float, float | None]
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures over the finished problems of a suite, or of one of its groups.

    Attributes:
        group: The group; "" for all problems.
        problems: All problems.
        finished: Those that are correct or failed. Shares are of these.
        correct: Those with a correct kernel.
        failed: Those that failed, by step.
        verdicts: Correct ones by verdict beside the best of torch.
        beside: Speed beside each opponent.
    """

    group: str
    problems: int
    finished: int
    correct: int
    failed: Mapping[FailedStep, int]
    verdicts: Mapping[SpeedVerdict, int]
    beside: Mapping[str, SpeedupStatistics]


@dataclass(frozen=True, slots=True)
class SuiteResults:
    """All results of a suite, or of a campaign: of each problem, over all of them, and over each
    group.
    """

    name: str
    record: Record
    problems: tuple[ProblemResult, ...]
    all: Figures
    groups: tuple[Figures, ...]

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices of the races; figures of several do not compare."""
        return tuple(dict.fromkeys(p.device for p in self.problems if p.device))

    @property
    def opponents(self) -> tuple[str, ...]:
        """The opponents that some winner was compared with."""
        return tuple(o for o in OPPONENTS if self.all.beside[o].problems)


def read_results(folder: Path, record: Record) -> SuiteResults:
    """Read the results of a folder from its problems' runs."""
    problems = tuple(result_of(folder, record, p) for p in record.problems)
    groups = dict.fromkeys(p.problem.group for p in problems)
    return SuiteResults(
        folder.resolve().name,
        record,
        problems,
        figures("", problems),
        tuple(figures(g, [p for p in problems if p.problem.group == g]) for g in groups if g),
    )


def result_of(folder: Path, record: Record, problem: Problem) -> ProblemResult:
    """Outcome of one problem. It failed if its run cannot be read."""
    progress = record.of(problem)
    if progress.state is ProblemState.DONE:
        try:
            return _raced(folder, problem, progress)
        except RunError as e:
            progress = replace(
                progress, state=ProblemState.FAILED, step=FailedStep.SEARCH, reason=str(e)
            )
    return ProblemResult(problem, progress)


def _raced(folder: Path, problem: Problem, progress: ProblemProgress) -> ProblemResult:
    store, history = read_history(folder / RUNS / progress.run)
    final = history.race
    if final is None or final.winner is None:
        raise RunError(f"{store.folder}: its final race is gone")
    race = final.race
    beside = {c.against: c for c in race.overall[str(final.winner)] if c.against in OPPONENTS}
    manifest = store.manifest
    return ProblemResult(
        problem,
        progress,
        beside,
        missing_modes(race),
        race.lacking_modes,
        len(race.cases),
        len(race.disturbed),
        f"#{final.winner} {history.lineage[final.winner].proposal.name}",
        manifest.device,
        str(manifest.environment.get("key", manifest.device)),
    )


def figures(group: str, problems: Sequence[ProblemResult]) -> Figures:
    """Compute the figures over some problems."""
    finished = [p for p in problems if p.progress.finished]
    correct = [p for p in finished if p.correct]
    verdicts = Counter(p.verdict for p in correct)
    return Figures(
        group=group,
        problems=len(problems),
        finished=len(finished),
        correct=len(correct),
        failed=Counter(p.progress.step for p in finished if p.progress.step is not None),
        verdicts={v: verdicts[v] for v in SpeedVerdict},
        beside={o: _speed(finished, o) for o in OPPONENTS},
    )


def _speed(finished: Sequence[ProblemResult], opponent: str) -> SpeedupStatistics:
    unknown = tuple(p.name for p in finished if p.unknown_beside(opponent))
    known = [p for p in finished if not p.unknown_beside(opponent)]
    ratios = [p.beside[opponent].ratio for p in known if p.correct and opponent in p.beside]
    fast = {p: sum(r > p for r in ratios) / len(known) if known else None for p in THRESHOLDS}
    return SpeedupStatistics(len(ratios), geometric_mean(ratios), fast, unknown)


def geometric_mean(ratios: Sequence[float]) -> float | None:
    """The geometric mean; None of nothing."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None


def results_json(results: SuiteResults) -> dict[str, object]:
    """The results for programs."""
    record = results.record
    return {
        record.WHAT: results.name,
        "sources": list(record.sources),
        **asdict(record.settings),
        "kind": record.device_text.lower(),
        "devices": list(results.devices),
        "version": record.version,
        "started": record.started,
        "all": figures_json(results.all),
        "groups": {f.group: figures_json(f) for f in results.groups},
        "problems": [problem_json(p) for p in results.problems],
    }


def figures_json(f: Figures) -> dict[str, object]:
    """Figures for programs."""
    return {
        "problems": f.problems,
        "finished": f.finished,
        "correct": f.correct,
        "failed": {step.value: n for step, n in f.failed.items()},
        "verdicts": {v.value: n for v, n in f.verdicts.items()},
        "beside": {
            opponent: {
                "problems": speed.problems,
                "geometric_mean": speed.mean,
                "fast_p": {f"{p:g}": share for p, share in speed.fast.items()},
                "unknown": list(speed.unknown),
            }
            for opponent, speed in f.beside.items()
        },
    }


def problem_json(p: ProblemResult) -> dict[str, object]:
    """A problem's result for programs."""
    progress = p.progress
    return {
        "name": p.name,
        "group": p.problem.group,
        "form": p.problem.form.value,
        "state": "correct" if p.correct else progress.state.value,
        "failed_step": None if progress.step is None else progress.step.value,
        "reason": progress.reason,
        "verdict": p.verdict.value if p.verdict is not None else None,
        "beside": {o: comparison_json(c) for o, c in p.beside.items()},
        "missing": dict(p.missing),
        "lacking": dict(p.lacking),
        "cases": p.cases,
        "disturbed": p.disturbed,
        "winner": p.winner,
        "run": f"{RUNS}/{progress.run}" if progress.run else "",
        "notes": list(progress.notes),
        "device": progress.device,
        "seconds": round(progress.seconds, 1),
        "phases": dict(progress.phases),
    }


def comparison_json(c: Comparison) -> dict[str, object]:
    """A ratio for programs."""
    return {"ratio": c.ratio, "low": c.low, "high": c.high, "verdict": c.verdict.value}
