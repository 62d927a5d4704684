"""Results of suites made of numbers, and a stand-in for the search: what it finds is stored as a
run stores it.
"""

import shutil

from doubling_task import PARALLEL, PLAIN, REFERENCE, TASK, kernel
from kagent.evolve.session import Outcome
from kagent.runs.events import Started, Stop
from kagent.runs.final_race import FinalRace
from kagent.runs.store import read_history
from kagent.suite.problems import Form, Problem
from kagent.suite.record import FailedStep, ProblemProgress, ProblemState, Settings, Suite
from kagent.suite.results import ProblemResult
from kagent_sandbox.data.race import Race
from kagent_sandbox.data.verdict import Comparison
from simulated_evolution import stored_run


def problems_in(folder, *names, seeds=True):
    """A folder of tasks."""
    for name in names:
        place = folder / name
        place.mkdir(parents=True)
        (place / "task.toml").write_text(TASK.replace('"double"', f'"{name}"', 1))
        (place / "reference.py").write_text(REFERENCE)
        if seeds:
            (place / "cpp_plain.py").write_text(kernel(PARALLEL + PLAIN))
    return folder


def comparison(against, ratio, noise=0.01):
    return Comparison(against, ratio, ratio * (1 - noise), ratio * (1 + noise), 1.0)


class Search:
    """Stands in for `session.evolve`.

    Attributes:
        does: By task: the winner's ratio to the best of torch, an exception, or None: no kernel is
            right.
        calls: Tasks in the order in which they came, with the run that went on.
    """

    def __init__(self, scratch, **does):
        self._scratch = scratch
        self.does = does
        self.calls = []

    def __call__(self, task, config, observe, resume=None):
        name = task.rpartition("/")[2]
        self.calls.append((name, resume and resume.name))
        found = self.does[name]
        folder = config.runs / f"{name}-1"
        if not folder.exists():
            config.runs.mkdir(exist_ok=True)
            shutil.move(stored_run(self._scratch / name, 4, final(found)), folder)
        observe(Started(folder.name, name, config.budget))
        if isinstance(found, BaseException):
            raise found
        _, history = read_history(folder)
        return Outcome(folder, Stop.NO_SEED if found is None else Stop.BUDGET, history)


def final(ratio):
    if not isinstance(ratio, float):
        return None
    beside = (comparison("torch", ratio), comparison("eager", 2 * ratio))
    return FinalRace((0,), 0, Race((), {"0": beside}))


def result(name, ratio=None, eager=None, step=None, *, digest="d", key="cpu 1", lacking=()):
    """A problem's result: correct with a ratio to the best of torch, or failed at a step. Ways of
    torch may be `lacking` memory.
    """
    problem = Problem(name, Form.TASK, f"/{name}")
    if step is not None:
        failed = ProblemProgress(ProblemState.FAILED, digest=digest, step=step, reason="why")
        return ProblemResult(problem, failed)
    if ratio is None:
        return ProblemResult(problem, ProblemProgress())
    beside = {"torch": comparison("torch", ratio), "eager": comparison("eager", eager or ratio)}
    for way in ("torch", *lacking) if lacking else ():
        beside.pop(way, None)
    absent = dict.fromkeys(lacking, 1)
    done = ProblemProgress(ProblemState.DONE, digest=digest, run=f"{name}-1")
    return ProblemResult(problem, done, beside, absent, absent, 2, 0, "#1 cpp", "A CPU", key)


def suite_of(results):
    return Suite(
        sources=("/problems",),
        settings=Settings(4, "cpp", "tune", (), None),
        kind="cpu",
        problems=tuple(r.problem for r in results),
        version="0",
        started="2026-01-01T00:00:00",
        progress={r.name: r.progress for r in results},
    )


FAILED = FailedStep.SEARCH
