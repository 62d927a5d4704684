"""Turns on a device: order, who shares, what dies, who is told."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import pytest
from kagent_sandbox.device.detect import gpu_uuid, has_gpu
from kagent_sandbox.errors import MachineError
from kagent_sandbox.process.device_lock import CPU, DeviceLock, LockClosed

HOLD = """
import sys
from kagent_sandbox.process.device_lock import DeviceLock
with DeviceLock("toy-0").turn(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def locks(tmp_path, monkeypatch):
    monkeypatch.setenv("KAGENT_LOCKS", str(tmp_path / "locks"))
    return tmp_path / "locks" / "toy-0"


class Asking:
    """A thread that asks for a turn, and keeps it until it is told to end it."""

    def __init__(self, mode, order=None, name=""):
        self.told, self.done = [], threading.Event()
        self.waits, self.has = threading.Event(), threading.Event()
        self.lock = DeviceLock("toy-0", self._wait)
        self.thread = threading.Thread(target=self._ask, args=(mode, order, name), daemon=True)
        self.thread.start()

    def _wait(self, text):
        self.told.append(text)
        self.waits.set()

    def _ask(self, mode, order, name):
        with self.lock.turn(mode):
            if order is not None:
                order.append(name)
            self.has.set()
            self.done.wait(30)

    def end(self):
        self.done.set()
        self.thread.join(30)


def tickets(folder):
    return [p.name for p in folder.glob("0*")]


def wait_for(folder, count):
    deadline = threading.Event()
    for _ in range(1000):
        if len(tickets(folder)) == count:
            return
        deadline.wait(0.01)
    raise AssertionError(tickets(folder))


def test_timings_have_the_device_alone_and_in_the_order_in_which_they_asked(locks):
    order = []
    first = Asking("timing", order, "first")
    assert first.has.wait(30)
    rest = []
    for i, name in enumerate(("second", "third", "fourth")):
        rest.append(Asking("timing", order, name))
        wait_for(locks, i + 2)
    assert not any(r.has.is_set() for r in rest)
    first.end()
    for each in rest:
        assert each.has.wait(30)
        each.end()
    assert order == ["first", "second", "third", "fourth"]
    assert tickets(locks) == []


def test_work_is_shared_and_a_timing_that_waits_is_not_overtaken(locks):
    one, two = Asking("work"), Asking("work")
    assert one.has.wait(30)
    assert two.has.wait(30)
    timing = Asking("timing")
    wait_for(locks, 3)
    late = Asking("work")
    wait_for(locks, 4)
    one.end()
    assert not timing.has.is_set()
    two.end()
    assert timing.has.wait(30)
    assert not late.has.is_set()
    timing.end()
    assert late.has.wait(30)
    late.end()


@pytest.mark.parametrize("mode", ["timing", "work"])
def test_a_process_that_is_killed_loses_its_turn_and_is_named_before(mode, locks):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    with holder:
        asking = Asking("timing")
        assert asking.waits.wait(30)
        assert DeviceLock("toy-0").awaited()
        assert not asking.has.is_set()
        os.kill(holder.pid, signal.SIGKILL)
        assert asking.has.wait(30)
    assert asking.told == [f"the device is shared: waiting for process {holder.pid} (-c {mode})"]
    asking.end()
    assert tickets(locks) == []
    assert not DeviceLock("toy-0").awaited()


def test_a_judge_learns_that_another_one_of_its_process_wants_to_time(locks):
    """As those of an export have it. Builds of the same process are no reason to rest."""
    judge = DeviceLock("toy-0")
    with judge.turn("work"):
        build, check = Asking("work"), DeviceLock("toy-0")
        assert build.has.wait(30)
        with check.turn("work"):
            assert not judge.awaited()
            timing = Asking("timing")
            wait_for(locks, 4)
            while not timing.lock._own:  # its file is there before its text
                time.sleep(0.001)
            assert judge.awaited()
            assert check.awaited()
            assert not timing.lock.awaited()
        build.end()
    assert timing.has.wait(30)
    timing.end()
    assert not judge.awaited()


def test_nobody_waits_for_a_lock_that_is_closed(locks):
    lock = DeviceLock("toy-0")
    with DeviceLock("toy-0").turn("timing"):
        lock.close()
        with pytest.raises(LockClosed), lock.turn("timing"):
            pass
    assert tickets(locks) == []


def test_devices_do_not_wait_for_each_other():
    with ExitStack() as turns:
        for name in ("gpu-1", "gpu-2", CPU):
            turns.enter_context(DeviceLock(name).turn("timing"))


def test_a_folder_that_cannot_be_used_says_what_to_set(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KAGENT_LOCKS", str(tmp_path / "file"))
    with pytest.raises(MachineError, match="KAGENT_LOCKS"), DeviceLock(CPU).turn("work"):
        pass


def test_a_gpu_has_a_name_of_its_own():
    assert len(gpu_uuid(0)) == (40 if has_gpu() else 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["/opt/x/bin/kagent", "evolve", "softmax", "--budget"], "kagent evolve softmax"),
        (["/opt/x/bin/kagent", "bench", "--task", "softmax", "a.py"], "kagent bench softmax"),
        (["/opt/x/lib/kagent/__main__.py", "evolve", "softmax"], "kagent evolve softmax"),
        (["/opt/kagent/lib/kagent/campaign/worker.py", "7"], "kagent campaign worker"),
        (["/opt/x/time.py", "softmax"], "time.py softmax"),
        ([""], "python"),
    ],
)
def test_who_waits_is_told_of_the_command(words, said, monkeypatch):
    monkeypatch.setattr(sys, "argv", words)
    lock = DeviceLock("toy-0")
    with lock.turn("work"):
        assert lock.turns() == [(os.getpid(), said)]


def test_a_turn_whose_ticket_is_removed_is_none(locks):
    """Others do not see it, and have the device, too."""
    with pytest.raises(MachineError, match="somebody has removed this lock"):  # noqa: SIM117
        with DeviceLock("toy-0").turn("timing"):
            shutil.rmtree(locks)


@pytest.mark.parametrize("all_of_it", [True, False])
def test_whoever_waits_with_a_ticket_that_is_removed_is_told(locks, all_of_it):
    found, removed = [], threading.Event()

    def ask():
        try:
            with DeviceLock("toy-0").turn("timing"):  # where the holder's ticket was first to go
                removed.wait()
        except MachineError as e:
            found.append(str(e))

    command = [sys.executable, "-c", HOLD, "timing"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        thread = threading.Thread(target=ask)
        thread.start()
        while len(tickets(locks)) < 2:
            time.sleep(0.01)
        if all_of_it:
            shutil.rmtree(locks)
        else:
            (locks / sorted(tickets(locks))[1]).unlink()
        removed.set()
        thread.join()
        holder.kill()
    assert "KAGENT_LOCKS" in found[0]
