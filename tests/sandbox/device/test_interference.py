"""Neighbours and clocks: planted readings, and a neighbour that is really busy."""

import os
import subprocess
import sys
import time

import pytest
from background_load import busy
from kagent_sandbox.device.cuda.nvml import read_gpu, watch_gpu
from kagent_sandbox.device.interference import (
    GpuReading,
    GpuWatch,
    HostReading,
    HostWatch,
    host_notes,
    read_host,
)

SPIN = "print(flush=True)\nwhile True: pass"


def host(at_s, busy_s=0.0, stolen_s=0.0, own_s=0.0, waited_s=0.0, mhz=()):
    return HostReading(at_s, busy_s, stolen_s, own_s, waited_s, mhz)


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (host(1.0, busy_s=0.9, own_s=0.9), []),
        (host(1.0, busy_s=1.9, own_s=0.9), ["other programs used 1.0 cores"]),
        (host(1.0, stolen_s=0.5), ["the hypervisor took 0.5 cores away"]),
        (host(1.0, waited_s=0.25), ["had no core for 25% of the time"]),
        (host(1.0, mhz=(2400.0, 1000.0)), ["clock went from 3000 to 2400 MHz"]),
        (host(1.0, mhz=(1000.0, 2990.0)), []),
        (host(0.01, busy_s=1.0), []),
    ],
)
def test_readings_of_the_host_say_what_disturbed(after, said):
    notes = host_notes(host(0.0, mhz=(3000.0, 1000.0)), after)
    assert len(notes) == len(said)
    assert all(text in note for text, note in zip(said, notes, strict=True))


def test_the_host_is_read_from_what_the_kernel_tells(tmp_path):
    tick = 1 / os.sysconf("SC_CLK_TCK")
    for pid, ticks, waited_ns in ((77, 30, 900000000), (78, 12, 2500000000)):
        process = tmp_path / "proc" / str(pid)
        (process / "task" / str(pid)).mkdir(parents=True)
        (process / "stat").write_text(f"1 (a) b) S 1 1 1 0 -1 0 0 0 0 0 {ticks} 0 0 0 20 0 1 0\n")
        (process / "task" / str(pid) / "schedstat").write_text(f"5 {waited_ns} 3\n")
    (tmp_path / "proc" / "stat").write_text("cpu 100 20 30 900 50 1 2 40 0 0\ncpu0 1 2 3\n")
    cpu = tmp_path / "sys/devices/system/cpu/cpu0/cpufreq"
    cpu.mkdir(parents=True)
    (cpu / "scaling_cur_freq").write_text("2450000\n")
    found = read_host(tmp_path, 77, children=[78])
    assert found.busy_s == pytest.approx(153 * tick)
    assert found.stolen_s == pytest.approx(40 * tick)
    assert found.own_s == pytest.approx(42 * tick)
    assert found.waited_s == pytest.approx(2.5)  # the judge's own threads time nothing
    assert found.core_mhz == (2450.0,)
    nothing = read_host(tmp_path / "absent", 77, children=[78])
    assert (nothing.busy_s, nothing.waited_s, nothing.core_mhz) == (0.0, 0.0, ())


def test_a_busy_neighbour_is_noticed():
    watch = HostWatch()
    with busy(len(os.sched_getaffinity(0))):
        watch.begin()
        time.sleep(1.0)
        notes = watch.notes()
    assert any("other programs used" in note for note in notes), notes


def test_a_machine_that_others_use_most_of_is_crowded():
    readings = iter([host(0.0), host(1.0, busy_s=1.9, own_s=0.5), host(2.0, busy_s=2.1, own_s=1.7)])
    watch = HostWatch(lambda: next(readings), cores=2)
    assert not watch.crowded()
    watch.begin()
    assert watch.crowded()  # 1.4 of 2 cores
    assert not watch.crowded()  # over two seconds 0.2


def test_a_machine_whose_hypervisor_takes_much_is_crowded():
    readings = iter([host(0.0), host(1.0, stolen_s=0.2), host(2.0, stolen_s=0.9)])
    watch = HostWatch(lambda: next(readings), cores=2)
    watch.begin()
    assert not watch.crowded()  # 0.2 of 2 cores
    assert watch.crowded()  # over two seconds 0.45


def test_a_gpu_that_others_use_is_crowded():
    nvml = Planted(users={1: 40, 2: 60})
    gpu = GpuWatch(lambda: read_gpu(nvml, {1}))
    gpu.begin()
    assert gpu.crowded()
    nvml.told["users"] = None  # nothing since the reading before
    assert gpu.crowded()
    gpu.begin()
    assert not gpu.crowded()


def test_own_work_is_no_neighbour():
    before = read_host()
    child = subprocess.Popen([sys.executable, "-c", SPIN], stdout=subprocess.PIPE)
    child.stdout.readline()
    for _ in range(10):  # on a busy machine it has a core late
        time.sleep(0.5)
        if (own_s := read_host().own_s - before.own_s) > 0.05:
            break
    child.kill()
    child.wait()
    child.stdout.close()
    assert own_s > 0.05


class Planted:
    """A GPU that tells what it is told to."""

    def __init__(self, mhz=1980, reasons=0, users=None):
        self.told = {"mhz": mhz, "reasons": reasons, "users": users}

    def sm_mhz(self):
        return self.told["mhz"]

    def reasons(self):
        return self.told["reasons"]

    def users(self):
        return self.told["users"]


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        ({}, {}, []),
        ({}, {"mhz": 1950}, []),
        ({}, {"mhz": 1500}, ["clock went from 1980 to 1500 MHz"]),
        ({}, {"reasons": 0x40 | 0x08}, ["slowed down: hardware slowdown, too hot (hardware)"]),
        ({}, {"reasons": 0x04 | 0x01}, []),
        ({}, {"users": {1: 90, 2: 40}}, ["1 other process used the GPU (40% of its time)"]),
        ({}, {"users": {1: 90, 2: 1}}, []),
        ({}, {"users": {71: 90, 72: 40}}, []),
        ({"mhz": None, "reasons": None}, {"mhz": None, "reasons": None, "users": None}, []),
    ],
)
def test_readings_of_a_gpu_say_what_disturbed(then, now, said):
    nvml = Planted(**then)
    watch = GpuWatch(lambda: read_gpu(nvml, {1}))
    watch.begin()
    nvml.told.update(now)
    notes = watch.notes()
    assert len(notes) == len(said)
    assert all(text in note for text, note in zip(said, notes, strict=True))


def test_without_the_library_nothing_is_said(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", missing)
    watch = watch_gpu("00000000:1B:00.0")
    watch.begin()
    assert list(watch.notes()) == []


def test_a_reading_names_throttling_and_clock():
    reading = read_gpu(Planted(1200, 0x20), {1})
    assert reading == GpuReading(1200.0, ("too hot (driver)",), {})
