"""What happens to a build when something else on the machine goes wrong."""

import dataclasses
import os
import signal
import threading
import time

import pytest
from kagent_sandbox.builder import health
from kagent_sandbox.builder.client import Builder
from kagent_sandbox.data.build import Built
from kagent_sandbox.data.verdict import Rejected, Status
from kagent_sandbox.errors import ChildDied, MachineError
from kagent_sandbox.process import process_tree

REQUEST = health.known_request("cpu")


@pytest.fixture(scope="module")
def builder():
    with Builder() as builder:
        assert isinstance(builder.build(REQUEST), Built)
        yield builder


class Killer(threading.Thread):
    """Kills children of the fork-server (supervisors, or what they watch) as they come."""

    def __init__(self, builder, most, *, supervisors):
        super().__init__(daemon=True)
        self.killed, self._most, self._end = 0, most, threading.Event()
        self._server, self._supervisors = builder._server, supervisors

    def run(self):
        seen = set()
        while self.killed < self._most and not self._end.wait(0.001):
            for supervisor in process_tree.children(self._server.pid):
                below = process_tree.children(supervisor)
                victims = (
                    [supervisor] if self._supervisors else process_tree.descendants(supervisor)
                )
                if below and supervisor not in seen and self.killed < self._most:
                    seen.add(supervisor)
                    self.killed += 1
                    for victim in victims:
                        process_tree.send(victim, signal.SIGKILL)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self._end.set()
        self.join(10)


@pytest.mark.parametrize("supervisors", [True, False])
def test_a_build_whose_process_somebody_kills_is_done_once_more(builder, supervisors):
    with Killer(builder, 1, supervisors=supervisors) as killer:
        built = builder.build(REQUEST)
    assert killer.killed == 1
    assert isinstance(built, Built), built


def test_where_no_build_survives_the_machine_is_at_fault(builder):
    with (
        Killer(builder, 99, supervisors=True),
        pytest.raises(MachineError, match="known to build does not build here"),
    ):
        builder.build(REQUEST)
    assert isinstance(builder.build(REQUEST), Built)


def test_a_fork_server_that_is_killed_has_a_successor(builder):
    os.kill(builder._server.pid, signal.SIGKILL)
    assert isinstance(builder.build(REQUEST), Built)


def test_a_fork_server_that_is_stopped_has_a_successor(builder, monkeypatch):
    """Neither does it hang, nor is the candidate blamed for the time."""
    monkeypatch.setattr("kagent_sandbox.process.child_handle._SILENT_S", 0.1)
    stopped = builder._server.pid
    os.kill(stopped, signal.SIGSTOP)
    found = builder.build(dataclasses.replace(REQUEST, host_limit_s=1.0))
    assert isinstance(found, Built), found
    assert builder._server.pid != stopped
    assert process_tree.ended(stopped)


def test_a_supervisor_that_is_stopped_stays_no_longer_than_its_server():
    with Builder() as builder:
        server = builder._server.pid
        child = builder._server.spawn(wall_limit_s=60.0).pid()
        below = process_tree.children(server)
        (supervisor,) = [p for p in below if child in process_tree.descendants(p)]
        os.kill(supervisor, signal.SIGSTOP)
        assert process_tree.wait_until_stopped(supervisor)
    assert all(map(process_tree.ended, (server, supervisor, child)))


def with_first_line(line):
    return dataclasses.replace(REQUEST, source=f"{line}\n{REQUEST.source}")


def test_a_process_that_ends_itself_is_judged_after_its_tries(builder):
    """The known file builds, so it is the candidate's doing."""
    found = builder.build(with_first_line("import os; os.kill(os.getpid(), 9)"))
    assert isinstance(found, Rejected)
    assert found.status is not Status.TIMEOUT


def test_a_disk_that_is_full_for_every_build_is_no_verdict(builder, monkeypatch):
    full = with_first_line("raise OSError(28, 'No space left on device')")
    assert isinstance(builder.build(full), Rejected)  # the known file builds: it filled its own
    monkeypatch.setattr("kagent_sandbox.builder.client.known_request", lambda target: full)
    with pytest.raises(MachineError, match="see to memory and disk"):
        builder.build(full)


def test_a_build_under_way_when_the_builder_is_closed_ends_and_starts_no_other_server():
    found = []

    def build():
        try:
            found.append(builder.build(with_first_line("while True: pass")))
        except ChildDied as e:
            found.append(e)

    with Builder() as builder:
        assert isinstance(builder.build(REQUEST), Built)
        server = builder._server.pid
        thread = threading.Thread(target=build)
        thread.start()
        while not any(map(process_tree.children, process_tree.children(server))):
            assert thread.is_alive()
            time.sleep(0.01)
    thread.join()
    assert isinstance(found[0], ChildDied), found
    assert builder._server._process is None
    with pytest.raises(ChildDied, match="closed"):
        builder.build(REQUEST)


LONG = dataclasses.replace(
    REQUEST, source=f"{REQUEST.source}\nx = 0\nwhile x < 5_000_000: x += 1\n"
)


@pytest.mark.parametrize("killed", [True, False])
def test_builds_beside_one_that_restarts_the_server_are_done_once_more(
    builder, monkeypatch, killed
):
    """Their processes end with the old server: no candidate has anything to do with it."""
    found, real = [], builder._built
    threads = [threading.Thread(target=lambda: found.append(builder.build(LONG))) for _ in range(3)]
    monkeypatch.setattr(builder, "_slots", threading.BoundedSemaphore(4))
    server = builder._server.pid
    for thread in threads:
        thread.start()
    while sum(bool(process_tree.children(p)) for p in process_tree.children(server)) < 3:
        time.sleep(0.01)
    if killed:
        os.kill(server, signal.SIGKILL)
    else:
        errors = [ChildDied("a supervisor did not end its child within 30 s")]
        monkeypatch.setattr(
            builder, "_built", lambda *a: real(*a) if not errors else throw(errors.pop())
        )
    assert isinstance(builder.build(REQUEST), Built)
    for thread in threads:
        thread.join()
    assert [type(each) for each in found] == [Built] * 3, found
    assert builder._server.pid != server


def throw(error):
    raise error
