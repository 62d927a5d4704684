"""A device is one folder: `toy_device` beside this file, which no file of the product names."""

import contextlib
import dataclasses
import os
from pathlib import Path

import pytest
from handmade_candidates import BODY, GOOD, built, write_task
from kagent_sandbox.confine.policy import Tier
from kagent_sandbox.data.build import Contender
from kagent_sandbox.data.task import load_task
from kagent_sandbox.data.verdict import Passed, Rejected, Status
from kagent_sandbox.device import table
from kagent_sandbox.errors import UserError
from kagent_sandbox.judge.client import JudgeClient
from kagent_sandbox.judge.judge import Judge

SEED = 13
INFO = "toy_device-1.0.dist-info"


@pytest.fixture(scope="module", autouse=True)
def _installed(tmp_path_factory):
    """The package, as pip would leave it: a folder on the path, and its entry points."""
    site = tmp_path_factory.mktemp("site")
    (site / INFO).mkdir()
    (site / INFO / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-device\nVersion: 1.0\n")
    (site / INFO / "entry_points.txt").write_text(f"[{table.GROUP}]\ntoy = toy_device.entry\n")
    (site / "toy_device").symlink_to(Path(__file__).parent / "toy_device")
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        patch.setenv("PYTHONPATH", f"{site}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        patch.setenv("XDG_CACHE_HOME", str(cache))
        yield
    table.find_device.cache_clear()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("scale"))


@pytest.fixture(scope="module")
def task(folder):
    return load_task(folder)


@pytest.fixture
def judge(task):
    from toy_device.backend import CALLS

    CALLS.clear()
    backend = table.find_device("toy").open(0, products=False)
    with contextlib.closing(Judge(task, backend, SEED, {"wide": 150.0, "tall": 150.0})) as judge:
        yield judge


def test_a_toy_device_checks_and_times_a_candidate(judge, task):
    """It shares one launcher, draws all inputs anew and never asks caches to settle, as its traits
    say, although its memory is a CPU's.
    """
    from toy_device.backend import CALLS, OP_US

    quick, twice = built(task, SEED, GOOD), built(task, SEED, GOOD, zero_first=True)
    twice = dataclasses.replace(twice, source_hash="twice", tree_hash="twice")
    assert judge.find_noise().factor == 1.0
    errors = judge.check(quick)
    assert not isinstance(errors, Rejected), errors
    CALLS.clear()
    passed = judge.measure(quick, errors, Contender("1", twice, {}))
    assert isinstance(passed, Passed), passed
    assert [t.kernel_us for t in passed.timings] == [pytest.approx(OP_US, rel=0.01)] * 2
    assert passed.score == pytest.approx(1.5, rel=0.01)
    assert passed.versus is not None
    assert passed.versus.ratio == pytest.approx(2.0, rel=0.01)
    assert passed.versus.p_faster > 0.99
    assert CALLS["launcher"] == 1
    assert CALLS["sample"] > 30
    assert CALLS["settle"] == 0


def test_a_case_that_takes_much_of_the_memory_is_timed_in_one_place(judge, task, monkeypatch):
    from toy_device.backend import OP_US

    good = built(task, SEED, GOOD)
    judge.find_noise()
    errors = judge.check(good)
    roomy = judge._meter().arena_bytes(good, (), None)
    traits = judge.backend.traits
    single = dataclasses.replace(traits.placements, single_share=0.0)
    monkeypatch.setattr(judge.backend, "traits", dataclasses.replace(traits, placements=single))
    assert 2 * judge._meter().arena_bytes(good, (), None) == roomy
    passed = judge.measure(good, errors, Contender("1", good, {}))
    assert isinstance(passed, Passed), passed
    assert [t.kernel_us for t in passed.timings] == [pytest.approx(OP_US, rel=0.01)] * 2


@pytest.mark.parametrize(
    ("statement", "status"),
    [
        ("y[i * cols + j] = 1;", Status.INCORRECT_NUMERICAL),
        ("y[i * cols + j] = 2 * x[i * step + j]; y[rows * cols] = 0;", Status.TAMPER),
    ],
)
def test_a_toy_device_refuses_what_is_wrong(judge, task, statement, status):
    verdict = judge.check(built(task, SEED, BODY % statement))
    assert isinstance(verdict, Rejected)
    assert verdict.status is status


@pytest.mark.nightly
def test_a_toy_device_is_opened_by_name_in_a_judge_s_process(folder, task, warm_judges):
    good = built(task, SEED, GOOD, race=True)
    with JudgeClient(folder, "toy", SEED) as client:
        assert client.facts.key == "a toy 1"  # its process has the environment that it wants
        assert client.isolation().tier is Tier.T0
        baselines = client.baselines()
        assert baselines.us == {"wide": {"eager": 150.0}, "tall": {"eager": 150.0}}
        errors = client.check(good)
        assert not isinstance(errors, Rejected), errors
        passed = client.measure(good, errors)
        assert isinstance(passed, Passed), passed
        assert passed.score == pytest.approx(1.5, rel=0.01)
        race = client.race([Contender("1", good, {})])
        assert set(race.cases[0].baselines) == {"eager"}
        assert {c.against for c in race.overall["1"]} == {"eager", "torch"}


def test_what_is_there_comes_first(monkeypatch):
    """A device that somebody adds is used where ours are missing, and never in their place."""
    gpu, toy = table.find_device("gpu"), table.find_device("toy")
    found = {
        "cpu": table.find_device("cpu"),
        "gpu": dataclasses.replace(gpu, available=lambda: False),
        "toy": toy,
    }
    monkeypatch.setattr(table, "find_device", found.__getitem__)
    assert table.device_for.__wrapped__("cpu") == "cpu"
    assert table.device_for.__wrapped__("gpu") == "gpu"
    found["toy"] = dataclasses.replace(toy, kind="gpu")
    assert table.device_for.__wrapped__("gpu") == "toy"


def test_an_unknown_device_is_named_with_those_there_are():
    with pytest.raises(UserError, match="no device 'tpu': expected one of cpu, gpu, toy"):
        table.find_device("tpu")
