"""Who runs when, where contenders of native code have processes of their own."""

import os
import signal
from pathlib import Path

import pytest
from handmade_candidates import HEADER, compiled, plan_for, write_task
from kagent_sandbox.data.build_case import build_case
from kagent_sandbox.data.task import load_task
from kagent_sandbox.data.verdict import Stage
from kagent_sandbox.device.cpu.backend import CpuBackend
from kagent_sandbox.judge.arena.session import Arenas, CandidateRejected, LauncherSession
from kagent_sandbox.judge.check.checker import place_plan

COUNTS = (
    HEADER
    + """
static int calls = 0;
extern "C" void scale(const float*, float* y, int64_t rows, int64_t cols, int64_t) {
  ++calls;
  for (int64_t i = 0; i < rows * cols; ++i) y[i] = calls;
}
"""
)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return load_task(write_task(tmp_path_factory.mktemp("scale")))


@pytest.fixture(scope="module")
def backend():
    with CpuBackend() as made:
        yield made


def test_contenders_apart_share_no_process_and_only_one_of_them_runs(task, backend):
    case = task.cpu.check[0]
    digest, binary = compiled(COUNTS)
    plan = plan_for(build_case(task, case), digest)
    arenas = Arenas(backend)
    arena = arenas.at_least(1 << 20)
    placements = [
        *place_plan(task, case, plan, arena, count=1, prefix="a", owner="a"),
        *place_plan(task, case, plan, arena, count=1, prefix="b", owner="b"),
    ]
    session = LauncherSession(
        backend, arena, {digest: binary}, Stage.MEASURE, apart={"b": {digest: binary}}
    )
    with session:
        session.prepare(placements, case.name)
        pids = [session._launchers[owner]._child.pid() for owner in ("", "b")]
        for turn in (1, 2):
            for placement, running, stopped in zip(placements, pids, reversed(pids), strict=True):
                session.run(placement, case.name)
                assert state_of(running) != "T"
                assert state_of(stopped) == "T"
                with session.paused():
                    assert state_of(running) == state_of(stopped) == "T"
                    assert placement.outputs()[0].unique().tolist() == [turn]
    arenas.close()


def test_who_dies_in_anothers_turn_is_to_blame(task, backend):
    """A process may end, or refuse to stop, after it has answered: that is no fault of the next."""
    case = task.cpu.check[0]
    digest, binary = compiled(COUNTS)
    plan = plan_for(build_case(task, case), digest)
    arenas = Arenas(backend)
    arena = arenas.at_least(1 << 20)
    mine, theirs = (
        place_plan(task, case, plan, arena, count=1, prefix=side, owner=side)[0] for side in "ab"
    )
    binaries = {digest: binary}
    apart = {"b": binaries}
    with LauncherSession(backend, arena, binaries, Stage.MEASURE, apart=apart, rest="a") as session:
        session.prepare([mine, theirs], case.name)
        session.run(mine, case.name)
        os.kill(session._launchers[""]._child.pid(), signal.SIGKILL)
        with pytest.raises(CandidateRejected) as rejected:
            session.run(theirs, case.name)
        assert rejected.value.owner == "a"
    arenas.close()


def state_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
