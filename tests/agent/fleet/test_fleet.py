"""The parts of a cluster's run that need no cluster."""

import os
import signal
import subprocess
import sys
import threading
import types
from importlib.util import find_spec
from pathlib import Path

import pytest
from commands import run
from kagent.config.settings import load_config
from kagent.evolve.session import kind_here
from kagent.fleet import ray_cluster
from kagent.fleet.fleet import LocalFleet, fleet_of
from kagent.fleet.ray_builders import RayBuilder, read_built, require_same
from kagent.fleet.ray_calls import LONGER, alive
from kagent.fleet.ray_cluster import Node, client_address
from kagent.fleet.ray_fleet import RayFleet, builder_count, judge_cpus
from kagent.fleet.ray_judge import RayLink
from kagent.fleet.slurm import on_ray, run_continues, write_script
from kagent.fleet.worker import task_folder
from kagent_sandbox.data.build import BuildRequest
from kagent_sandbox.data.records import to_json
from kagent_sandbox.data.verdict import Rejected, Stage, Status
from kagent_sandbox.errors import ChildDied, MachineError, UserError


class Failed(Exception):
    pass


class Lost(Failed):
    pass


class Unavailable(Lost):
    pass


class Method:
    def __init__(self, call):
        self._call = call

    def remote(self, *given):
        return lambda: self._call(*given)


class Actor:
    """Stands for a worker's handle: each method gives its answers one after the other."""

    def __init__(self, **answers):
        self.answers = {name: list(found) for name, found in answers.items()}

    def __getattr__(self, name):
        def call(*_):
            left = self.answers[name]
            found = left.pop(0) if len(left) > 1 else left[0]
            if isinstance(found, Exception):
                raise found
            return found

        return Method(call)


def fake_ray(killed=()):
    return types.SimpleNamespace(
        exceptions=types.SimpleNamespace(
            RayActorError=Lost, ActorUnavailableError=Unavailable, RayError=Failed
        ),
        wait=lambda refs, **_: (list(refs), []),
        get=lambda ref: ref(),
        kill=lambda actor, **_: killed.append(actor),
        available_resources=lambda: {"CPU": 3.0},
    )


REQUEST = BuildRequest("source", "f", "cpu", ())
REJECTED = {"rejected": to_json(Rejected(Stage.BUILD, Status.POLICY, "no"))}
UP = {"host": "a", "versions": {"torch": "2"}, "pid": 1}


def test_a_candidate_whose_builder_is_lost_is_built_by_another():
    said, revived = [], threading.Event()

    def say(text):
        said.append(text)

    first = Actor(build=[Lost("gone"), REJECTED], describe=[Unavailable("not yet"), UP])
    builder = RayBuilder(fake_ray(), [first], {"torch": "2"}, say, 9.0)
    builder._revive = lambda actor: (RayBuilder._revive(builder, actor), revived.set())
    assert builder.build(REQUEST).message == "no"
    assert revived.wait(10)
    assert said[0].startswith("a builder was lost")


def test_a_candidate_that_builders_die_of_is_set_aside_and_then_the_machines_are_at_fault():
    def workers(*more):
        return [Actor(build=[a], describe=[UP]) for a in (*[Lost("x")] * 3, *more)]

    known = {"error": "MachineError", "text": "no compiler"}
    with pytest.raises(MachineError, match="no compiler"):
        RayBuilder(fake_ray(), workers(known), {}, print, 9.0).build(REQUEST)
    with pytest.raises(MachineError, match="a file that is known to build does not"):
        RayBuilder(fake_ray(), workers(REJECTED), {}, print, 9.0).build(REQUEST)


def test_a_builder_in_which_python_fails_is_an_error_and_goes_on():
    worker = Actor(build=[Failed("no space left"), REJECTED], describe=[UP])
    builder = RayBuilder(fake_ray(), [worker], {}, print, 9.0)
    with pytest.raises(MachineError, match="the builder's worker failed: no space left"):
        builder.build(REQUEST)
    assert builder.build(REQUEST).message == "no"


def test_builders_that_do_not_come_back_end_the_run():
    with pytest.raises(MachineError, match=r"no builder has come back.*KAGENT_CLUSTER_WAIT"):
        RayBuilder(fake_ray(), [], {}, print, 0.1).build(REQUEST)


def test_who_waits_for_workers_gives_up_once_they_are_closed():
    """At the end of a session: what Ctrl-C ends does not wait for a cluster that is gone."""
    ray = fake_ray()
    ray.wait = lambda refs, **_: ([], list(refs))
    builder = RayBuilder(ray, [Actor(build=[REJECTED])], {}, print, 900.0)
    link = RayLink(ray, Actor(ask=[{}], describe=[UP]), {}, print, 900.0)
    builder.close()
    link.close()
    for wait in (
        lambda: builder.build(REQUEST),
        lambda: link.ask("check", {}, [], None),
        lambda: link.ask("open", {}, [], None),
    ):
        with pytest.raises(ChildDied, match="was closed"):
            wait()


def test_a_builder_with_other_versions_is_not_used():
    require_same(UP, {"torch": "2"})
    with pytest.raises(MachineError, match="host a has torch 2, and the judge's has 3"):
        require_same(UP, {"torch": "3"})


def test_errors_of_workers_keep_their_kind():
    with pytest.raises(ChildDied, match="gone"):
        read_built({"error": "ChildDied", "text": "gone"})


def test_a_judge_is_waited_for_and_its_words_are_passed_on():
    said, progress = [], []
    worker = Actor(
        describe=[Unavailable("restarting"), UP],
        open=[{"ok": {"name": "cpu"}, "pid": 7}],
        ask=[{"ok": 1, "said": ["a line"]}, {"error": "MachineError", "text": "no"}, Lost("x\ny")],
    )
    link = RayLink(fake_ray(), worker, {}, said.append, 9.0)
    assert link.ask("open", {}, [], None) == {"name": "cpu"}
    assert link.pid == 7
    assert link.ask("noise", {}, [], progress.append) == 1
    assert progress == ["a line"]
    assert said == [f"waiting for a judge to start on the cluster, 9 s at most: {LONGER}"]
    with pytest.raises(MachineError, match="no"):
        link.ask("check", {}, [], None)
    with pytest.raises(ChildDied, match="worker was lost: y"):
        link.ask("check", {}, [], None)
    worker.answers["ask"] = [Failed("Traceback\nValueError: no")]
    with pytest.raises(MachineError, match="the judge's worker failed: ValueError: no"):
        link.ask("check", {}, [], None)


def test_a_judge_that_is_stopped_is_killed(monkeypatch):
    killed = []
    ray = fake_ray(killed)
    ray.wait = lambda refs, **_: ([], list(refs))
    link = RayLink(ray, Actor(ask=[{}], said=[[]]), {}, print, 9.0)
    with pytest.raises(ChildDied, match="has not answered for"):
        link.ask("check", {}, [], None)
    assert len(killed) == 1


def test_workers_that_do_not_start_are_an_error_that_says_what_is_free():
    said = []
    ray = fake_ray()
    ray.wait = lambda refs, **_: ([], list(refs))
    with pytest.raises(MachineError, match=r"free there: 3 CPU, 0 GPU.*KAGENT_CLUSTER_WAIT"):
        alive(ray, Actor(describe=[UP]), "a judge", said.append, 0.1)
    (line,) = said
    assert line.startswith("waiting for a judge to start on the cluster, 0 s at most: ray status")
    assert "KAGENT_CLUSTER_WAIT" in line
    with pytest.raises(MachineError, match="no module named kagent"):
        alive(
            fake_ray(),
            Actor(describe=[Lost("trace\nno module named kagent")]),
            "a judge",
            print,
            9.0,
        )


@pytest.mark.parametrize(
    ("cpus", "jobs", "found"),
    [
        *[((8, 4), None, [8]), ((8,), None, [7]), ((8,), 4, [4]), ((2,), 4, [1])],
        *[((0, 2), None, [1]), ((8, 4, 2), None, [8, 4]), ((8, 4), None, [8, 3])],
    ],
)
def test_judges_of_the_cpu_have_nodes_to_themselves(cpus, jobs, found):
    there = [Node("h", c, 0, {}) for c in cpus]
    assert judge_cpus(there, jobs, len(found)) == found


BUILDER = {"kagent-role": "builder"}


@pytest.mark.parametrize(
    ("judges", "found"), [(1, [4]), (2, [4, 2]), (3, [16, 4, 1])], ids=["one", "two", "all nodes"]
)
def test_nodes_for_builders_are_left_to_them(judges, found):
    there = [Node("b", 16, 0, BUILDER), Node("j", 4, 0, {}), Node("j", 2, 0, {})]
    assert judge_cpus(there, None, judges) == found


def test_builders_are_as_many_as_there_is_room_for():
    small, large = Node("b", 3, 0, BUILDER), Node("j", 16, 0, {})
    assert builder_count([small, large], 19) == 3
    assert builder_count([small, large], 2) == 2
    assert builder_count([large], 6) == 6
    assert builder_count([large, Node("g", 8, 4, {})], 0) == 6
    assert builder_count([small, Node("g", 64, 2, {})], 60) == 1
    assert builder_count([large], 0) == 1


def test_a_cluster_without_cpus_is_refused():
    with pytest.raises(MachineError, match="has 1 CPUs"):
        judge_cpus([Node("h", 1, 0, {})], None)


@pytest.mark.skipif(not find_spec("ray"), reason="Ray is not installed: pip install 'kagent[ray]'")
def test_keys_do_not_reach_a_cluster_that_is_started_here(monkeypatch):
    seen = {}
    monkeypatch.setattr(ray_cluster, "_connect", lambda *_: seen.update(os.environ))
    keys = {"OPENAI_API_KEY": "x", "AWS_SECRET_ACCESS_KEY": "x", "HF_TOKEN": "x"}
    for name, value in {**keys, "RAY_AUTH_TOKEN_PATH": "/x"}.items():
        monkeypatch.setenv(name, value)
    ray_cluster.connect("ray")
    assert not keys.keys() & seen.keys()
    assert "RAY_AUTH_TOKEN_PATH" in seen
    assert keys.keys() <= os.environ.keys()


def test_addresses():
    assert client_address("ray://head") == "ray://head:10001"
    assert client_address("ray://10.0.0.1:7") == "ray://10.0.0.1:7"
    assert load_config(on="ray://head:1").on == "ray://head:1"
    for wrong in ("slum", "ray:", "ray://", "ray://a/b"):
        with pytest.raises(UserError, match="expected local, ray, ray"):
            load_config(on=wrong)


def test_the_cluster_decides_on_the_kind_of_device(monkeypatch):
    there = [Node("a", 8, 0, {}), Node("b", 8, 2, {"ray.io/accelerator-type": "H100"})]
    monkeypatch.setattr("kagent.fleet.ray_fleet.connect", lambda _: None)
    monkeypatch.setattr("kagent.fleet.ray_fleet.nodes", lambda _: there)
    assert isinstance(fleet_of(load_config()), LocalFleet)
    assert isinstance(fleet_of(load_config(on="ray")), RayFleet)
    for given, kind in (
        ({}, "gpu"),
        ({"accelerator": "H100"}, "gpu"),
        ({"accelerator": "cpu"}, "cpu"),
        ({"lang": "cpp"}, "cpu"),
    ):
        assert kind_here(load_config(on="ray", **given), "x") == kind
    for given, said in (
        ({"on": "ray", "accelerator": "B200"}, "a GPU of type B200, and the Ray cluster"),
        ({"on": "ray", "accelerator": "H100", "lang": "cpp"}, "give one of the two"),
        ({"accelerator": "H100"}, "give --on ray, too"),
    ):
        with pytest.raises(UserError, match=said):
            kind_here(load_config(**given), "x")


def test_a_task_s_files_are_written_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    files = {"task.toml": b"a", "reference.py": b"b"}
    folder = task_folder(files)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == files
    before = (folder / "task.toml").stat().st_mtime_ns
    assert task_folder(files) == folder
    assert (folder / "task.toml").stat().st_mtime_ns == before
    assert task_folder({**files, "task.toml": b"c"}) != folder


def test_a_batch_script_runs_the_same_command_on_ray(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["evolve", "softmax", "--on", "slurm", "--budget", "20"]
    monkeypatch.setattr(sys, "argv", ["kagent", *words])
    done = run(monkeypatch, capsys, *words)
    assert done.code == 0, done.err
    script = tmp_path / "kagent-softmax.sbatch"
    text = script.read_text()
    assert "-m kagent evolve softmax --on ray --budget 20" in text
    assert "more+=(--resume latest)" in text
    assert "--open-mode=append" in text  # Slurm's default empties the log of a job queued again
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    again = run(monkeypatch, capsys, *words)
    assert (again.code, "move it away first" in again.err) == (2, True)
    assert on_ray(["--on=slurm", "x", "slurm"]) == ["--on=ray", "x", "slurm"]


SRUN = """
import os, signal, subprocess, sys
assert sys.argv[1:3] == ["--export=ALL", "--kill-on-bad-exit=1"]
task = subprocess.Popen(sys.argv[3:], start_new_session=True)
signal.signal(signal.SIGTERM, lambda *_: os.killpg(task.pid, signal.SIGTERM))
status = task.wait()
try:
    os.killpg(task.pid, signal.SIGKILL)  # as Slurm does with what is left of a task
except ProcessLookupError:
    pass
sys.exit(status if status >= 0 else 128 - status)
"""
SCONTROL = """
if [ "$1" = show ]; then echo one; else echo "$@" >> log; fi
"""
STANDS_FOR_RAY = """
[ "$1" = symmetric-run ] || exit 1
while [ "$1" != -- ]; do shift; done
shift; "$@"; status=$?
echo "ray has ended" >> log; exit $status
"""
STANDS_FOR_KAGENT = """
import os, pathlib, signal, sys, time

ends = iter(range(int(os.environ["SIGNALS"]))[::-1])

def end(*_):
    os.write(1, b"told to end\\n")  # print would fail if the signal came while it prints
    if next(ends):
        return
    time.sleep(0.3)
    print("kept", file=open("log", "a"))
    sys.exit(130)

if sys.argv[1] == "-c":
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
words = " ".join(sys.argv[1:])
print(os.environ["SRUN_CPUS_PER_TASK"], "cores:", words, file=open("log", "a"))
run = pathlib.Path(sys.argv[sys.argv.index("--runs") + 1], "softmax-1")
run.mkdir(parents=True, exist_ok=True)
(run / "run.json").touch()
signal.signal(signal.SIGTERM, end)
os.write(1, b"started\\n")
for _ in range(600):  # a signal that comes just before a sleep is handled after it
    time.sleep(0.1)
"""


def test_a_job_near_its_end_keeps_its_run_and_is_queued_again_to_go_on(tmp_path, monkeypatch):
    """Programs of Slurm, of Ray and kagent itself are a few lines here; the script is real."""
    programs, job = tmp_path / "bin", tmp_path / "job"
    programs.mkdir()
    job.mkdir()
    for name, interpreter, text in (
        ("srun", sys.executable, SRUN),
        ("scontrol", "/bin/sh", SCONTROL),
        ("ray", "/bin/bash", STANDS_FOR_RAY),
        ("python", sys.executable, STANDS_FOR_KAGENT),
    ):
        (programs / name).write_text(f"#!{interpreter}\n{text}\n")
        (programs / name).chmod(0o755)
    (job / "runs" / "softmax-2").mkdir(parents=True)
    (job / "runs" / "softmax-2" / "run.json").touch()  # another job's
    monkeypatch.chdir(job)
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    words = ["evolve", "softmax", "--on", "slurm"]
    write_script(words, run_continues(Path("runs")), job / "x.sbatch")
    environment = {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "one",
        "SLURM_NNODES": "1",
        "SLURM_CPUS_PER_TASK": "8",
    }
    # The time is nearly over; the same after as many turns as are allowed; a user cancels the job,
    # also then.
    late, ends = signal.SIGUSR1, signal.SIGTERM
    for signals, restarts in (((late,), 0), ((late,), 20), ((ends,), 1), ((late, ends), 1)):
        environment |= {"SLURM_RESTART_COUNT": str(restarts), "SIGNALS": str(len(signals))}
        with subprocess.Popen(
            ["bash", "x.sbatch"], env=environment, stdout=subprocess.PIPE, text=True
        ) as script:
            assert script.stdout.readline() == "started\n"
            for number in signals:
                script.send_signal(number)
                assert script.stdout.readline() == "told to end\n"
            assert script.wait(30) == 130
    command = "8 cores: -m kagent evolve softmax --on ray --runs runs/slurm-7"
    ended = ["kept", "ray has ended"]
    log = (job / "log").read_text().splitlines()
    again = [f"{command} --resume latest", *ended]
    assert log == [command, *ended, "requeue 7", *again, *again, *again]
    assert [p.name for p in job.glob(".kagent*")] == []


TURN = """
from kagent.fleet.worker import undo_ray
from kagent_sandbox.process.device_lock import DeviceLock
undo_ray()
lock = DeviceLock("toy-of-ray")
with lock.turn("work"):
    print(lock.turns()[0][1])
"""


def test_a_judge_on_a_cluster_has_the_device_under_kagents_name():
    words = [sys.executable, "-c", TURN, "default_worker.py", "--node-ip-address=10.0.0.1"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert said == "kagent on Ray\n"
