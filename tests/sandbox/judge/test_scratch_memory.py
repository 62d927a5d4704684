"""A candidate whose scratch memory leaves too little of the device for the judge's own work."""

import contextlib
from dataclasses import replace

import pytest
from handmade_candidates import GOOD, REFERENCE, built, write_small_task
from kagent_sandbox.data.build import Contender
from kagent_sandbox.data.device import Ceilings
from kagent_sandbox.data.plan import Alloc, Buffer
from kagent_sandbox.data.task import load_task
from kagent_sandbox.data.verdict import Rejected, Status
from kagent_sandbox.device import device_memory
from kagent_sandbox.device.cpu.backend import CpuBackend
from kagent_sandbox.device.device_memory import MemoryUse
from kagent_sandbox.errors import DeviceFull, TaskError
from kagent_sandbox.judge.check import inputs
from kagent_sandbox.judge.judge import Judge
from kagent_sandbox.judge.timing import race

SEED = 5
MIB = 1 << 20
TOTAL = 100 * MIB
FULL = """
    import pathlib
    if pathlib.Path(__file__).with_name("full").exists():
        text = f"CUDA out of memory. Tried to allocate 10.00 MiB. GPU 0 has a total"
        raise torch.OutOfMemoryError(text)
"""


def with_scratch(candidate, mib):
    plans = {
        key: replace(
            plan,
            buffers=(*plan.buffers, Buffer(9, "scratch", mib * MIB)),
            ops=(Alloc(9), *plan.ops),
        )
        for key, plan in candidate.plans.items()
    }
    return replace(candidate, plans=plans)


@pytest.fixture
def full(tmp_path):
    """A file: while it is there, the reference lacks 10 MiB."""
    return tmp_path / "full"


@pytest.fixture
def use(monkeypatch, full):
    """Memory of a device of 100 MiB, most of which is there for others once more when it is
    read.
    """
    found = []

    def memory_use(_device, arena_bytes=0):
        full.unlink()
        return replace(found[-1], arena=arena_bytes)

    monkeypatch.setattr(inputs, "available_bytes", lambda: 0)
    monkeypatch.setattr(device_memory, "memory_use", memory_use)
    monkeypatch.setattr(race, "memory_use", memory_use)
    found.append(MemoryUse(TOTAL, 0, 0, 20 * MIB))
    return found


@pytest.fixture
def judge(tmp_path, full, shared):
    folder = write_small_task(tmp_path)
    text = REFERENCE.replace("def reference(*, x):", f"def reference(*, x):{FULL}")
    (folder / "reference.py").write_text(text)
    with contextlib.closing(Judge(load_task(folder), CpuBackend(), SEED)) as judge:
        judge.backend.settle = lambda: None
        judge._ceilings = Ceilings(10.0 / 16, 10.0 / 16, 10.0 / 16, {"float32": 0.1 / 16})
        judge.baselines_us.update(wide=1e3, tall=1e3)
        full.touch()
        yield judge


def verdict_on(judge, candidate, how):
    return {
        "check": lambda: judge.check(candidate),
        "examine": lambda: judge.examine(candidate, bench_shapes=False).failed[0],
        "measure": lambda: judge.measure(candidate, ()),
    }[how]()


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("how", ["check", "examine", "measure"])
def test_scratch_memory_that_is_decisive_is_the_candidates_fault(judge, use, how):
    candidate = with_scratch(built(judge.task, SEED, GOOD), 60)
    verdict = verdict_on(judge, candidate, how)
    assert isinstance(verdict, Rejected)
    assert verdict.status is Status.RESOURCE_LIMIT
    assert "too little is left for the reference" in verdict.message


def test_others_that_hold_the_memory_are_no_fault_of_a_candidate(judge, use):
    with pytest.raises(DeviceFull):
        judge.check(built(judge.task, SEED, GOOD))


def test_beside_others_nobody_is_blamed(judge, use):
    """It is asked again alone."""
    judge.alone = False
    with pytest.raises(DeviceFull):
        judge.check(with_scratch(built(judge.task, SEED, GOOD), 60))


def test_what_is_more_than_the_device_without_scratch_is_the_tasks_fault(judge, use):
    use.append(MemoryUse(TOTAL, 0, 0, 90 * MIB))
    with pytest.raises(TaskError, match="smaller cases, or a reference that keeps less"):
        judge.check(with_scratch(built(judge.task, SEED, GOOD), 60))


@pytest.mark.parametrize("peak_mib", [20, 90])
def test_the_host_computes_what_no_scratch_memory_is_to_blame_for(
    judge, use, monkeypatch, peak_mib
):
    monkeypatch.setattr(inputs, "available_bytes", lambda: 1 << 40)
    use.append(MemoryUse(TOTAL, 0, 0, peak_mib * MIB))
    assert not isinstance(judge.check(built(judge.task, SEED, GOOD)), Rejected)
    assert judge._checker.sampler.on_host
    judge.begin_request(alone=True)
    assert not judge._checker.sampler.on_host


def test_the_host_does_not_compute_in_the_place_of_a_candidate_that_took_the_memory(
    judge, use, monkeypatch
):
    """Else any candidate could have a reference take minutes."""
    monkeypatch.setattr(inputs, "available_bytes", lambda: 1 << 40)
    verdict = judge.check(with_scratch(built(judge.task, SEED, GOOD), 60))
    assert verdict.status is Status.RESOURCE_LIMIT
    assert not judge._checker.sampler.on_host


def test_a_race_goes_on_with_references_from_the_host(judge, use, monkeypatch):
    monkeypatch.setattr(inputs, "available_bytes", lambda: 1 << 40)
    good = built(judge.task, SEED, GOOD, race=True)
    found = judge.race([Contender("good", good, {})], hidden=True)
    assert judge._checker.sampler.on_host
    assert not found.failed
    assert len(found.cases) == len(judge.race_cases)


@pytest.mark.nightly
@pytest.mark.parametrize("first", [True, False])
def test_in_a_race_the_one_with_the_most_scratch_memory_is_out(judge, use, first):
    good = built(judge.task, SEED, GOOD, race=True)
    entrants = [Contender("good", good, {}), Contender("large", with_scratch(good, 60), {})]
    found = judge.race(entrants if first else entrants[::-1], hidden=True)
    assert list(found.failed) == ["large"]
    assert found.failed["large"].status is Status.RESOURCE_LIMIT
    assert list(found.overall) == ["good"]


def test_an_arena_that_a_race_cannot_have_is_the_largest_contenders_fault(judge, full):
    full.unlink()
    good = built(judge.task, SEED, GOOD, race=True)
    judge._arenas.limit_bytes = 100 * MIB
    entrants = [Contender("large", with_scratch(good, 60), {}), Contender("good", good, {})]
    found = judge.race(entrants, hidden=True)
    assert list(found.failed) == ["large"]
    assert list(found.overall) == ["good"]
