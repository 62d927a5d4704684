"""SIGKILL of any role of a real run, and Ctrl-C: nothing is left behind, and the run goes on."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from double_task import PARALLEL, PLAIN, REFERENCE, TASK, kernel
from kagent.runs.manifest import list_runs
from kagent.runs.store import RunStore
from kagent_sandbox.confine.libc import prctl
from kagent_sandbox.process import process_tree

SECONDS = 20.0
"""After which nothing may be left; it takes about two."""


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("double")
    # long enough to be timed on a machine that does other things, too
    slow = re.sub(r"  { name = \"long\".*\n", "", TASK).replace("N = 65536", "N = 8388608")
    (folder / "task.toml").write_text(slow)
    (folder / "reference.py").write_text(REFERENCE)
    (folder / "cpp_parallel.py").write_text(kernel(PARALLEL + PLAIN))
    return folder


@pytest.fixture(scope="module", autouse=True)
def orphans_come_here():
    """What outlives its parents becomes this process's child, and so is seen."""
    prctl(36, 1)
    yield
    prctl(36, 0)


class Run:
    """A running `kagent evolve`, and what there was before it."""

    def __init__(self, task, folder, tier, **environment):
        self.scratch = folder / "scratch"
        self.scratch.mkdir()
        self.runs = folder / "runs"
        self.before = set(process_tree.descendants(os.getpid()))
        self.objects = objects()
        words = ["evolve", task, "--lang", "cpp", "--budget", "100", "--runs", self.runs]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kagent", *map(str, words), "--isolation", tier],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(self.scratch), **environment},
        )

    def wait_until(self, seen):
        for line in self.process.stdout:
            if re.search(seen, line):
                return
        raise AssertionError(self.process.stderr.read())

    def roles(self):
        """Process ids by role; of children those that are there at the moment."""
        agent = self.process.pid
        found = {"agent": agent}
        for pid in process_tree.children(agent):
            words = command(pid)
            if "kagent_sandbox.judge.server" in words:
                found["judge"] = pid
                for inner in process_tree.children(pid):
                    if "zygote" in command(inner):
                        found["launchers' server"] = inner
            elif "zygote" in words:
                found["builders' server"] = pid
        for role in ("builder", "launcher"):
            for keeper in process_tree.children(found.get(f"{role}s' server", 0)):
                found[f"{role}'s keeper"] = keeper
                for pid in process_tree.children(keeper):
                    if "init" not in command(pid):
                        found[role] = pid
        return found

    def kill(self, name):
        """Kill a role as soon as it is there, unless the run is over before."""
        deadline = time.monotonic() + 100.0
        while time.monotonic() < deadline and self.process.poll() is None:
            found = self.roles()
            if name in found:
                with contextlib.suppress(ProcessLookupError):  # it was done meanwhile
                    os.kill(found[name], signal.SIGKILL)
                    return
            time.sleep(0.002)
        assert self.process.poll() is not None, f"no {name} came up"

    def left(self):
        """All that is there and was not before."""
        living = [
            f"process {p}: {command(p)}"
            for p in process_tree.descendants(os.getpid())
            if p not in self.before and not process_tree.ended(p)
        ]
        files = [f"file {p}" for p in self.scratch.iterdir() if "inductor" not in p.name]
        return living + files + sorted(objects() - self.objects)

    def assert_nothing_left(self):
        deadline = time.monotonic() + SECONDS
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert left == []


def command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def objects():
    """Mounts, IPC objects and control groups of the host that kagent could have made."""
    found = {f"mount {line}" for line in Path("/proc/self/mountinfo").read_text().splitlines()}
    found |= {f"shared file {p}" for p in Path("/dev/shm").glob("kagent*")}
    for kind in ("shm", "sem", "msg"):
        lines = Path(f"/proc/sysvipc/{kind}").read_text().splitlines()[1:]
        found |= {f"SysV {kind} {' '.join(line.split()[:2])}" for line in lines}
    for root in Path("/sys/fs/cgroup").glob("**/kagent-*"):
        found.add(f"control group {root}")
    return found


@pytest.fixture
def run(task, tmp_path, request):
    tier = getattr(request, "param", "auto")
    run = Run(task, tmp_path, tier)
    yield run
    run.process.kill()
    run.process.wait()


CHILDREN = ["builder", "builder's keeper", "launcher", "launcher's keeper"]


@pytest.mark.slow
@pytest.mark.parametrize("run", ["auto", "T1"], indirect=True)
def test_children_and_then_the_agent_are_killed(run):
    run.wait_until(r"^#0 ")
    for role in CHILDREN:
        run.kill(role)
        time.sleep(0.5)
    run.process.kill()
    run.process.communicate(timeout=60.0)
    run.assert_nothing_left()
    (folder,) = list_runs(run.runs)
    with RunStore.open(folder, write=False) as store:
        assert len(store.history().lineage) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("role", ["builders' server", "launchers' server", "judge"])
def test_a_killed_server_leaves_nothing_behind(run, role):
    """The run goes on with another, or ends and says how to go on; then it is interrupted."""
    run.wait_until(r"^#0 ")
    run.kill(role)
    time.sleep(3.0)
    run.process.send_signal(signal.SIGINT)
    said = "".join(run.process.communicate(timeout=100.0))
    assert run.process.returncode in {1, 130}
    assert re.search("resume( with)?: +kagent evolve", said, re.IGNORECASE)
    run.assert_nothing_left()


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_behind(run):
    run.wait_until("^#0 ")
    run.process.send_signal(signal.SIGINT)
    run.process.communicate(timeout=60.0)
    assert run.process.returncode in {1, 130}  # 1: a busy machine ended it before
    run.assert_nothing_left()


@pytest.mark.slow
def test_killed_while_baselines_are_measured(task, tmp_path):
    """The judge is busy then, and does not listen."""
    run = Run(task, tmp_path, "auto", XDG_CACHE_HOME=str(tmp_path / "cache"))
    deadline = time.monotonic() + 100.0
    while not any("baseline_worker" in command(p) for p in process_tree.descendants(os.getpid())):
        assert time.monotonic() < deadline
        assert run.process.poll() is None, run.process.stderr.read()
        time.sleep(0.01)
    run.process.kill()
    run.process.communicate()
    run.assert_nothing_left()
