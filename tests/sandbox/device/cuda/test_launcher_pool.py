"""Launchers made ahead, with scripted processes instead of a GPU's."""

import subprocess
import sys
import threading

import pytest
from kagent_sandbox.device.cuda.launcher_pool import AHEAD, SHARED, LauncherPool
from kagent_sandbox.errors import ChildDied, DeviceError


class ChildHandle:
    def __init__(self, owner):
        self._owner = owner
        self.exit = None
        self.may_end = threading.Event()
        self.may_end.set()

    def wait(self, timeout_s):
        return self.exit

    def close(self):
        self.may_end.wait(20.0)
        self._owner.events.append(f"ended {self._owner.number}")


class Process:
    """A connection to a process that comes up when it is waited for, or fails."""

    def __init__(self, number, events, fails=False):
        self.number = number
        self.events = events
        self.fails = fails
        self.dead = False
        self.child = ChildHandle(self)
        self.pid = None

    def receive(self, doing, limit_s):
        if self.fails:
            raise DeviceError("no context")
        self.events.append(f"up {self.number}")
        return 1000 + self.number

    def kill(self):
        if not self.dead:
            self.dead = True
            self.events.append(f"killed {self.number}")


class Machine:
    def __init__(self, failing=()):
        self.events = []
        self.made = []
        self.failing = set(failing)
        self.spares = LauncherPool(self.connect, lambda: self.events.append("freed"))

    def connect(self):
        number = len(self.made)
        self.events.append(f"begun {number}")
        self.made.append(Process(number, self.events, number in self.failing))
        return self.made[-1]


@pytest.fixture
def machine():
    made = Machine()
    yield made
    made.spares.close()


def test_the_next_one_comes_up_between_two_candidates(machine):
    """What a candidate waits for was begun when the one before was done."""
    spares = machine.spares
    spares.begin()
    spares.wait_until_idle()
    assert machine.events == ["begun 0", "up 0"]
    first = spares.take()
    spares.begin(least=1)
    spares.wait_until_idle()  # before its times count
    assert machine.events[2:] == ["begun 1", "up 1"]
    spares.end(first)
    spares.wait_ended()
    assert set(machine.events[4:]) == {"begun 2", "ended 0"}
    machine.events.clear()
    second = spares.take()  # its check: no wait, and nothing new is begun
    spares.begin(least=1)
    assert (second.number, machine.events) == (1, [])
    spares.wait_until_idle()
    assert machine.events == ["up 2"]


def test_no_more_are_made_than_wanted_and_never_two_at_once(machine):
    for _ in range(5):
        machine.spares.begin()
    assert len(machine.made) == 1
    for _ in range(5):
        machine.spares.wait_until_idle()
        machine.spares.begin()
    assert len(machine.made) == AHEAD


def test_fewer_are_kept_where_the_device_is_shared(machine):
    for _ in range(AHEAD):
        machine.spares.begin()
        machine.spares.wait_until_idle()
    machine.spares.share()
    assert machine.events[-1] == f"killed {AHEAD - 1}"
    machine.spares.end(machine.spares.take())
    machine.spares.begin()
    machine.spares.wait_until_idle()
    machine.spares.begin()
    assert len(machine.made) == AHEAD + SHARED


def test_nothing_is_idle_before_what_was_ended_is_gone(machine):
    spares = machine.spares
    connection = spares.take()
    connection.child.may_end.clear()
    spares.end(connection)
    assert connection.dead
    waiting = threading.Thread(target=spares.wait_until_idle)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    connection.child.may_end.set()
    waiting.join(20.0)
    assert not waiting.is_alive()
    assert "ended 0" in machine.events


def test_one_that_has_ended_already_is_not_ended_again(machine):
    connection = machine.spares.take()
    connection.kill()
    machine.spares.end(connection)
    machine.spares.wait_ended()
    assert "ended 0" not in machine.events


def test_one_that_dies_while_it_waits_is_passed_over(machine):
    spares = machine.spares
    for _ in range(2):
        spares.begin()
        spares.wait_until_idle()
    machine.made[0].child.exit = "died"
    assert spares.take().number == 1
    assert "killed 0" in machine.events


def test_one_that_does_not_come_up_is_made_once_more_with_memory_freed():
    machine = Machine(failing=[0])
    machine.spares.begin()
    assert machine.spares.take().number == 1
    assert machine.events == ["begun 0", "killed 0", "freed", "begun 1", "up 1"]
    machine.spares.close()


def test_two_that_do_not_come_up_are_the_machine_s_failure():
    machine = Machine(failing=[0, 1])
    with pytest.raises(DeviceError, match="no context"):
        machine.spares.take()
    machine.spares.close()


def test_a_spare_that_fails_does_not_fail_the_candidate_in_the_lane():
    machine = Machine(failing=[1])
    machine.spares.take()
    machine.spares.begin()
    machine.spares.wait_until_idle()
    assert "killed 1" in machine.events
    assert machine.spares.take().number == 2
    machine.spares.close()


def test_one_that_does_not_end_is_the_machine_s_failure(machine):
    def stays():
        raise ChildDied("a supervisor did not end its child within 30 s")

    connection = machine.spares.take()
    connection.child.close = stays
    machine.spares.end(connection)
    with pytest.raises(ChildDied, match="did not end"):
        machine.spares.wait_until_idle()


@pytest.mark.nightly
def test_what_launchers_are_forked_from_leaves_the_driver_alone():
    """CUDA cannot be used in a fork of a process that has started the driver."""
    code = """
import importlib, threading
import torch

def mapped():
    with open("/proc/self/maps") as maps:
        return "libcuda.so" in maps.read()

before = mapped()
from kagent_sandbox.device.cuda import backend
for name in backend._PRELOAD:
    importlib.import_module(name)
assert mapped() == before
assert threading.active_count() == 1
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
