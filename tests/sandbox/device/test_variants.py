import pytest
import torch
from kagent_sandbox.device.variants import (
    SLOW_S,
    VERY_SLOW_S,
    choosing_variants,
    running_slow_ones_once,
)


@pytest.fixture
def did():
    return []


@pytest.mark.parametrize(
    ("runs_s", "ms", "by_torch"),
    [
        ([SLOW_S / 2], 7.0, True),
        ([SLOW_S, SLOW_S / 2], 7.0, True),  # what the first run loaded is not its time
        ([2 * SLOW_S, 1.5], 1500.0, False),
        ([VERY_SLOW_S], 1000.0, False),
    ],
)
def test_what_is_slow_runs_twice_at_most_and_is_not_left_to_torch(runs_s, ms, by_torch, did):
    now, took, pending = [0.0], iter(runs_s), []

    def wait():
        now[0] += sum(pending)
        pending.clear()

    def torchs_own(_benchmarker, _call, rep):
        did.append(rep)
        return 7.0

    time_ms = running_slow_ones_once(torchs_own, lambda: now[0], wait)
    pending.append(100.0)  # of others, enqueued before
    assert time_ms(None, lambda: pending.append(next(took)), rep=40) == ms
    assert did == ([40] if by_torch else [])
    assert next(took, None) is None


def test_whoever_makes_a_baseline_times_slow_variants_once(monkeypatch, did):
    from torch._inductor.runtime import benchmarking

    kind = type(benchmarking.benchmarker)
    now = [0.0]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr("kagent_sandbox.device.variants.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(kind, "benchmark_gpu", lambda _self, _call, **_named: did.append("torch"))

    def call():
        did.append("run")
        now[0] += VERY_SLOW_S

    with choosing_variants(torch.device("cpu")):
        assert benchmarking.benchmarker.benchmark(call, device="cuda") == 1e3 * VERY_SLOW_S
    assert did == ["run"]
    benchmarking.benchmarker.benchmark(call, device="cuda")
    assert did == ["run", "torch"]
