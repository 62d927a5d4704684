"""Judging from files alone: on a copy, on another machine, in pieces, and with processes killed."""

import contextlib
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import warm_python
from asktell_runs import (
    FACTS,
    ask,
    divergence,
    history_of,
    judge,
    kernel,
    make_task,
    reply,
    start,
    state_of,
    tell,
    toy_machine,  # noqa: F401 - a fixture
)
from kagent.asktell import judging, open_run, refusals
from kagent.config.settings import load_config
from kagent.runs.events import Progress, Recorded, Stop
from kagent.runs.manifest import read_manifest
from kagent.runs.store import RunStore
from kagent_sandbox.data.verdict import Passed, Status
from kagent_sandbox.device.cpu.facts import cpu_facts
from kagent_sandbox.device.detect import has_gpu
from kagent_sandbox.errors import DeviceError, RunError, UserError
from simulated_machine import FakeBuilder, FakeJudge

pytestmark = pytest.mark.usefixtures("toy_machine")


def queued(folder, count=4):
    """A run with seeds and `count` answers that wait."""
    run = start(folder)
    ask(run, count)
    tell(run, *((n, reply(2**n, 1 + n % 4)) for n in range(count)))
    return run


def verdicts(run):
    return [(c.proposal, c.verdict) for c in history_of(run).lineage]


def test_a_run_gets_its_device_from_the_first_that_judges_it(tmp_path):
    run = queued(tmp_path)
    before = read_manifest(run)
    assert before.environment == {}
    assert before.device == "cpu (not measured yet)"
    judge(run)
    with RunStore.open(run, write=False) as store:
        assert store.manifest.device == "Toy 1"
        assert store.manifest.environment["key"] == FACTS.key
        assert store.history().baselines == {"us": {}}
    assert read_manifest(run) == before, "run.json is written once"
    ask(run)
    tell(run, (4, reply(32, 2)))
    assert judge(run).left == 0


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            replace(FACTS, key="Toy 1, driver 8"),
            "measured on Toy 1, driver 7, and this is Toy 1, dr",
        ),
        (replace(FACTS, kind="gpu", target="sm_80"), r"a run for cpu, and this is .* \(sm_80\)"),
    ],
)
def test_another_device_is_refused(tmp_path, toy_machine, other, words):  # noqa: F811
    run = queued(tmp_path)
    judge(run)
    tell(run, (None, kernel(32, 2)))
    toy_machine(other)
    before = history_of(run).events
    with pytest.raises(RunError, match=words):
        judge(run)
    assert history_of(run).events == before


def test_a_copy_is_judged_where_nobody_knows_the_task_but_beside_it(tmp_path):
    run = queued(tmp_path / "home")
    runs = tmp_path / "box" / "runs"
    shutil.copytree(run, runs / run.name)
    shutil.move(tmp_path / "home" / "toy", tmp_path / "gone")
    with pytest.raises(RunError, match=r"no task toy on this machine: copy its folder .* to "):
        judge(runs / run.name)
    make_task(runs / "toy")
    assert judge(runs / run.name).left == 0
    (runs / "toy" / "reference.py").write_text("# changed")
    with pytest.raises(RunError, match="was changed since, so new figures would not compare"):
        judge(runs / run.name)


def test_there_may_be_nothing_to_judge(tmp_path, monkeypatch):
    run = queued(tmp_path)
    judge(run)

    def unwanted(*_):
        raise AssertionError("no machine is needed")

    monkeypatch.setattr(judging, "open_machine", unwanted)
    judged = judge(run)
    assert (judged.stop, judged.recorded, judged.left) == (None, (), 0)


def test_what_no_build_passes_starts_no_judge(tmp_path, toy_machine, monkeypatch):  # noqa: F811
    class Builder(FakeBuilder):
        def __init__(self, *_, **__):
            super().__init__()

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    def unwanted(*_):
        raise AssertionError("no machine is needed")

    monkeypatch.setattr(refusals, "Builder", Builder)
    toy_machine(replace(FACTS, key=cpu_facts().key))
    run = queued(tmp_path)
    judge(run)
    before = len(history_of(run).lineage)
    broken = kernel(64, 1, note="1  # BROKEN")
    tell(run, (0, "Prose alone."), (None, broken), (None, kernel(2, 3)), (1, "More prose."))
    with monkeypatch.context() as patched:
        patched.setattr(judging, "open_machine", unwanted)
        with pytest.raises(AssertionError):
            judge(run)  # the third one passes its build
    assert len(history_of(run).lineage) == before + 2
    judged = judge(run)
    assert judged.left == 0
    tell(run, (0, "Prose once more."), (None, kernel(64, 1, note="2  # BROKEN")))
    monkeypatch.setattr(judging, "open_machine", unwanted)
    judged = judge(run)
    assert (judged.stop, judged.left, len(judged.recorded)) == (Stop.ANSWERED, 0, 2)
    statuses = [c.verdict.status for c in [*judged.history.lineage][-2:]]
    assert statuses == [Status.NO_KERNEL, Status.COMPILE_ERROR]
    assert divergence(run) is None


def test_the_race_comes_when_it_is_asked_for(tmp_path):
    run = queued(tmp_path)
    assert judge(run).history.race is None
    judged = judge(run, race=True)
    assert judged.recorded == ()
    assert judged.history.race.winner == judged.history.lineage.incumbent.id
    assert judge(run, race=True).stop is None, "it was raced already"


def test_what_a_deadline_leaves_is_judged_the_next_time(tmp_path, toy_machine):  # noqa: F811
    whole = queued(tmp_path / "whole")
    judge(whole)
    run = queued(tmp_path / "parts")
    toy_machine(judge=FakeJudge(0.4))
    stops = []
    for _ in range(20):
        judged = judge(run, deadline_s=time.monotonic() + 1.0)
        assert judged.left == 6 - len(verdicts(run))
        stops.append(judged.stop)
        if not judged.left:
            break
    assert stops[0] is Stop.TIME
    assert stops[-1] is Stop.ANSWERED
    assert history_of(run).stop is Stop.ANSWERED
    assert verdicts(run) == verdicts(whole)


def test_a_deadline_holds_while_baselines_are_measured(tmp_path, toy_machine, monkeypatch):  # noqa: F811
    run = queued(tmp_path)
    with judging.open_machine(None, "cpu", None, 0, print) as (machine, facts, environment):
        slow = replace(machine, prepare=lambda say: time.sleep(0.5) or {"us": {}})
    opened = contextlib.nullcontext((slow, facts, environment))
    monkeypatch.setattr(judging, "open_machine", lambda *_: opened)
    judged = judge(run, deadline_s=time.monotonic() + 0.05)
    assert (judged.stop, judged.left) == (Stop.TIME, 6)
    assert history_of(run).stop is Stop.TIME
    monkeypatch.undo()
    toy_machine()
    assert judge(run).left == 0


def test_a_deadline_leaves_room_for_letting_go():
    assert judging.deadline_of(100.0, 480.0) == 580.0 - judging.CLOSING_S
    assert judging.deadline_of(100.0, 4.0) == 102.0


def test_verdicts_until_the_machine_failed_are_kept(tmp_path, toy_machine):  # noqa: F811
    class Failing(FakeJudge):
        def measure(self, *arguments, **options):
            if len(self.measured) == 3:
                raise DeviceError("the device fell off the bus")
            return super().measure(*arguments, **options)

    run = queued(tmp_path)
    toy_machine(judge=Failing())
    with pytest.raises(DeviceError, match="fell off the bus"):
        judge(run)
    assert len(verdicts(run)) == 3
    assert history_of(run).stop is Stop.FAILED
    toy_machine()
    assert judge(run).recorded == (3, 4, 5)
    assert divergence(run) is None


def test_working_time_is_that_of_sessions(tmp_path, toy_machine):  # noqa: F811
    run = queued(tmp_path)
    toy_machine(judge=FakeJudge(0.02))
    judge(run)
    worked = history_of(run).elapsed_s
    assert worked > 6 * 0.02
    time.sleep(0.3)
    ask(run)
    tell(run, (4, reply(32, 2)))
    assert history_of(run).elapsed_s == worked


def test_each_verdict_is_committed_and_said_as_it_comes(tmp_path):
    run = queued(tmp_path)
    seen = []

    class Watching(list):
        def append(self, event):
            if isinstance(event, Recorded):
                seen.append(len(history_of(run).lineage))
            super().append(event)

    events = Watching()
    judge(run, events=events)
    assert seen == [1, 2, 3, 4, 5, 6]
    assert any(isinstance(e, Progress) for e in events)


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_a_run_for_a_gpu_is_not_judged_without_one(tmp_path):
    run = open_run.new_run("softmax", load_config(runs=tmp_path), "sm_90a")
    assert [p.name.partition("_")[0] for p in state_of(run).proposals].count("triton") >= 1
    with pytest.raises(UserError, match=r"needs an NVIDIA GPU \(sm_90a\).*tell --queue"):
        judge(run)


PROGRAM = f"""{warm_python.PROGRAM}
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from pathlib import Path
from kagent.asktell import judging
from asktell_runs import judge, opener
from simulated_machine import FakeBuilder, FakeJudge

judging.open_machine = opener(builder=FakeBuilder(0.05), judge=FakeJudge(0.02))
print("ready", flush=True)
judge(Path(sys.argv[1]))
"""


@pytest.mark.nightly
def test_killed_at_random_moments_it_ends_as_if_it_had_not_been(tmp_path):
    whole = queued(tmp_path / "whole", 12)
    judge(whole)
    run = queued(tmp_path / "killed", 12)
    rng, recorded = random.Random(), []
    for attempt in range(40):
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(run)], stdout=subprocess.PIPE, text=True
        )
        with process:
            assert process.stdout.readline() == "ready\n"
            # later and later: a slow machine gets there, too, and in a few sessions
            time.sleep(rng.uniform(0.0, 0.35 + attempt / 20))
            process.send_signal(signal.SIGKILL)
        now = verdicts(run)
        assert now[: len(recorded)] == recorded, "a verdict was lost"
        recorded = now
        if not history_of(run).pending:
            break
    assert recorded == verdicts(whole)
    assert len({c.id for c in history_of(run).lineage if isinstance(c.verdict, Passed)}) > 10
