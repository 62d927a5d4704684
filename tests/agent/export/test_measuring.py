"""Tasks that are measured side by side, and turns on the device while host code is tried."""

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from kagent.config.settings import Config
from kagent.export import measuring
from kagent.export.measuring import LibraryEntrant, Measurement, measure_all
from kagent_sandbox.builder.compile.cpp import compile_cpp
from kagent_sandbox.data.task import load_task
from kagent_sandbox.errors import MachineError
from kagent_sandbox.process.device_lock import CPU, FOLDER, DeviceLock

SEEDS = Path(__file__).parents[3] / "seeds"


def wanted(*kinds):
    return [Measurement(SimpleNamespace(name=f"t{i}"), k, ()) for i, k in enumerate(kinds)]


def test_tasks_for_a_gpu_are_measured_side_by_side_and_keep_their_order(monkeypatch):
    both = threading.Barrier(2, timeout=30)
    said = []

    def measure(task, kind, entrants, config, say, on_open):
        both.wait()  # nobody gets past it alone
        say("timed")
        return task.name

    monkeypatch.setattr(measuring, "measure", measure)
    monkeypatch.setattr(measuring, "usable_cores", lambda: 8)
    assert measure_all(wanted("gpu", "gpu"), Config(), said.append) == ["t0", "t1"]
    assert sorted(said) == ["t0: timed", "t1: timed"]


def test_nothing_is_measured_beside_a_cpu(monkeypatch):
    inside = []

    def measure(task, kind, entrants, config, say):
        inside.append(task.name)
        assert threading.current_thread() is threading.main_thread()
        return kind

    monkeypatch.setattr(measuring, "measure", measure)
    assert measure_all(wanted("cpu", "gpu", "gpu"), Config(), print) == ["cpu", "gpu", "gpu"]
    assert inside == ["t0", "t1", "t2"]


def test_when_one_fails_the_judges_of_the_others_are_closed(monkeypatch):
    opened, closed = threading.Event(), threading.Event()

    def measure(task, kind, entrants, config, say, on_open):
        if task.name == "t0":
            assert opened.wait(30)
            raise MachineError("the GPU is gone")
        on_open(SimpleNamespace(close=closed.set))
        opened.set()
        assert closed.wait(30)

    monkeypatch.setattr(measuring, "measure", measure)
    monkeypatch.setattr(measuring, "usable_cores", lambda: 8)
    with pytest.raises(MachineError, match="the GPU is gone"):
        measure_all(wanted("gpu", "gpu"), Config(), print)
    assert closed.is_set()


def test_the_first_failure_ends_the_others_whenever_they_open_their_judges(monkeypatch):
    fails, closed = threading.Event(), threading.Event()

    def measure(task, kind, entrants, config, say, on_open):
        if task.name == "t1":
            fails.set()
            raise MachineError("the GPU is gone")
        assert fails.wait(30)
        judge = SimpleNamespace(close=closed.set)
        for _ in range(1000):  # its machine is being opened meanwhile
            on_open(judge)
            if closed.wait(0.01):
                break
        raise MachineError("closed")

    monkeypatch.setattr(measuring, "measure", measure)
    monkeypatch.setattr(measuring, "usable_cores", lambda: 8)
    with pytest.raises(MachineError, match="the GPU is gone"):
        measure_all(wanted("gpu", "gpu"), Config(), print)


def test_host_code_is_tried_in_a_turn_on_the_device(monkeypatch, tmp_path):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    task = load_task(SEEDS / "gelu")
    case = task.cases("cpu").check[0]
    seen = []

    class Watching:
        def compare(self, *_, **__):
            seen.extend(process for process, _ in DeviceLock(CPU).turns())

        end = compare

    verified = measuring._Verified(None, task, "cpu", [case], [], print)
    verified._choice["k"] = {}
    request = SimpleNamespace(cases=[case], source="", entry="gelu")
    built = SimpleNamespace(plans={(0, case.name): None}, configs=[{}])
    assert verified._replay(LibraryEntrant("k", "", 1, {}), request, built, Watching()) is None
    verified.end(Watching())
    assert seen == [os.getpid()] * 2
    assert DeviceLock(CPU).turns() == []


ASKING = """
#include <cstdlib>
extern "C" void gelu(const float* x, float* y) { y[0] = std::getenv("SHLVL") ? 42 : x[0]; }
"""


def test_native_code_that_asks_who_calls_it_is_refused_before_it_is_judged():
    """In a judge's environment it is right, and in a user's it is not."""

    @dataclass
    class Request:
        max_configs: int = 1

    built = SimpleNamespace(target="cpu", binaries={"b": compile_cpp("gelu", ASKING)})
    machine = SimpleNamespace(
        request=lambda _: Request(),
        race_request=None,
        builder=SimpleNamespace(build=lambda _: built),
    )
    verified = measuring._Verified(machine, load_task(SEEDS / "gelu"), "cpu", [], [], print)
    result = verified.verify(LibraryEntrant("k", "", 1, {}), None)
    assert result.refused.startswith("asks by getenv where, when or by whom it is called")
