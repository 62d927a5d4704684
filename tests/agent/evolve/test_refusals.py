"""What cannot be done is refused before a model is asked, and before the machine is opened."""

import types

import pytest
from asktell_runs import FACTS
from commands import run
from kagent.evolve import open_machine as opening
from kagent.evolve import session
from kagent.fleet import fleet
from kagent.runs.store import RunStore
from kagent.tasks import find_task
from kagent_sandbox.confine.policy import Tier
from kagent_sandbox.device.detect import VISIBLE
from kagent_sandbox.errors import RunError, ToolchainError, UserError
from simulated_evolution import manifest


@pytest.fixture
def evolve(monkeypatch, capsys, tmp_path):
    """`kagent evolve softmax` in a folder of its own, where nothing may be asked or opened."""

    def unwanted(*_, **__):
        raise AssertionError("it should have been refused before")

    monkeypatch.setattr(session, "open_machine", unwanted)
    monkeypatch.setattr(session, "_try_models", unwanted)
    monkeypatch.chdir(tmp_path)

    def command(*words):
        return run(monkeypatch, capsys, "evolve", "softmax", "--lang", "cpp", *words)

    return command


@pytest.fixture
def stored(tmp_path):
    def make(**changes):
        task = find_task("softmax")
        same = {"task": "softmax", "task_digest": task.digest, "lang": "cpp", "proposer": "tune"}
        with RunStore.create(tmp_path / "runs", manifest(**{**same, **changes})) as store:
            store.begin(5)
        return store.folder

    return make


def refused(done, words, error=RunError):
    assert done.code == error.exit_code, done.err
    assert words in done.err
    assert len(done.err.strip().splitlines()) == 1


def test_a_run_without_its_database_is_no_new_run(evolve, stored):
    folder = stored()
    (folder / "lineage.sqlite").unlink()
    before = sorted(folder.iterdir())
    refused(evolve("--resume", folder), "lineage.sqlite is missing")
    assert sorted(folder.iterdir()) == before


def test_a_damaged_run(evolve, stored):
    folder = stored()
    whole = (folder / "lineage.sqlite").read_bytes()
    (folder / "lineage.sqlite").write_bytes(whole.replace(b'"budget":5', b'"budget":7'))
    refused(evolve("--resume", folder), "event 2 is damaged")


def test_a_folder_that_is_no_run(evolve, tmp_path):
    (tmp_path / "runs" / "other").mkdir(parents=True)
    (tmp_path / "runs" / "other" / "lineage.sqlite").touch()
    refused(evolve("--resume", "other"), "no run 'other'")


def test_a_run_that_another_process_works_on(evolve, stored):
    folder = stored()
    with RunStore.open(folder):
        refused(evolve("--resume", folder), "is working on this run")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task": "gelu"}, "a run of gelu, not of softmax"),
        ({"task_digest": "0"}, "was changed since"),
        ({"kind": "gpu", "target": "sm_90a"}, "a run for sm_90a, and this machine would time it"),
    ],
)
def test_a_run_that_does_not_fit(evolve, stored, changes, words):
    refused(evolve("--resume", stored(**changes)), words)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--seed", 7), "began with --seed 0, and --seed 7 was given"),
        (("--configs", 2), "began with --configs 1, and --configs 2 was given"),
        (("--lang", "any"), "began with --lang cpp, and --lang any was given"),
        (("--model", "tiny"), "began with --proposer tune, and --model tiny was given"),
        (("--proposer", "model"), "began with --proposer tune, and --proposer model was given"),
    ],
)
def test_a_flag_that_a_run_has_decided_otherwise(evolve, stored, flags, words):
    refused(evolve("--resume", stored(), *flags), words, UserError)


def test_what_a_run_has_decided_may_be_said_again_and_be_otherwise_for_new_runs(
    evolve, stored, monkeypatch
):
    monkeypatch.setenv("KAGENT_SEED", "7")
    monkeypatch.setenv("KAGENT_CONFIGS", "2")
    monkeypatch.setenv("KAGENT_MODEL", "tiny")
    with pytest.raises(AssertionError, match="should have been refused before"):
        evolve("--resume", stored(), "--proposer", "tune", "--lang", "cpp", "--model", "tiny")


@pytest.mark.parametrize(
    "flag",
    [
        ("--max-cost", 5),
        ("--max-tokens", 5),
        ("--base-url", "http://127.0.0.1:1/v1"),
        ("--temperature", 0.5),
        ("--bandit",),
    ],
)
def test_a_flag_for_models_where_none_is_asked(evolve, flag, monkeypatch):
    says = f"{flag[0]} is about calls of models, and proposals come from tune"
    refused(evolve(*flag), says, UserError)
    monkeypatch.setenv("KAGENT_MAX_COST", "5")
    with pytest.raises(AssertionError, match="should have been refused before"):
        evolve()


def test_a_runs_folder_that_cannot_be_written(evolve, tmp_path):
    (tmp_path / "file").touch()
    said = "file: a file, where a folder was expected"
    refused(evolve("--runs", tmp_path / "file"), said, UserError)
    refused(evolve("--runs", "/proc"), "/proc: cannot be written", UserError)  # not by root either


def test_a_missing_compiler_ends_a_run_before_a_model_is_asked(evolve, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    model = ("--model", "tiny", "--base-url", "http://localhost:9/v1")
    refused(evolve(*model), "install it (apt install g++)", ToolchainError)


def test_more_judges_than_devices_end_a_run_before_a_model_is_asked(evolve):
    given = evolve("--model", "tiny", "--base-url", "http://localhost:9/v1", "--judges", 2)
    refused(given, "--judges 2 needs a device for each, and this machine has 1", UserError)


@pytest.mark.parametrize("where", ["ray", "slurm"])
def test_a_device_of_this_machine_is_no_choice_on_a_cluster(evolve, monkeypatch, where):
    monkeypatch.setenv(VISIBLE, "")
    given = evolve("--on", where, "--device", "cpu")
    refused(given, "--accelerator chooses among those of a cluster", UserError)


def test_prompts_that_cannot_be_used(evolve, tmp_path):
    model = ("--model", "tiny", "--base-url", "http://localhost:9/v1")
    refused(evolve(*model, "--prompts", tmp_path / "none"), "no such folder", UserError)
    refused(evolve("--prompts", tmp_path / "none"), "no such folder", UserError)  # the tuner's
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "task.md.j2").write_text("fine\n{% if %}\n")
    refused(evolve(*model, "--prompts", tmp_path / "own"), "task.md.j2:2: ", UserError)


def test_another_device_is_refused_before_anything_is_measured(monkeypatch, stored):
    class Opened:
        facts = FACTS
        isolation = types.SimpleNamespace(tier=Tier.T1)

        def __init__(self, *_, **__):
            self.ended = False

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.ended = True

        def noise(self):
            raise AssertionError("it should have been refused before")

    class Judge(Opened):
        def isolation(self):
            return types.SimpleNamespace(tier=Tier.T1)

    seen = types.SimpleNamespace(require=lambda: None, canaries=())
    monkeypatch.setattr(fleet, "probe", lambda: seen)
    monkeypatch.setattr(opening, "sound_task", lambda *_: None)
    monkeypatch.setattr(fleet, "Builder", Opened)
    monkeypatch.setattr(fleet, "JudgeClient", Judge)
    other = {"key": "Toy 2, driver 7", "device": "Toy 2"}
    folder = stored(environment=other)
    monkeypatch.setattr(session, "open_machine", opening.open_machine)
    with pytest.raises(RunError, match=r"measured on Toy 2, driver 7, and this is Toy 1"):
        session.evolve("softmax", session.Config(), lambda _: None, folder)
    with pytest.raises(AssertionError, match="refused before"):
        session.evolve("softmax", session.Config(), lambda _: None, stored())
