"""A GPU whose kernels fault, hang and are killed, and whose driver has bad days."""

import contextlib
import os
import signal
import threading
import time

import pytest
from kagent_sandbox.data.build import Contender
from kagent_sandbox.data.verdict import Rejected, Status
from kagent_sandbox.errors import DeviceError, DeviceWedged
from test_gpu_judge import REFERENCE, SEED, TASK, build, source

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

LOAD = "        x = tl.load(x_ptr + row * step + at, mask=at < columns)\n"
ENDLESS = source().replace(
    LOAD,
    "        while tl.load(x_ptr, volatile=True).to(tl.float32) != 12345.0:\n            pass\n"
    + LOAD,
)
FAULTS = {
    "ILLEGAL_ADDRESS": source().replace("tl.store(y_ptr", "tl.store(y_ptr + (1 << 45)"),
    "ASSERT|LAUNCH_FAILED|ILLEGAL_INSTRUCTION": source().replace(
        LOAD, '        tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], '
        "dtype=tl.int32, is_pure=False, pack=1)\n" + LOAD,
    ),
}  # fmt: skip
# Works while it is made ready, and faults in the middle of the race; `.item()` keeps it out of
# graphs, so that Python counts its calls.
FAULTY_EXPERT = """
calls = 0

def faulty(*, x):
    global calls
    calls += 1
    at = torch.zeros(1, dtype=torch.int64, device=x.device)
    if calls > 20:
        at += 1 << 50
    float(x.flatten()[:1].item())
    return torch.take(x, at) + 0 * x

def experts():
    return {"faulty": faulty}
"""


def made(folder, reference=REFERENCE):
    from kagent_sandbox.data.task import load_task
    from kagent_sandbox.device.cuda.backend import GpuBackend
    from kagent_sandbox.judge.judge import Judge

    (folder / "task.toml").write_text(TASK)
    (folder / "reference.py").write_text(reference)
    return Judge(load_task(folder), GpuBackend(), SEED, {"bench": 100.0})


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    with contextlib.closing(made(tmp_path_factory.mktemp("double"))) as judge:
        yield judge


@pytest.fixture(scope="module")
def good(judge, builder):
    return build(judge, builder, source())


def is_right(judge, good):
    return not isinstance(judge.check(good), Rejected)


@pytest.mark.parametrize("error", FAULTS)
def test_after_a_fault_the_next_candidate_is_judged_right(judge, builder, good, error):
    import re

    verdict = judge.check(build(judge, builder, FAULTS[error]))
    assert verdict.status is Status.GPU_FAULT, verdict
    assert re.search(error, verdict.message), verdict
    assert "_double" in verdict.message
    assert is_right(judge, good)


def test_after_a_hang_the_next_candidate_is_judged_right(judge, builder, good, monkeypatch):
    from kagent_sandbox.judge.arena import session

    endless = build(judge, builder, ENDLESS)
    monkeypatch.setattr(session, "RUN_LIMIT_S", 2.0)
    began = time.monotonic()
    verdict = judge.check(endless)
    took_s = time.monotonic() - began
    assert verdict.status is Status.TIMEOUT, verdict
    assert "within 2.0 s" in verdict.message
    print(f"killed and found healthy {took_s - 2.0:.2f} s after its limit, start-up included")
    assert is_right(judge, good)


def test_a_launcher_that_somebody_else_kills_is_not_the_kernel_s_fault(judge, good, monkeypatch):
    from kagent_sandbox.device.cuda.launcher import GpuLauncher

    run, killed = GpuLauncher.run, []

    def once(self, key, *, limit_s):
        if not killed:
            killed.append(self._connection.pid)
            os.kill(self._connection.pid, signal.SIGKILL)
        run(self, key, limit_s=limit_s)

    monkeypatch.setattr(GpuLauncher, "run", once)
    assert is_right(judge, good)
    assert len(killed) == 1


@pytest.fixture
def bad_days(monkeypatch):
    """Sets what the driver says to the next requests of a kind, instead of doing them."""
    from kagent_sandbox.device.cuda.driver import blame_of
    from kagent_sandbox.device.cuda.launcher import Connection
    from kagent_sandbox.device.interface import LaunchFailed

    days = []
    ask = Connection.ask

    def flaky(self, request, **rest):
        if days and request["do"] == days[0][0]:
            _, error = days.pop(0)
            if not self.untrusted:
                raise DeviceError(error)
            raise LaunchFailed(Status.RUNTIME_ERROR, error, blame=blame_of(error))
        return ask(self, request, **rest)

    monkeypatch.setattr(Connection, "ask", flaky)
    return days


@pytest.mark.parametrize(
    "day",
    [
        ("open", "CUDA_ERROR_INVALID_HANDLE mapping the arena"),
        ("prepare", "CUDA_ERROR_OUT_OF_MEMORY: the binary does not load"),
        ("prepare", "CUDA_ERROR_UNKNOWN: the binary does not load"),
        ("run", "CUDA_ERROR_ECC_UNCORRECTABLE"),
    ],
)
def test_what_the_driver_does_once_is_tried_again(judge, good, bad_days, day):
    bad_days.append(day)
    assert is_right(judge, good)
    assert bad_days == []


def test_what_it_does_twice_counts(judge, good, bad_days):
    bad_days += [("prepare", "CUDA_ERROR_UNKNOWN: the binary does not load")] * 2
    verdict = judge.check(good)
    assert isinstance(verdict, Rejected)
    assert "CUDA_ERROR_UNKNOWN" in verdict.message
    bad_days += [("run", "CUDA_ERROR_ECC_UNCORRECTABLE")] * 2
    with pytest.raises(DeviceError, match="no kernel can cause that"):
        judge.check(good)
    assert is_right(judge, good)


def test_a_context_that_fails_once_is_made_again(tmp_path, monkeypatch):
    from kagent_sandbox.device.cuda.launcher import Connection

    send, failed = Connection.send, []

    def once(self, request, **rest):
        if request["do"] == "context" and not failed:
            failed.append(self)
            request = {**request, "device": 99}
        send(self, request, **rest)

    monkeypatch.setattr(Connection, "send", once)
    with contextlib.closing(made(tmp_path)) as judge:
        judge.health()
        arena = judge.backend.arena(1 << 20)
        judge.backend.launcher(arena).close()
        arena.close()
    assert len(failed) == 1


def test_a_device_that_answers_wrongly_stops_it_all(judge, builder, good, monkeypatch):
    from kagent_sandbox.device.cuda import backend as gpu_backend

    monkeypatch.setattr(gpu_backend, "_HEALTHY", [1.0, 2.0])
    with pytest.raises(DeviceWedged, match=r"no longer computes.*resume the run"):
        judge.check(build(judge, builder, FAULTS["ILLEGAL_ADDRESS"]))
    monkeypatch.undo()
    assert is_right(judge, good)


def test_a_baseline_that_faults_in_a_race_is_nobody_s_fault(tmp_path, builder):
    from kagent_sandbox.judge.timing.race_baselines import RaceBaselines

    reference = REFERENCE.partition("def experts")[0] + FAULTY_EXPERT
    with contextlib.closing(made(tmp_path, reference)) as judge:
        built = build(judge, builder, source())
        race_baselines = RaceBaselines.on(judge.backend, judge.task)
        race = judge.race([Contender("one", built, {})], hidden=True, race_baselines=race_baselines)
    assert not race.failed
    assert "eager" in race.cases[0].baselines
    assert "failed twice beside candidates" in race.cases[0].missing["faulty"]


def test_a_judge_gives_back_all_but_contexts_where_others_work(tmp_path, builder):
    import torch

    with contextlib.closing(made(tmp_path)) as judge:
        assert not isinstance(judge.check(build(judge, builder, source())), Rejected)
        kept = torch.empty(3 << 30, dtype=torch.uint8, device=judge.backend.device)
        del kept
        before = torch.cuda.mem_get_info()[0]
        judge.give_back()
        judge.backend.wait_until_idle()
        assert judge.arena_bytes == 0
        assert torch.cuda.memory_reserved() < 1 << 30
        assert torch.cuda.mem_get_info()[0] >= before + (3 << 30)
        assert not isinstance(judge.check(build(judge, builder, source())), Rejected)


def test_a_killed_judge_leaves_nothing_on_the_device(tmp_path, builder):
    from kagent_sandbox.judge.client import JudgeClient
    from kagent_sandbox.process import process_tree

    (tmp_path / "task.toml").write_text(TASK)
    (tmp_path / "reference.py").write_text(REFERENCE)
    with (
        contextlib.closing(made(tmp_path)) as here,
        JudgeClient(tmp_path, "gpu", SEED) as client,
    ):
        good, endless = build(here, builder, source()), build(here, builder, ENDLESS)
        assert not isinstance(client.check(good), Rejected)
        judged = threading.Thread(target=client.check, args=[endless])
        judged.start()
        time.sleep(3.0)
        left = process_tree.descendants(client.pid)
        os.kill(client.pid, signal.SIGKILL)
        deadline = time.monotonic() + 15.0
        while not all(map(process_tree.ended, left)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert all(map(process_tree.ended, left))
        judged.join(120.0)
        assert not judged.is_alive()
        assert not isinstance(client.check(good), Rejected)
