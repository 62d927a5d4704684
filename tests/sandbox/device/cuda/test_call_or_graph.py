"""A baseline is called from Python only where that is faster whatever the host does meanwhile."""

import random
import statistics
from dataclasses import dataclass

import pytest
from kagent_sandbox.device.cuda.baselines import call_is_faster

FLUSH_US = 95.0
OWN_US = 6.0  # of the host, for a flush and two events


@dataclass(frozen=True)
class ScriptedWork:
    """Work that takes the host and the device given times, give or take 10 and 0.5 %."""

    host_us: float
    device_us: float

    def __call__(self):
        raise AssertionError("a scripted clock runs nothing")


class ScriptedQueue:
    """`Clock` on a host and a device of which each begins when it is free and the work is there."""

    def __init__(self, seed):
        self._random = random.Random(seed)

    def flush(self):
        raise AssertionError("a scripted clock runs nothing")

    def _times(self, work):
        if work == self.flush:
            return OWN_US, FLUSH_US
        host_us = work.host_us * self._random.uniform(0.9, 1.1)
        return host_us, work.device_us * self._random.uniform(0.995, 1.005)

    def samples(self, work, count):
        host, device, found = 0.0, FLUSH_US, []
        for i in range(count):
            host += OWN_US
            device = start = max(device, host) + FLUSH_US
            host_us, device_us = self._times(work[i % len(work)])
            host += host_us
            device = max(device, host) + device_us
            found.append(device - start)
        return found

    def enqueue_us(self, work, count):
        return [self._times(work)[0] for _ in range(count)]


def chosen(call, graph):
    """In how many of 200 trials the call was chosen."""
    return sum(call_is_faster(call, graph, ScriptedQueue(seed)) for seed in range(200))


def test_a_median_does_not_tell_whether_the_device_waits():
    """Of a call that takes the host as long as flush and call take the device."""
    call = ScriptedWork(196.0, 101.0)
    trials = [ScriptedQueue(seed).samples([call], 10) for seed in range(200)]
    assert min(map(statistics.median, trials)) < 101.2
    assert max(map(max, trials)) > 130


@pytest.mark.parametrize(
    ("call", "graph"),
    [
        (ScriptedWork(20.0, 363.0), ScriptedWork(5.0, 446.0)),  # a memcpy node
        (ScriptedWork(60.0, 101.0), ScriptedWork(5.0, 120.0)),
        (ScriptedWork(2000.0, 39000.0), ScriptedWork(40.0, 41000.0)),  # many kernels
    ],
)
def test_a_call_that_is_surely_faster_counts(call, graph):
    assert chosen(call, graph) == 200


@pytest.mark.parametrize("host_us", [100.0, 150.0, 180.0, 196.0, 210.0, 400.0])
@pytest.mark.parametrize("graph_us", [101.0, 103.0, 110.0, 150.0])
def test_a_call_that_fills_the_hosts_time_never_counts(host_us, graph_us):
    """Whatever the graph takes, and also where each of the trial's samples is a good one."""
    assert chosen(ScriptedWork(host_us * 1.1, 101.0), ScriptedWork(5.0, graph_us)) == 0


@pytest.mark.parametrize("host_us", [5.0, 60.0])
def test_of_two_equal_ways_the_graph_counts(host_us):
    """Nearly always; and a call that counts is no slower."""
    assert chosen(ScriptedWork(host_us, 101.0), ScriptedWork(5.0, 101.0)) <= 10


@pytest.mark.parametrize("factor", [0.01, 20.0])
@pytest.mark.parametrize("disturbed", ["call", "graph"])
def test_one_outlier_decides_nothing(disturbed, factor):
    """A neighbour that took the host or the device for one sample of either."""

    class Disturbed(ScriptedQueue):
        def __init__(self, seed, work):
            super().__init__(seed)
            self._at, self._work = seed % 10, work

        def samples(self, work, count):
            found = super().samples(work, count)
            for i in range(count if work == [self._work] else 0):
                found[i] *= factor if self._at == 0 else 1
                self._at -= 1
            return found

    def counts(call, graph):
        work = {"call": call, "graph": graph}[disturbed]
        return sum(call_is_faster(call, graph, Disturbed(seed, work)) for seed in range(200))

    assert counts(ScriptedWork(20.0, 363.0), ScriptedWork(5.0, 446.0)) == 200
    assert counts(ScriptedWork(20.0, 446.0), ScriptedWork(5.0, 363.0)) == 0


@pytest.mark.parametrize("drift", [1.01, 1 / 1.01])
def test_a_device_whose_clock_drifts_meanwhile_decides_nothing(drift):
    """Whoever is timed first, or last, would look faster."""

    class Drifting(ScriptedQueue):
        factor = 1.0

        def samples(self, work, count):
            self.factor *= drift ** (count / 5)
            return [us * self.factor for us in super().samples(work, count)]

    def counts(call_us, graph_us):
        ways = ScriptedWork(20.0, call_us), ScriptedWork(5.0, graph_us)
        return sum(call_is_faster(*ways, Drifting(seed)) for seed in range(200))

    assert counts(300.0, 315.0) == 200
    assert counts(303.0, 300.0) == 0


def test_slow_samples_of_a_call_decide():
    """Faster by the median, and slower than the graph in two samples of ten."""

    class Bimodal(ScriptedQueue):
        def samples(self, work, count):
            found = super().samples(work, count)
            return [
                us * (1.5 if i % 5 == 4 else 1) if work == [call] else us
                for i, us in enumerate(found)
            ]

    call, graph = ScriptedWork(5.0, 95.0), ScriptedWork(5.0, 101.0)
    assert not any(call_is_faster(call, graph, Bimodal(seed)) for seed in range(50))
    assert chosen(call, graph) == 200
