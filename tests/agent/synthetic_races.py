"""Synthetic races: made of given times, nothing was measured."""

from kagent.runs.final_race import FinalRace
from kagent_sandbox.data.race import Race, RaceCase, Ratio
from kagent_sandbox.data.verdict import CaseTiming, Comparison


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


def synthetic_race(candidate="1", other="0"):
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


def synthetic_final(winner=1):
    return FinalRace((1, 0), winner, synthetic_race())
