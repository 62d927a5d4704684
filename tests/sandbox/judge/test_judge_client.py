import dataclasses
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import warm_python
from caches import with_ceilings
from device_holder import cpu_held
from handmade_candidates import BODY, GOOD, SLOW, built, write_task
from hypothesis import given, settings
from hypothesis import strategies as st
from kagent_sandbox.confine.policy import Tier
from kagent_sandbox.data.build import Contender, key_of
from kagent_sandbox.data.records import from_json, to_json
from kagent_sandbox.data.task import load_task
from kagent_sandbox.data.verdict import Passed, Rejected, Stage, Status
from kagent_sandbox.device import table
from kagent_sandbox.errors import ChildDied, TaskError
from kagent_sandbox.judge import judge_process
from kagent_sandbox.judge.client import JudgeClient
from kagent_sandbox.judge.judge_process import JudgeProcess
from kagent_sandbox.judge.packing import Header, pack, unpack
from kagent_sandbox.process import process_tree
from kagent_sandbox.process.device_lock import FOLDER, DeviceLock
from kagent_sandbox.process.environment import for_trusted

pytestmark = pytest.mark.usefixtures("uncompiled", "brief_timing", "warm_judges", "warm_processes")
SEED = 11
SLOWER = SLOW.replace("k < 8", "k < 2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("scale"))


@pytest.fixture(scope="module")
def task(folder):
    return load_task(folder)


@pytest.fixture(scope="module")
def client(folder, measured_once, tmp_path_factory):
    cache = with_ceilings(measured_once, tmp_path_factory.mktemp("own") / "cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        with JudgeClient(folder, "cpu", SEED) as client:
            yield client


@pytest.mark.alone
def test_a_run_from_baselines_to_race(client, task):
    lines = []
    baselines = client.baselines(lines.append)
    assert set(baselines.fastest_us) == {"wide", "tall"}
    assert any("eager" in line for line in lines)
    good = built(task, SEED, GOOD, race=True)
    slow = built(task, SEED, SLOWER, GOOD, race=True)
    errors = client.check(good)
    assert not isinstance(errors, Rejected)
    first = client.measure(good, errors)
    assert isinstance(first, Passed)
    second = client.measure(slow, errors, good, "1")
    assert isinstance(second, Passed)
    assert second.versus is not None
    assert second.versus.against == "1"
    race = client.race([Contender("1", good, {})])
    assert "eager" in race.cases[0].baselines
    assert {c.against for c in race.overall["1"]} >= {"eager", "torch"}


def test_an_impatient_judge_takes_a_candidate_for_hung_sooner(folder, task):
    with JudgeClient(folder, "cpu", SEED, timeout_scale=0.05) as client:
        verdict = client.check(built(task, SEED, BODY % 'while (true) asm volatile("");'))
    assert (verdict.status, verdict.stage) == (Status.TIMEOUT, Stage.CHECK)
    assert "within 0.5 s" in verdict.message


def test_a_judge_and_its_successor_have_the_tier_that_was_asked_for(folder, task):
    with JudgeClient(folder, "cpu", SEED, tier=Tier.T0) as client:
        assert client.isolation().tier is Tier.T0
        os.kill(client.pid, signal.SIGKILL)
        client.check(built(task, SEED, GOOD))
        assert client.isolation().tier is Tier.T0


def test_a_wrong_candidate_is_rejected_through_the_process(client, task):
    verdict = client.check(built(task, SEED, BODY % "y[i * cols + j] = 1;"))
    assert isinstance(verdict, Rejected)
    assert verdict.status is Status.INCORRECT_NUMERICAL


def test_facts_name_the_device(client):
    assert client.facts.kind == "cpu"
    assert client.facts.target == "cpu"
    client.health()


def test_a_judge_waits_for_its_turn_and_says_for_whom(client, task):
    good, told = built(task, SEED, GOOD), []
    waits, answers = threading.Event(), []
    client._link._lock.on_wait = lambda text: (told.append(text), waits.set())
    asking = threading.Thread(target=lambda: answers.append(client.check(good)), daemon=True)
    with cpu_held() as other:
        asking.start()
        assert waits.wait(60)
        assert not answers
        other.stdin.close()
        asking.join(60)
    assert told[0].startswith(f"the device is shared: waiting for process {other.pid}")
    assert not isinstance(answers[0], Rejected)


def test_a_judge_that_is_stopped_is_replaced(folder, task, monkeypatch):
    monkeypatch.setattr("kagent_sandbox.judge.judge_process._LOOK_S", 0.1)
    with JudgeClient(folder, "cpu", SEED) as client:
        first = client.pid
        os.kill(first, signal.SIGSTOP)
        assert not isinstance(client.check(built(task, SEED, GOOD)), Rejected)
        assert client.pid != first


@pytest.mark.parametrize("end", ["kill", "close"])
def test_a_server_of_launchers_that_is_stopped_ends_with_its_judge(folder, end):
    with JudgeClient(folder, "cpu", SEED) as client:
        client.isolation()  # the server has started
        servers = process_tree.children(client.pid)
        assert servers
        for server in servers:
            os.kill(server, signal.SIGSTOP)
            assert process_tree.wait_until_stopped(server)
        getattr(client._link, end)()
    deadline = time.monotonic() + 30
    while not all(map(process_tree.ended, servers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all(map(process_tree.ended, servers))


def test_errors_of_the_user_cross_the_process(tmp_path):
    with pytest.raises(TaskError, match=r"no task\.toml"):
        JudgeClient(tmp_path, "cpu", 0)


def test_a_dead_judge_is_reported_with_its_log(folder, task):
    with JudgeClient(folder, "cpu", SEED) as client:
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(ChildDied, match="signal 9"):
            client.health()
    with JudgeClient(folder, "cpu", SEED) as client:
        incomplete = dataclasses.replace(built(task, SEED, GOOD), plans={})
        verdict = client.check(incomplete)
        assert "not built for case" in verdict.message


@given(st.integers(1, 3))
@settings(max_examples=3, deadline=None)
def test_candidates_survive_the_wire(folder, count):
    task = load_task(folder)
    candidate = built(task, SEED, *[GOOD, SLOW, BODY % ""][:count])
    header, blobs = pack(candidate)
    again = unpack(from_json(Header, to_json(header)), blobs)
    assert again == candidate
    assert key_of(again) == key_of(candidate)


def test_a_judge_may_hold_times_against_eager_torch_alone(folder, task, own_cache):
    with JudgeClient(folder, "cpu", SEED, eager_only=True) as client:
        good = built(task, SEED, GOOD)
        errors = client.check(good)
        assert not isinstance(errors, Rejected)
        passed = client.measure(good, errors)
        assert isinstance(passed, Passed)
        assert all(t.baseline_us for t in passed.timings)
        assert len(list(own_cache.rglob("baselines*.json"))) == 1
        every = client.baselines()
        assert set(every.us["wide"]) > {"eager"}  # measured: what is cached is eager's alone
        assert len(list(own_cache.rglob("baselines*.json"))) == 2


def test_what_is_forked_in_place_of_a_judge_is_what_python_would_start(tmp_path):
    """Of `warm_python`: arguments, environment, descriptors, output, status."""
    report = (
        f"# {warm_python.SERVERS[1]}\n"
        "import os, sys; sys.stdout.write(os.read(int(sys.argv[1]), 10).decode()); "
        "print(sorted(os.environ) == sorted(eval(sys.argv[2])), os.getsid(0) == os.getpid(), "
        "len({*os.listdir('/proc/self/fd')} - {'0', '1', '2', sys.argv[1]})); "  # the listing's own
    )
    env = for_trusted()
    for end, status in (("os._exit(7)", 7), ("os.kill(os.getpid(), 9)", -9), ("1 / 0", 1)):
        read, write = os.pipe()
        os.write(write, b"through it")
        os.close(write)
        with open(tmp_path / "log", "w+") as log:
            process = warm_python.Popen(
                [
                    sys.executable,
                    "-c",
                    f"{report} sys.stdout.flush(); {end}",
                    str(read),
                    repr([*env]),
                ],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[read],
                start_new_session=True,
            )
            os.close(read)
            assert process.wait() == process.poll() == status
            log.seek(0)
            assert log.readline() == "through itTrue True 1\n"


def test_a_judge_that_is_closed_meanwhile_ended():
    judge = JudgeProcess("cpu", take_turns=False)
    judge.close()
    with pytest.raises(ChildDied, match=r"the judge's process ended with status 0$"):
        judge.ask("check", {})


@pytest.mark.parametrize(
    ("alone", "shown", "index"), [(None, None, 3), (lambda i: {"ONLY": f"unit {i}"}, "unit 3", 0)]
)
def test_a_judge_sees_its_own_device_alone_where_there_are_several(
    alone, shown, index, monkeypatch
):
    started, asked = {}, []

    def start(_command, *, env, **_):
        started.update(env)
        return subprocess.Popen(["true"])

    entry = dataclasses.replace(table.find_device("cpu"), alone=alone)
    monkeypatch.setattr(judge_process, "find_device", lambda _: entry)
    monkeypatch.setattr(
        judge_process, "subprocess", SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)
    )
    judge = JudgeProcess("cpu", index=3, take_turns=False)
    monkeypatch.setattr(judge, "_exchange", lambda _verb, request, *_: asked.append(request))
    judge.ask("open", {"device": "cpu"})
    judge.close()
    assert started.get("ONLY") == shown
    assert asked == [{"device": "cpu"}, {"device": "cpu", "index": index}]


def test_what_a_judge_imports_needs_no_turn_on_the_device(monkeypatch, tmp_path):
    """Others could not be timed for the seconds that it takes."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setattr(
        judge_process, "_SERVER", ("-c", "import sys; sys.stdin.read()")
    )  # nobody is asked
    judge, asked = JudgeProcess("cpu"), queue.SimpleQueue()
    monkeypatch.setattr(judge, "_exchange", lambda verb, *_: asked.put(verb))
    opening = threading.Thread(target=judge.ask, args=("open", {"device": "cpu"}), daemon=True)
    with DeviceLock(table.find_device("cpu").unit_name(0)).turn("timing"):
        opening.start()
        assert asked.get(timeout=60) == "load"
        assert asked.empty()
    opening.join(60)
    assert asked.get(timeout=60) == "open"
    judge.close()


def test_a_judge_that_works_ends_as_it_is_closed(folder):
    """Its answer is waited for in another thread, which does not keep the connection open."""
    with JudgeClient(folder, "cpu", SEED) as client:
        answers, first = [], client.pid

        def ask():
            try:
                client.noise()
            except ChildDied as e:
                answers.append(str(e))

        asking = threading.Thread(target=ask)
        asking.start()
        while asking.is_alive() and client._link._lock.turns() == []:
            time.sleep(0.01)
    asking.join(60)
    assert not asking.is_alive()
    assert answers in ([], ["the judge was closed"])  # it may have been done
    assert client.pid == first
