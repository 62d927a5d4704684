"""The command line run in this process, and a stored run and a race to show."""

import asyncio
import functools
import signal
import sys
from dataclasses import dataclass

import typer.main
from kagent.cli import main
from kagent.runs.final_race import FinalRace
from kagent_sandbox.data.race import Race, RaceCase, Ratio
from kagent_sandbox.data.verdict import CaseTiming, Comparison
from toy import evolution

_command = functools.cache(typer.main.get_command)  # it takes 0.06 s of CPU time


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


def run(monkeypatch, capsys, *words):
    """`kagent WORDS...` in this process; what is not a clean exit fails the test."""
    monkeypatch.setattr(sys, "argv", ["kagent", *map(str, words)])
    monkeypatch.setattr(typer.main, "get_command", _command)
    code = 0
    handler = signal.getsignal(signal.SIGINT)
    try:
        main()
    except SystemExit as e:
        code = e.code or 0
    finally:
        signal.signal(signal.SIGINT, handler)
    printed = capsys.readouterr()
    return Ended(code, printed.out, printed.err)


def stored_run(folder, budget=12, race=None):
    """A run of the toy task in `folder / "runs"`; its folder."""
    search, store = evolution(folder / "task", folder / "runs", budget=budget)
    with store:
        asyncio.run(search.run())
        if race is not None:
            store.race(race)
    return store.folder


def timing(case, us):
    return CaseTiming(case, us, us * 0.99, us * 1.01, 30, 0.5, 100.0, 0.0, baseline_us=100.0)


def race_case(name, candidates, baselines, **more):
    """A case of a race; every ratio's interval is ±1 %."""
    times = {**candidates, **baselines}
    ratios = [
        Ratio(c, o, times[o] / times[c], times[o] / times[c] * 0.99, times[o] / times[c] * 1.01)
        for c in candidates
        for o in times
        if o != c
    ]
    return RaceCase(
        name,
        "float32",
        {"M": 8, "N": 1024},
        {n: timing(name, us) for n, us in candidates.items()},
        {n: timing(name, us) for n, us in baselines.items()},
        tuple(ratios),
        **more,
    )


def made_race(candidate="1", other="0"):
    """`candidate` is faster than torch in one case and slower in another; so is `other`."""
    cases = (
        race_case(
            "hidden_bench_0",
            {candidate: 50.0, other: 60.0},
            {"eager": 120.0, "compile": 100.0, "compile max-autotune": 110.0, "expert": 40.0},
        ),
        race_case(
            "hidden_bench_1",
            {candidate: 100.0, other: 90.0},
            {"eager": 80.0, "compile": 200.0},
            missing={"compile max-autotune": "out of memory"},
        ),
    )
    overall = {
        c: (
            Comparison(o, 1.1, 1.05, 1.15, 0.99),
            Comparison("eager", 1.4, 1.3, 1.5, 1.0),
            Comparison("torch", 1.265, 1.2, 1.3, 1.0),
        )
        for c, o in ((candidate, other), (other, candidate))
    }
    return Race(cases, overall)


def made_final(winner=1):
    return FinalRace((1, 0), winner, made_race())
