"""When the machine fails: real launchers and judges, killed."""

import contextlib
import os
import signal
import threading
import time

import pytest
from handmade_candidates import BODY, GOOD, HEADER, SLOW, built, write_task
from kagent_sandbox.data.task import load_task
from kagent_sandbox.data.verdict import Rejected, Status
from kagent_sandbox.device import health
from kagent_sandbox.device.cpu.backend import CpuBackend
from kagent_sandbox.device.cpu.launcher import CpuLauncher
from kagent_sandbox.device.interface import LaunchFailed
from kagent_sandbox.errors import ChildDied, DeviceError, DeviceWedged, MachineError
from kagent_sandbox.judge import client as judge_client
from kagent_sandbox.judge import judge_process
from kagent_sandbox.judge.client import JudgeClient
from kagent_sandbox.judge.judge import Judge
from kagent_sandbox.process import process_tree

pytestmark = pytest.mark.usefixtures("shared")

SEED = 5
SEGFAULT = BODY % "*(volatile int*)8 = 1;"
ENDLESS = HEADER + (
    'extern "C" void scale(const float* x, float*, int64_t, int64_t, int64_t) '
    "{ while (*(volatile float*)x != 12345.0f) {} }"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("scale"))


@pytest.fixture(scope="module")
def task(folder):
    return load_task(folder)


class Victims(CpuBackend):
    """Launchers whose process is killed from outside, the first `count` of them."""

    count = 0
    status: Status | None = None  # what is raised instead, with blame "machine"
    made = 0

    def launcher(self, arena, **options):
        before = set(process_tree.descendants(os.getpid()))
        launcher = super().launcher(arena, **options)
        self.made += 1
        if self.made <= self.count:
            run = launcher.run

            def killed(key, *, limit_s):
                if self.status is not None:
                    raise LaunchFailed(self.status, "CUDA_ERROR_CONTAINED", blame="machine")
                for pid in process_tree.descendants(os.getpid()):
                    if pid not in before and not process_tree.children(pid):
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                return run(key, limit_s=limit_s)

            launcher.run = killed
        return launcher


@pytest.fixture
def judge(task):
    with contextlib.closing(Judge(task, Victims(), SEED)) as judge:
        yield judge


def test_a_launcher_that_somebody_else_kills_is_not_the_kernel_s_fault(task, judge):
    judge.backend.count = 1
    assert not isinstance(judge.check(built(task, SEED, GOOD)), Rejected)
    assert judge.backend.made == 3  # the second try has two: the check's, and the guest's


def test_a_launcher_that_is_killed_whenever_it_runs_is(task, judge):
    judge.backend.count = 100
    verdict = judge.check(built(task, SEED, GOOD))
    assert verdict.status is Status.RUNTIME_ERROR
    assert "SIGKILL" in verdict.message
    assert judge.backend.made == 2


def test_what_no_kernel_can_cause_is_tried_again_and_then_the_machine_s(task, judge):
    judge.backend.status = Status.GPU_FAULT
    judge.backend.count = 1
    assert not isinstance(judge.check(built(task, SEED, GOOD)), Rejected)
    judge.backend.count = 100
    with pytest.raises(DeviceError, match="CUDA_ERROR_CONTAINED; no kernel can cause that"):
        judge.check(built(task, SEED, GOOD))


def test_a_fault_of_the_kernel_s_own_is_not_tried_again(task, judge):
    verdict = judge.check(built(task, SEED, SEGFAULT))
    assert "SIGSEGV" in verdict.message
    assert "Fatal Python error" not in verdict.message
    assert judge.backend.made == 1
    assert not isinstance(judge.check(built(task, SEED, GOOD)), Rejected)


def test_a_launcher_that_does_not_start_is_made_once_more(task, judge, monkeypatch):
    failures = [MachineError("no context"), None]

    start = CpuLauncher._start

    def flaky(launcher):
        error = failures.pop(0) if failures else None
        if error is not None:
            raise error
        start(launcher)

    monkeypatch.setattr(CpuLauncher, "_start", flaky)
    assert not isinstance(judge.check(built(task, SEED, GOOD)), Rejected)
    failures[:] = [MachineError("no context"), MachineError("no context either")]
    with pytest.raises(MachineError, match="no context either"):
        judge.check(built(task, SEED, GOOD))


@pytest.mark.parametrize(("answers", "good"), [([False, True], True), ([False, False], False)])
def test_health_has_two_tries(answers, good):
    assert health.computes(lambda: answers.pop(0)) is good
    assert answers == []


def test_a_device_that_fails_after_a_fault_is_wedged(task, judge, monkeypatch):
    monkeypatch.setattr(judge.backend, "_fills", lambda: False)
    with pytest.raises(DeviceWedged, match=r"no longer computes.*resume the run"):
        judge.check(built(task, SEED, SEGFAULT))
    monkeypatch.undo()
    assert not isinstance(judge.check(built(task, SEED, GOOD)), Rejected)


def test_a_backend_that_cannot_start_a_process_is_unhealthy():
    backend = CpuBackend()
    assert backend.healthy()
    backend.close()
    assert not backend.healthy()


# -- the judge's own process ---------------------------------------------------------------------


def dying(path, text):
    """A judge that dies while it checks whatever has a binary that holds `text`, `path`.

    It dies as often as there are lines in that file.
    """
    return (
        "-c",
        f"""
import os
from kagent_sandbox.judge import judge
from kagent_sandbox.judge.server import main

check = judge.Judge.check

def fatal(self, built):
    left = open({str(path)!r}).read().split()
    if left and any({text!r} in binary for binary in built.binaries.values()):
        open({str(path)!r}, "w").write(" ".join(left[1:]))
        print("about to die", flush=True)
        os.abort()
    return check(self, built)

judge.Judge.check = fatal
main()
""",
    )


MARKED = GOOD.replace(
    "extern", '__attribute__((used)) static const char mark[] = "deadly";\nextern'
)


@pytest.fixture
def deaths(tmp_path, monkeypatch):
    """Sets how often the judge dies of the marked candidate."""
    path = tmp_path / "deaths"
    path.write_text("")
    monkeypatch.setattr(judge_process, "_SERVER", dying(path, b"deadly"))
    return lambda count: path.write_text(" ".join("x" * count))


def test_a_judge_that_dies_once_is_replaced(folder, task, deaths):
    with JudgeClient(folder, "cpu", SEED) as client:
        first = client.pid
        deaths(1)
        assert not isinstance(client.check(built(task, SEED, MARKED)), Rejected)
        assert client.pid != first
        assert not isinstance(client.check(built(task, SEED, GOOD)), Rejected)


@pytest.mark.nightly
def test_a_candidate_that_two_judges_die_of_is_set_aside(folder, task, deaths, monkeypatch):
    """One candidate after the other, it is the machine."""
    monkeypatch.setattr(judge_client, "MOST_SET_ASIDE", 1)  # each costs two judges
    with JudgeClient(folder, "cpu", SEED) as client:
        deaths(100)
        verdict = client.check(built(task, SEED, MARKED))
        assert verdict.status is Status.RUNTIME_ERROR
        assert "set aside: two judges in a row died" in verdict.message
        assert "signal 6" in verdict.message
        assert "about to die" in verdict.message
        assert not isinstance(client.check(built(task, SEED, GOOD)), Rejected)
        # the first was not in a row with this one
        assert isinstance(client.check(built(task, SEED, MARKED)), Rejected)
        with pytest.raises(ChildDied, match="the machine rather than the kernels"):
            client.check(built(task, SEED, MARKED))


def test_what_a_killed_judge_has_started_dies_with_it(folder, task):
    with JudgeClient(folder, "cpu", SEED, timeout_scale=0.3) as client:
        client.check(built(task, SEED, GOOD))  # all helper processes are up
        judged = threading.Thread(target=client.check, args=[built(task, SEED, ENDLESS)])
        helpers = len(process_tree.descendants(client.pid))
        judged.start()
        while len(process_tree.descendants(client.pid)) <= helpers:
            time.sleep(0.01)
        pid = client.pid
        left = process_tree.descendants(pid)
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 60.0
        while not all(map(process_tree.ended, left)) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert all(map(process_tree.ended, left))
        judged.join(60.0)  # it was asked again, and the kernel has met its limit
        assert not judged.is_alive()


def test_a_wedged_device_is_told_through_the_process(folder, task, monkeypatch):
    broken = (
        "from kagent_sandbox.device.cpu.backend import CpuBackend; "
        "from kagent_sandbox.judge.server import main; "
        "CpuBackend._fills = lambda self: False; main()"
    )
    monkeypatch.setattr(judge_process, "_SERVER", ("-c", broken))
    with JudgeClient(folder, "cpu", SEED) as client:
        assert not isinstance(client.check(built(task, SEED, SLOW)), Rejected)
        with pytest.raises(DeviceWedged, match="no longer computes"):
            client.check(built(task, SEED, SEGFAULT))
        with pytest.raises(DeviceWedged, match="does not compute a known result"):
            client.health()
