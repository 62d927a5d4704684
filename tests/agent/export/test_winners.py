"""Which candidates may be exported, decided from stored runs alone."""

import json
from dataclasses import replace

import pytest
from kagent.export.winners import find_winner
from kagent.runs.final_race import FinalRace
from kagent_sandbox.data.verdict import Comparison, Rejected, Stage, Status
from kagent_sandbox.errors import RunError, UserError
from simulated_evolution import stored_run
from stored_events import execute
from synthetic_races import synthetic_final, synthetic_race


def refused(folder, name=None, **more):
    with pytest.raises(UserError) as e:
        find_winner(folder.parent, name or folder.name, **more)
    return str(e.value)


def rewrite(folder, **changes):
    """run.json with other values."""
    path = folder / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture
def raced(tmp_path):
    folder = stored_run(tmp_path, budget=6, race=synthetic_final())
    rewrite(folder, task_folder=str(tmp_path / "task"), task_digest=digest(tmp_path))
    return folder


def digest(tmp_path):
    from kagent_sandbox.data.task import load_task

    return load_task(tmp_path / "task").digest


def test_the_winner_of_the_final_race(raced):
    winner = find_winner(raced.parent, raced.name)
    assert winner.candidate.id == 1
    assert winner.id.startswith("toy_")
    assert len(winner.id) == len("toy_12345678")
    assert winner.versus_torch.ratio == 1.265
    assert winner.origin.run == raced.name
    assert winner.origin.path[0].startswith("seed")
    assert set(winner.choice) == {"short", "middle", "long"}


def test_another_finalist_by_its_id(raced):
    assert find_winner(raced.parent, f"{raced.name}:0").candidate.id == 0
    assert "took no part" in refused(raced, f"{raced.name}:2")
    assert "RUN:ID" in refused(raced, f"{raced.name}:best")


def test_a_run_without_a_final_race_is_not_verified(tmp_path):
    folder = stored_run(tmp_path, budget=4)
    execute(folder, ("DELETE FROM events WHERE kind = 'race'",))
    rewrite(folder, task_folder=str(tmp_path / "task"), task_digest=digest(tmp_path))
    text = refused(folder)
    assert "not been raced" in text
    assert f"kagent evolve {tmp_path.resolve()}/task --resume {folder.name}" in text


def test_a_run_of_another_version_of_kagent_and_of_its_task_is_judged_by_todays(raced, tmp_path):
    assert find_winner(raced.parent, raced.name).is_of_todays_task
    rewrite(raced, version="0.0.9")
    with (tmp_path / "task" / "reference.py").open("a") as file:
        file.write("# another version\n")
    winner = find_winner(raced.parent, raced.name)
    assert winner.candidate.id == 1
    assert winner.task.digest == digest(tmp_path)
    assert not winner.is_of_todays_task
    assert winner.origin.kagent == "0.0.9"


def test_a_run_whose_task_is_gone(raced, tmp_path):
    (tmp_path / "task" / "task.toml").unlink()
    with pytest.raises(RunError, match="no task toy on this machine"):
        find_winner(raced.parent, raced.name)


def final_with(**changes):
    race = synthetic_race()
    return FinalRace((1, 0), changes.pop("winner", 1), replace(race, **changes))


def stored(tmp_path, race):
    folder = stored_run(tmp_path, budget=4, race=race)
    rewrite(folder, task_folder=str(tmp_path / "task"), task_digest=digest(tmp_path))
    return folder


def test_a_tie_is_not_exported_unless_asked_for(tmp_path):
    tie = {"1": (Comparison("torch", 1.05, 0.98, 1.12, 0.9),)}
    folder = stored(tmp_path, final_with(overall=tie))
    assert "TIE, 1.050× (95 %: 0.980–1.120)" in refused(folder)
    assert find_winner(folder.parent, folder.name, allow_slower=True).versus_torch.ratio == 1.05


def test_a_winner_that_loses_to_torch(tmp_path):
    slow = {"1": (Comparison("torch", 0.9, 0.85, 0.95, 0.0),)}
    folder = stored(tmp_path, final_with(overall=slow))
    text = refused(folder)
    assert "is not FASTER than torch on hidden cases: SLOWER, 0.900× (95 %: 0.850–0.950)" in text
    assert "--allow-slower" in text
    assert find_winner(folder.parent, folder.name, allow_slower=True).versus_torch.ratio == 0.9


def test_a_finalist_that_failed_in_the_race(tmp_path):
    out = {"1": Rejected(Stage.MEASURE, Status.INCORRECT_NUMERICAL, "no")}
    race = final_with(failed=out, overall={"0": synthetic_race().overall["0"]}, winner=0)
    folder = stored(tmp_path, race)
    assert "failed in it (INCORRECT_NUMERICAL)" in refused(folder, f"{folder.name}:1")


def test_a_race_that_nobody_came_through(tmp_path):
    folder = stored(tmp_path, final_with(overall={}, winner=None))
    assert "no candidate came through" in refused(folder)


def test_a_race_without_torch(tmp_path):
    alone = {"1": (Comparison("0", 1.1, 1.0, 1.2, 0.99),)}
    folder = stored(tmp_path, final_with(overall=alone))
    assert "no baseline of torch" in refused(folder)
