"""SIGKILL of any role of a real run, and Ctrl-C: nothing is left behind, and the run goes on."""

import os
import re
import time

import pytest
from doubling_task import PARALLEL, PLAIN, REFERENCE, TASK, kernel_of_passes
from evolve_process import EvolveProcess, command
from kagent.runs.manifest import list_runs
from kagent.runs.store import RunStore
from kagent_sandbox.process import process_tree

pytestmark = [
    pytest.mark.timeout(400),  # the only limit on waiting: a run beside others takes its time
    pytest.mark.usefixtures("uncompiled", "brief_timing", "warm_processes", "orphans_come_here"),
]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("double")
    (folder / "task.toml").write_text(re.sub(r"  { name = \"long\".*\n", "", TASK))
    (folder / "reference.py").write_text(REFERENCE)
    (folder / "cpp_parallel.py").write_text(kernel_of_passes(PARALLEL + PLAIN))
    return folder


@pytest.fixture
def run(task, tmp_path, request):
    tier = getattr(request, "param", "auto")
    run = EvolveProcess(task, tmp_path, tier=tier)
    yield run
    run.process.kill()
    run.process.wait()


CHILDREN = ["builder", "builder's keeper", "launcher", "launcher's keeper"]


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("run", ["auto", "T1"], indirect=True)
def test_children_and_then_the_agent_are_killed(run):
    run.wait_until(r"^#0 ")
    for role in CHILDREN:
        run.kill(role)
        time.sleep(0.5)
    run.process.kill()
    run.process.communicate()
    run.assert_nothing_left()
    (folder,) = list_runs(run.runs)
    with RunStore.open(folder, write=False) as store:
        assert len(store.history().lineage) >= 1


@pytest.mark.nightly
def test_killed_servers_leave_nothing_behind(run):
    """The run goes on with others in their place. It ends when every judge is killed at once."""
    run.wait_until(r"^#0 ")
    for roles in (("launchers' server",), ("builders' server", "judge")):
        for role in roles:
            run.kill(role)
        run.wait_until(r"^#\d+ ")
    while run.process.poll() is None:
        run.kill("judge")
    said = "".join(run.process.communicate())
    assert run.process.returncode == 1
    assert re.search("resume( with)?: +kagent evolve", said, re.IGNORECASE)
    run.assert_nothing_left()


@pytest.mark.usefixtures("own_cache")  # without baselines
def test_killed_while_baselines_are_measured(run):
    """The judge is busy then, and does not listen."""
    while not any("baseline_worker" in command(p) for p in process_tree.descendants(os.getpid())):
        assert run.process.poll() is None, run.process.stderr.read()
        time.sleep(0.05)
    run.process.kill()
    run.process.communicate()
    run.assert_nothing_left()
