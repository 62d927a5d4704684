from dataclasses import replace

import pytest
from kagent.runs.final_race import choose_finalists, winner
from kagent.runs.lineage import Facts, Lineage
from kagent_sandbox.data.race import Race
from kagent_sandbox.data.verdict import Comparison
from synthetic_lineages import candidate, passed


def lineage(*times):
    return Lineage(candidate(i, f"x = {i}", passed({"short": t})) for i, t in enumerate(times))


def ids(candidates):
    return [c.id for c in candidates]


def test_those_close_to_the_incumbent_race():
    assert ids(choose_finalists(lineage(100.0, 101.0, 130.0, 100.5, 99.5, 101.5))) == [0, 4, 3]
    assert ids(choose_finalists(lineage(100.0, 120.0))) == [0]
    assert choose_finalists(Lineage()) == []


def test_the_same_work_does_not_race_itself():
    facts = Facts("t", "work", 1, 0.1)
    twins = Lineage(replace(c, facts=facts) for c in lineage(100.0, 100.1))
    assert ids(choose_finalists(twins)) == [0]


def comparison(against, ratio, p_faster):
    return Comparison(against, ratio, ratio, ratio, p_faster)


@pytest.mark.parametrize(("p_faster", "expected"), [(0.94, 0), (0.96, 1)])
def test_only_a_clearly_faster_one_beats_the_incumbent(p_faster, expected):
    race = Race(
        (),
        {
            "0": (comparison("1", 0.97, 0.01), comparison("torch", 1.2, 1.0)),
            "1": (comparison("0", 1.03, p_faster), comparison("torch", 1.23, 1.0)),
        },
    )
    assert winner(race, choose_finalists(lineage(100.0, 100.1))) == expected


def test_an_incumbent_that_fails_on_hidden_cases_cannot_win():
    finalists = choose_finalists(lineage(100.0, 100.1, 100.2))
    race = Race(
        (),
        {
            "1": (comparison("2", 0.9, 0.0), comparison("torch", 1.1, 1.0)),
            "2": (comparison("1", 1.1, 1.0), comparison("torch", 1.2, 1.0)),
        },
    )
    assert winner(race, finalists) == 2
    assert winner(Race((), {}), finalists) is None
